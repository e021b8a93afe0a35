"""Composes and checks all points of a sweep before any starts.

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
from samewise.runner.config.earlier_version import as_trained
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
    """Composes points with similar command lines: the files of each choice of groups are read and
    merged once.
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

    def compose(self, given: Sequence[str]) -> Composed:
        """As `compose.compose`, with errors in its `problems`; interpolations are not checked."""
        given = self._project.with_experiment(given)
        try:
            read = self._parser.parse_overrides(given)
            if any(map(removed, read)):
                return compose(given, project=self._project, strict=False)
            of_groups = [
                override
                for override in read
                if override.key_or_group in self._groups and not isinstance(override.value(), dict)
            ]
            base, choices, changed = self._base(
                tuple(str(override.input_line) for override in of_groups)
            )
            cfg = copy.deepcopy(base)
            rest = [override for override in read if override not in of_groups]
            apply(rest, cfg)
        except faults.FAILURES:
            return compose(given, project=self._project, strict=False)  # finds what is wrong
        cautions = other_choice.settle(cfg, changed, given)
        before: Any = OmegaConf.select(base, "evaluate.monitor", throw_on_resolution_failure=False)
        problems = [problem for some in settle(cfg, given, before) for problem in some]
        return Composed(
            cfg,
            dict(choices),
            tuple(given),
            self._project,
            tuple(problems),
            label_of(given),
            cautions=tuple(cautions),
        )

    def _base(
        self, chosen: tuple[str, ...]
    ) -> tuple[DictConfig, dict[str, str], list[other_choice.Change]]:
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
    """The sweep's id, and the config that its points share: the experiment's name and a hash of the
    base config and what varies.

    ConfigError if the part that all points share is wrong.

    Args:
        space: What varies.
        composer: Composes the points; if no choice of a group varies, little is left to compose for
            each.
        with_code: Whether other code of the user's makes it another sweep.
    """
    shared = composer.compose(space.fixed)
    if problems := _problems(shared):
        firsts = {
            part.key: part.values[0]
            for part in space.dimensions
            if composer.is_group(part.name) and part.values
        }
        # A value may belong to a choice that varies: strategy=elastic,ddp strategy.nproc=2
        shared = composer.compose(space.at(firsts))
        if _problems(shared):
            raise ConfigError(*problems)
    told = {
        "shared": shared.fingerprint if with_code else fingerprint_of(shared.whole),
        "varied": sorted(
            [part.key, part.text] for part in space.parts if not isinstance(part, str)
        ),
        "sweeper": {
            key: value for key, value in plain(shared.cfg.sweeper).items() if key != "trials"
        },  # more points are the same sweep, extended
        "name": shared.name,
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
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
        point: What is written down of it.
        composed: Its config, with what was wrong.
        whole: The config as plain values: resolving it takes longer than all else, and is done
            once.
    """

    point: Point
    composed: Composed
    whole: dict[str, Any]


def compose_points(
    settings: Sequence[Setting],
    space: Space,
    folder: SweepFolder,
    composer: Composer,
    *,
    first: int,
) -> list[ComposedPoint]:
    """The points of some settings with every seed, in order."""
    made = list[ComposedPoint]()
    for setting in settings:
        for seed in space.seeds or (None,):
            overrides = space.at({**setting.values, **({"seed": seed} if seed is not None else {})})
            made.append(
                _make_point(
                    first + len(made), setting, seed, overrides, folder, composer.compose(overrides)
                )
            )
    return made


def _make_point(
    number: int,
    setting: Setting,
    seed: str | None,
    overrides: Sequence[str],
    folder: SweepFolder,
    composed: Composed,
) -> ComposedPoint:
    whole = composed.whole
    if not composed.problems and any(
        isinstance(value, str) and "${" in value for _, value in flat(whole)
    ):
        composed = dataclasses.replace(composed, problems=tuple(faults.unresolvable(composed.cfg)))
    composed = as_trained(composed)
    whole, identity = composed.whole, composed.fingerprint
    run = composed.folder.path
    evaluate = whole["evaluate"]
    values = dict(setting.values)
    point = Point(
        number,
        setting.number,
        seed,
        values,
        list(overrides),
        composed.name,
        identity,
        str(run),
        evaluate["monitor"],
        evaluate["mode"],
        _needs(whole),
    )
    return ComposedPoint(
        point,
        composed,
        {**whole, "tracking": _add_tags(whole["tracking"], composed.name, point, folder)},
    )


def _needs(whole: Mapping[str, Any]) -> dict[str, Any]:
    strategy: Any = whole["strategy"] if isinstance(whole["strategy"], dict) else {}
    processes = int(
        strategy.get("nproc") or (1 if strategy.get("rank_invariant") else whole["replicas"])
    )
    return {
        "threads": processes
        * (int(whole["reproducibility"]["threads"]) + int(whole["loader"]["num_workers"])),
        "processes": processes,
        "wants_gpu": whole["device"] != "cpu",
        "spread": _spread(strategy),
        "variables": {
            str(name): str(value) for name, value in whole["reproducibility"]["variables"].items()
        },
    }


def _spread(strategy: Mapping[str, Any]) -> str | None:
    """The distribution of a run's processes over several machines, as in `launchers.base.Job`."""
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
    for made in points:
        saved = dump_plain(made.whole, made.composed)
        if redact(saved) != saved:  # the job needs it unchanged
            folder.path.chmod(0o700)
        folder.config(made.point.number).write_text(saved, encoding="utf-8")


def same_runs(points: Sequence[Point]) -> dict[str, int]:
    """The first point of each run folder."""
    first = dict[str, int]()
    for point in points:
        first.setdefault(str(Path(point.folder)), point.number)
    return first
