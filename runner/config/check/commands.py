"""A rule for what a launcher is told to run: shell lines, images, volumes come from the command line or the project's own launcher, not from an experiment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from samewise.runner.config.compose import Composed, origins
from samewise.runner.config.project import Project
from samewise.runner.config.tree import flat, plain
from samewise.runner.errors import Problem

HARMLESS = ("_target_", "partition", "time", "account", "qos", "mem", "memory", "namespace", "gpus", "gpu_resource")
"""Words of a launcher's that name a part of a cluster or a size, and run nothing."""


def problems(composed: Composed, project: Project) -> list[Problem]:
    """What a config file sets that only the user may set."""
    return list(_commands_are_yours(composed, project))


def _commands_are_yours(composed: Composed, project: Project) -> Iterator[Problem]:
    told = {path: value for path, value in flat(plain(composed.cfg.launcher) or {}) if isinstance(value, str) and path.partition(".")[0] not in HARMLESS}
    where = origins(composed.overrides, project=project) if told else {}
    for path, value in told.items():
        origin = where.get(f"launcher.{path}", "a config file")
        if not _is_yours(origin, project):
            words = f"is set by {origin}, and would be run or mounted as yours"
            hint = f"launcher.{path.partition('.')[0]}=VALUE"
            yield Problem(f"launcher.{path}", words, value, "the command line, or a launcher/NAME.yaml in the project's own folder of configs", hint)


def _is_yours(origin: str, project: Project) -> bool:
    if origin.startswith("override "):
        return True
    file = Path(origin)
    return file.parent.name == "launcher" and not any(file.is_relative_to(folder) for folder in project.given)
