"""Show where a training step's time and memory go."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.commands import OVERRIDES, compose_arguments
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.processes import variables
from samewise.runner.processes.this_process import is_rank
from samewise.runner.records.files import require_writable
from samewise.runner.records.folder import beside

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed

ARGUMENTS = {
    **OVERRIDES,
    "--steps": {
        "type": int,
        "default": 10,
        "metavar": "N",
        "help": "how many steps to measure (default: 10)",
    },
    "--traced": {
        "type": int,
        "default": 3,
        "metavar": "N",
        "help": "additional steps to record with torch's profiler; 0: no trace (default: 3)",
    },
    "--by": {
        "choices": ["operators", "layers", "functions"],
        "default": "operators",
        "help": "what to print the traced time of: operators (default), or the layers or functions "
        "that call them; profile.json has all",
    },
    "--out": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "where to write the files (default: profiles/NAME/FINGERPRINT; -2, -3, ... if that "
        "exists)",
    },
    "--json": {"action": "store_true", "help": "print what was measured as JSON"},
}
EXAMPLES = """\
Takes a few steps of the experiment and shows where their time goes: data, transfer, transforms, forward, backward, exchange, optimizer, trace, callbacks,
tracking, other. The shares add up to the step. docs/performance.md has the settings that change each of them.

It trains in a temporary folder: it creates no run, and leaves existing runs as they are. The steps compute what `train` computes, to the bit.

Files that it writes:
  rank-0.trace.json.gz    one for each process: operators, Python calls, shapes, memory, and the parts above as named ranges; drop it on https://ui.perfetto.dev
  rank-0.memory.pickle    on CUDA: every allocation, for https://pytorch.org/memory_viz
  profile.json            the figures
On CUDA the ranges are NVTX ranges too, for Nsight Systems:
  nsys profile samewise profile experiment=resnet50_imagenet --traced 0

examples:
  samewise profile experiment=resnet18_digits
  samewise profile experiment=resnet18_digits loader.num_workers=2                    did it help?
  samewise profile experiment=resnet18_digits replicas=2 strategy=elastic strategy.nproc=2
  samewise profile experiment=resnet18_digits --by layers
  samewise profile experiment=resnet18_digits --steps 50 --traced 0 --json"""


def run(args: argparse.Namespace) -> int:
    """Measure, print and write a profile."""
    for name, minimum in (("steps", 1), ("traced", 0)):
        ConfigError.raise_if(
            getattr(args, name) < minimum,
            f"--{name}",
            f"must be at least {minimum}",
            getattr(args, name),
        )
    composed = prepare_composed(args)
    from omegaconf import OmegaConf
    from torch.autograd.profiler_util import FunctionEvent

    from samewise.runner.measuring import profile
    from samewise.runner.training.launch import launch, processes, rank

    if args.by == "functions" and "is_python_function" not in signature(FunctionEvent).parameters:
        hint = "`--by layers` works with this one; the trace for Perfetto has functions"
        raise ConfigError(Problem("--by", "needs a newer torch", args.by, hint=hint))

    out = folder_for(args.out, composed)
    options = {name: getattr(args, name) for name in ("json", "by", "steps", "traced")}
    options |= {"out": str(out)}
    composed_there = replace(composed, place=out, cfg=copy.deepcopy(composed.cfg))
    with remove_if_empty(out):
        if is_rank():
            rank(
                composed_there,
                as_json=args.json,
                look=lambda: None,
                check=lambda: None,
                work=partial(profile.profile_rank, options=options),
            )
        elif (rank_count := processes(composed)) > 1:
            # torch's profiler itself has crashed, once in some hundred times
            OmegaConf.update(composed_there.cfg, "strategy.max_restarts", 1)
            launch(
                composed_there,
                rank_count,
                as_json=args.json,
                debug=args.debug,
                function=f"{profile.__name__}:profile_rank",
                options=options,
            )
            # Output of the ranks only explains a failure
            shutil.rmtree(out / "ranks")
        else:
            profile.profile_rank(composed, options)
    return 0


@contextmanager
def remove_if_empty(out: Path) -> Generator[None]:
    """Remove a folder that is still empty if the body fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            out.rmdir()
        raise


def prepare_composed(args: argparse.Namespace) -> Composed:
    """Compose and check the arguments' experiment, and prepare this process for it."""
    from samewise.runner.config.check import check, settings_are_sound

    # Silence the profiler's messages about missing devices. torch reads these when it is imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    composed = compose_arguments(args, strict=False)
    if settings_are_sound(composed):
        variables.prepare(composed.cfg.reproducibility)
    check(composed, composed.project)
    return composed


def folder_for(requested: Path | None, composed: Composed) -> Path:
    """Create and return the empty folder to write to."""
    out: Any = requested or beside(Path("profiles") / composed.name / composed.fingerprint[:12])
    ConfigError.raise_if(
        os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())),
        "--out",
        "is not an empty folder",
        str(out),
        hint="choose another folder; existing files are not overwritten",
    )
    require_writable("--out", out)
    out.mkdir(parents=True, exist_ok=True)
    return out.resolve()
