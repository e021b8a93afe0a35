"""Rewrites reachable.txt: everything that a config can call, with its kind; a function also with what it returns, which is why it may be called."""

import warnings
from pathlib import Path

import torchvision

from samewise.runner.config.slots import known_slots, return_class


def reachable() -> dict[str, str]:
    """By the shortest name: its kind, and `class` or what a function returns."""
    return {
        names[0]: f"{kind.description}, {'class' if isinstance(one, type) else 'returns ' + getattr(return_class(one), '__name__', '')}"
        for (kind, one), names in known_slots().items()
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    lines = [f"{name}  {how}" for name, how in sorted(reachable().items())]
    head = f"# torchvision {torchvision.__version__.partition('+')[0]}"
    Path(__file__).with_name("reachable.txt").write_text("\n".join([head, *lines]) + "\n")
