"""Four frames lead from the command line to the optimizer, so that a reader finds the loop at once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from samewise.runner.training import loop


def test_four_frames_lead_from_the_command_to_the_optimizer_step(samewise: Callable[..., Any], tmp_path: Path) -> None:
    frames = list[str]()

    def look(*arguments: Any) -> None:
        frame, found = sys._getframe(1), list[str]()
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("samewise."):
                found.append(f"{frame.f_globals['__name__'].removeprefix('samewise.runner.')}.{frame.f_code.co_name}")
            frame = frame.f_back
        frames[:] = reversed(found)

    handle = register_optimizer_step_pre_hook(look)
    try:
        done = samewise(
            "train",
            "experiment=resnet18_digits",
            "debug=tiny",
            "model.width=4",
            "tracking=none",
            "evaluate.pictures=false",
            "max_steps=1",
            f"run_root={tmp_path}",
        )
    finally:
        handle.remove()
    assert done.returncode == 0, done.stderr
    assert frames == ["cli.main", "commands.train.run", "training.loop.fit", "training.loop.train_step"]


def test_the_loop_fits_on_one_screen() -> None:
    assert sum(len(inspect.getsource(function).splitlines()) for function in (loop.fit, loop.train_step, loop.forward)) <= 60
