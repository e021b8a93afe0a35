"""Shared by tests of exports: a small experiment, and the result of `samewise verify` for the folder of an export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TINY = ["debug=tiny", "max_steps=2", "evaluate.pictures=false", "tracking=none"]


def trained_in(root: Path) -> Path:
    """The folder of a small run below a root."""
    from samewise.runner.cli import main

    small = ["model=resnet20_cifar", "model.depth=8", "model.width=4", "dataset.image_size=16"]
    assert main(["train", "experiment=resnet18_digits", *TINY, *small, f"run_root={root}"]) == 0
    return next(root.glob("resnet18_digits/*"))


def verified(samewise: Callable[..., Any], folder: Path, code: int, *options: str) -> dict[str, dict[str, Any]]:
    """The results by format; `code` is the expected exit code."""
    done = samewise("verify", folder, "--json", *options)
    assert done.returncode == code, done.stderr
    return {one["format"]: one for one in json.loads(done.stdout)["formats"]}
