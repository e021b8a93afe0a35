"""Rewrites reachable.txt: everything that a config can call, with its kind; a function also with what it returns, which is why it may be called."""

from __future__ import annotations

import warnings
from pathlib import Path

import torchvision

from samewise.runner.config.slots import reachable

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    lines = [f"{name}  {kind}, {how}" for name, (kind, how) in sorted(reachable().items())]
    head = f"# torchvision {torchvision.__version__.partition('+')[0]}"
    Path(__file__).with_name("reachable.txt").write_text("\n".join([head, *lines]) + "\n")
