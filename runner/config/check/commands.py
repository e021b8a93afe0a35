"""Rules for settings reserved for the user: what a launcher runs, and where tracking sends.

Shell lines, images and volumes run with the user's rights, so others' files may not set them.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samewise.runner.config.compose import Composed
from samewise.runner.config.origins import OURS
from samewise.runner.config.project import Project
from samewise.runner.config.tree import flat, plain
from samewise.runner.errors import Problem

HARMLESS = (
    "_target_",
    "partition",
    "time",
    "account",
    "qos",
    "mem",
    "memory",
    "namespace",
    "gpus",
    "gpu_resource",
    "resources",
)
"""Settings of a launcher that name a part of a cluster or a size, and run nothing. Others that are
no single number or switch may (`pod: {hostPID: true}`)."""


def problems(composed: Composed, project: Project) -> list[Problem]:
    """Problems for settings in config files that only the user may set."""
    return [*_commands_are_yours(composed, project), *_addresses_are_yours(composed, project)]


def _commands_are_yours(composed: Composed, project: Project) -> Iterator[Problem]:
    risky = {
        path: value
        for path, value in flat(plain(composed.cfg.launcher) or {})
        if (isinstance(value, str) or "." in path) and path.partition(".")[0] not in HARMLESS
    }
    for path, value in risky.items():
        origin, name = composed.set_by.get(f"launcher.{path}", ""), path.partition(".")[0]
        if not _is_yours(origin, project):
            override = shlex.quote(
                f"launcher.{name}={_format_override(plain(composed.cfg.launcher)[name])}"
            )
            yield Problem(
                f"launcher.{path}",
                "would be run or mounted with your rights, but a config file sets it",
                value,
                "the command line, or a launcher/NAME.yaml in the project's own folder of configs",
                f"look at what it does; if you want it, give it on the command line: {override}",
                origin,
            )


def _addresses_are_yours(composed: Composed, project: Project) -> Iterator[Problem]:
    """Check who sets the addresses that a run is sent to, since the user's tokens go with it."""
    tracking = composed.cfg.tracking
    addresses = (
        {name: str(tracking[name] or "") for name in ("uri", "artifact_location")}
        if tracking.enabled and project.outside_configs
        else {}
    )
    remote = {
        name: value
        for name, value in addresses.items()
        # MLflow takes the bare word `databricks` for an address
        if ("://" in value and not value.startswith("sqlite")) or value == "databricks"
    }
    if tracking.enabled and project.outside_configs and "wandb" in tracking.report_to:
        remote["report_to"] = "[wandb]"
    for name, value in remote.items():
        origin = next(
            (
                file
                for path, file in composed.set_by.items()
                if f"{path}.".startswith(f"tracking.{name}.")
            ),
            "",
        )
        if any(Path(origin).is_relative_to(folder) for folder in project.outside_configs):
            yield Problem(
                f"tracking.{name}",
                "is an address set by a config file, to which the run's records and your "
                "tokens would be sent",
                value,
                "an address from the command line or from your own project",
                f"if you want it, give it on the command line: tracking.{name}={value}",
                origin,
            )


def _format_override(value: Any) -> str:
    """Format a value as an override: keys are written as bare words."""
    return (
        f"{{{', '.join(f'{key}: {_format_override(part)}' for key, part in value.items())}}}"
        if isinstance(value, dict)
        else json.dumps(value)
    )


def _is_yours(origin: str, project: Project) -> bool:
    if origin.startswith("override "):
        return True
    # An experiment's file in some folder called `launcher` is not a launcher's
    return origin.startswith(f"{OURS}launcher/") or Path(origin.rpartition(":")[0]).parent in [
        folder / "launcher" for folder in project.configs if folder not in project.outside_configs
    ]
