"""Compose and check all points of a sweep before any starts.

What points share is composed once.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from samewise.runner.config import other_choice
from samewise.runner.config import overrides as faults
from samewise.runner.config.compose import Composed, compose, dump_plain, label_of, settle
from samewise.runner.config.fingerprint import fingerprint_of
from samewise.runner.config.loader import Loader, apply
from samewise.runner.config.override_text import removed
from samewise.runner.config.project import Project
from samewise.runner.config.references import require_modest_references
from samewise.runner.config.tree import flat, plain
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.secrets import redact
from samewise.runner.sweepers.base import Setting
from samewise.runner.sweepers.space import Space


class Composer:
    """Composes points with similar command lines.

    The files of each choice of groups are read and merged once.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self._loader = Loader(project)
        self._groups = self._loader.groups()
        self._parser = OverridesParser.create()
        self._bases: dict[
            tuple[str, ...], tuple[DictConfig, dict[str, str], list[other_choice.Change]]
        ] = {}

    def is_group(self, key: str) -> bool:
        """Whether a key chooses from a group."""
        return key in self._groups

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose with errors in `problems`, and interpolations unchecked."""
        overrides = self._project.with_experiment(overrides)
        try:
            parsed = self._parser.parse_overrides(overrides)
            # Composed as a whole, which reports what cannot be removed
            if any(map(removed, parsed)):
                return compose(overrides, project=self._project, strict=False)
            group_choices = [
                override
                for override in parsed
                if override.key_or_group in self._groups and not isinstance(override.value(), dict)
            ]
            base, choices, changes = self._base(
                tuple(str(override.input_line) for override in group_choices)
            )
            cfg = copy.deepcopy(base)
            value_overrides = [override for override in parsed if override not in group_choices]
            apply(value_overrides, cfg)
        except faults.FAILURES:
            # Composed as a whole to find what is wrong
            return compose(overrides, project=self._project, strict=False)
        cautions = other_choice.settle(cfg, changes, overrides)
        monitor: Any = OmegaConf.select(base, "evaluate.monitor", throw_on_resolution_failure=False)
        problems = [problem for group in settle(cfg, overrides, monitor) for problem in group]
        return Composed(
            cfg,
            dict(choices),
            tuple(overrides),
            self._project,
            tuple(problems),
            label_of(overrides),
            cautions=tuple(cautions),
        )

    def _base(
        self, chosen: tuple[str, ...]
    ) -> tuple[DictConfig, dict[str, str], list[other_choice.Change]]:
        """Return the config of these choices of groups, the choices, and what each changes."""
        if chosen not in self._bases:
            cfg = self._loader.compose(chosen)
            if self._loader.chooses_several(chosen) and (
                problems := compose(chosen, project=self._project, strict=False).problems
            ):
                raise ConfigError(*problems)
            choices = self._loader.choices(chosen)
            require_modest_references(cfg)
            self._bases[chosen] = (
                cfg,
                choices,
                other_choice.changes(self._loader, chosen, choices.get("experiment")),
            )
        return self._bases[chosen]


def identity(space: Space, composer: Composer, *, with_code: bool = True) -> tuple[str, Composed]:
    """Return the sweep's id, and the config that its points share.

    The id is the experiment's name and a hash of the shared config and of what varies.

    Args:
        space: Dimensions and fixed overrides.
        composer: Composes the points.
        with_code: Whether changed user code makes another sweep.

    Raises:
        ConfigError: The part that all points share is wrong.
    """
    shared = composer.compose(space.fixed)
    if problems := _problems(shared):
        first_values = {
            part.key: part.values[0]
            for part in space.dimensions
            if composer.is_group(part.name) and part.values
        }
        # A value may belong to a choice that varies: strategy=elastic,ddp strategy.nproc=2
        shared = composer.compose(space.at(first_values))
        if _problems(shared):
            raise ConfigError(*problems)
    content = {
        "shared": shared.fingerprint if with_code else fingerprint_of(shared.whole),
        "varied": sorted(
            [part.key, part.text] for part in space.parts if not isinstance(part, str)
        ),
        # More trials are the same sweep, extended
        "sweeper": {
            key: value for key, value in plain(shared.cfg.sweeper).items() if key != "trials"
        },
        "name": shared.name,
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    varied = next(
        (part for part in space.parts if not isinstance(part, str) and part.name == "experiment"),
        None,
    )
    return f"{'experiments' if varied else shared.name}-{digest}", shared


def _problems(composed: Composed) -> tuple[Problem, ...]:
    return composed.problems or tuple(faults.unresolvable(composed.cfg))


@dataclass(frozen=True)
class ComposedPoint:
    """A composed point.

    Args:
        point: The point's record in the sweep's folder.
        composed: Its config, with the problems in it.
        whole: The config as plain values.
    """

    point: Point
    composed: Composed
    # Resolving takes longer than everything else, so it is done once
    whole: dict[str, Any]


def compose_points(
    settings: Sequence[Setting],
    space: Space,
    folder: SweepFolder,
    composer: Composer,
    *,
    first: int,
) -> list[ComposedPoint]:
    """Return the points of some settings with every seed, in order.

    Args:
        settings: The settings.
        space: The sweep's space.
        folder: The sweep's folder.
        composer: Composes the points.
        first: Number of the first point.
    """
    points = list[ComposedPoint]()
    for setting in settings:
        for seed in space.seeds or (None,):
            overrides = space.at({**setting.values, **({"seed": seed} if seed is not None else {})})
            points.append(
                _make_point(
                    first + len(points),
                    setting,
                    seed,
                    overrides,
                    folder,
                    composer.compose(overrides),
                )
            )
    return points


def _make_point(
    number: int,
    setting: Setting,
    seed: str | None,
    overrides: Sequence[str],
    folder: SweepFolder,
    composed: Composed,
) -> ComposedPoint:
    config = composed.whole
    if not composed.problems and any(
        isinstance(value, str) and "${" in value for _, value in flat(config)
    ):
        composed = dataclasses.replace(composed, problems=tuple(faults.unresolvable(composed.cfg)))
    config, identity = composed.whole, composed.fingerprint
    run_folder = composed.folder.path
    evaluate = config["evaluate"]
    values = dict(setting.values)
    point = Point(
        number,
        setting.number,
        seed,
        values,
        list(overrides),
        composed.name,
        identity,
        str(run_folder),
        evaluate["monitor"],
        evaluate["mode"],
        _needs(config),
    )
    return ComposedPoint(
        point,
        composed,
        {**config, "tracking": _add_tags(config["tracking"], composed.name, point, folder)},
    )


def _needs(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of a point's job, as in `launchers.base.Job`."""
    strategy: Any = config["strategy"] if isinstance(config["strategy"], dict) else {}
    processes = int(
        strategy.get("nproc") or (1 if strategy.get("rank_invariant") else config["replicas"])
    )
    return {
        "threads": processes
        * (int(config["reproducibility"]["threads"]) + int(config["loader"]["num_workers"])),
        "processes": processes,
        "wants_gpu": config["device"] != "cpu",
        "spread": _spread(strategy),
        "variables": {
            str(name): str(value) for name, value in config["reproducibility"]["variables"].items()
        },
    }


