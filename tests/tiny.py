"""What many tests share: the smallest training, some steps on handwritten digits, recorded in the run's folder and nowhere else; and a project of one module."""

from collections.abc import Mapping
from pathlib import Path

import pytest

QUIET = ["debug=tiny", "tracking=none", "evaluate.pictures=false", "callbacks=none"]
DIGITS = ["experiment=resnet18_digits", *QUIET]


def work_in_project(folder: Path, patch: pytest.MonkeyPatch, name: str, code: str, configs: Mapping[str, str] = {}) -> None:
    """Make a project with a module, and with configs by their paths below configs/, and go there for the rest of the test."""
    settings = f'[tool.samewise]\npackages = ["{name}"]\n' + 'configs = "configs"\n' * bool(configs)
    files = {f"{name}.py": code, "pyproject.toml": settings, **{f"configs/{path}.yaml": text for path, text in configs.items()}}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
