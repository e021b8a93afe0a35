"""A project whose code an experiment reaches, for tests that edit it. Tests import this as `samewise_runner_lab_of_code`."""

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import QUIET

TINY = [*QUIET, "dataset=digits", "transforms=images", "max_steps=4", "checkpoint.every_steps=2", "name=code"]

MODEL = ["~model", "+model={_target_:lab_of_code.net.Net}"]

FILES = {
    "pyproject.toml": '[tool.samewise]\npackages = ["lab_of_code"]\n',
    "lab_of_code/__init__.py": "",
    "lab_of_code/net.py": """
import torch
from torch import nn
from .parts import layers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = layers.head()

    def forward(self, pixels):
        return self.head(pixels.flatten(1))
""",
    "lab_of_code/parts/__init__.py": "",
    "lab_of_code/parts/layers.py": """
from torch import nn


def head():
    from helper_of_lab_of_code import WIDTH

    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
""",
    "lab_of_code/science.py": """
from samewise.recipes.classification import Classification
from samewise.runner.interfaces import Loss


class Science(Classification):
    def loss(self, *given):
        found = super().loss(*given)
        return Loss(found.total * 1.0, count=found.count)
""",
    "lab_of_code/data.py": """
from samewise.datasets.digits import Digits


class Marks(Digits):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "label": sample["label"] * 1}
""",
    "lab_of_code/unused.py": "raise RuntimeError\n",
    "helper_of_lab_of_code.py": "WIDTH = 16\n",
}

EXPERIMENT = [*TINY, *MODEL, "recipe._target_=lab_of_code.science.Science", "dataset.train._target_=lab_of_code.data.Marks"]


def forget() -> None:
    """Remove what a new process would not have: the modules of the lab, and its folder on the path."""
    for name in [name for name in sys.modules if "lab_of_code" in name]:
        del sys.modules[name]
    sys.path[:] = [place for place in sys.path if not (Path(place) / "lab_of_code").is_dir()]
    importlib.invalidate_caches()


def runs(lab: Path) -> list[Path]:
    return sorted((lab.parent / "runs" / "code").glob("*/"), key=lambda folder: folder.stat().st_ctime_ns)


def edit(file: Path, old: str = "", new: str = "\nEDITED = True\n") -> str:
    before = file.read_text()
    assert old in before
    write(file, before.replace(old, new, 1) if old else before + new)
    return before


def write(file: Path, text: str) -> None:
    """Python reuses bytecode for a source of the same length and second, so each version gets its own second."""
    at = file.stat().st_mtime + 2
    file.write_text(text)
    os.utime(file, (at, at))


EDITS = {
    "model": ("lab_of_code/net.py", "flatten(1)", "flatten(1) * 2", "Net.forward"),
    "layer": ("lab_of_code/parts/layers.py", "ReLU", "GELU", "head"),
    "loss": ("lab_of_code/science.py", "* 1.0", "* 2.0", "Science.loss"),
    "data set": ("lab_of_code/data.py", "* 1", "* 0", "Marks.__getitem__"),
    "helper two imports away": ("helper_of_lab_of_code.py", "16", "8", ""),
    "method that overrides another": ("lab_of_code/net.py", "    def forward", "    def eval(self):\n        return self\n\n    def forward", "Net, Net.eval"),
}


@contextlib.contextmanager
def at_work_in(project: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """Create the project in a folder and make it the current folder for the duration."""
    for name, text in FILES.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    monkeypatch.chdir(project)
    yield project
    forget()


def trainer(samewise: Callable[..., Any], root: Path) -> Callable[..., Any]:
    """A function that trains the experiment below a run root, as a new process would."""

    def train(*arguments: str) -> Any:
        forget()
        return samewise("train", *EXPERIMENT, f"run_root={root}", *arguments)

    return train


def fingerprint_in(lab: Path) -> Callable[[], str]:
    """A function that returns the experiment's fingerprint with the code as it is at that time."""
    from samewise.runner.config import compose, project

    experiment = compose.compose(EXPERIMENT, project=project.find(lab))
    return lambda: dataclasses.replace(experiment, project=project.find(lab)).fingerprint