def _spread(strategy: Mapping[str, Any]) -> str | None:
    """Return the distribution of a run over several machines, as in `launchers.base.Job`."""
    if "nproc" not in strategy:
        return None
    return "each" if strategy["nproc"] or strategy.get("rank_invariant") else "whole"


def _add_tags(
    tracking: Mapping[str, Any], name: str, point: Point, folder: SweepFolder
) -> dict[str, Any]:
    """Add the tags by which the run is found in MLflow; they do not change the result."""
    tags = {
        **tracking["tags"],
        "sweep": folder.id,
        "sweep.point": str(point.number),
        "sweep.setting": str(point.setting),
    }
    return {**tracking, "run_name": tracking["run_name"] or f"{point.label} ({name})", "tags": tags}


def write_configs(points: Sequence[ComposedPoint], folder: SweepFolder) -> None:
    """Write each point's resolved config, so that later edits do not affect it."""
    for point in points:
        saved = dump_plain(point.whole, point.composed)
        # The job needs secrets unchanged, so others may not read them
        if redact(saved) != saved:
            folder.path.chmod(0o700)
        folder.config(point.point.number).write_text(saved, encoding="utf-8")


def same_runs(points: Sequence[Point]) -> dict[str, int]:
    """Return the number of the first point of each run folder."""
    first_points = dict[str, int]()
    for point in points:
        first_points.setdefault(str(Path(point.folder)), point.number)
    return first_points
