"""Compose and check all points of a sweep before any starts.

What points share is composed once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial, reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from samewise.runner.config import other_choice
from samewise.runner.config import overrides as faults
from samewise.runner.config.compose import Composed, compose, dump_plain, label_of, settle
from samewise.runner.config.fingerprint import combine, fingerprint_of, reached_code
from samewise.runner.config.loader import Loader, apply
from samewise.runner.config.override_text import removed
from samewise.runner.config.project import Project
from samewise.runner.config.references import dependents, require_modest_references
from samewise.runner.config.schema import SOURCES
from samewise.runner.config.tree import flat, overlaps, plain, with_values
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.folder import latest, trained_again
from samewise.runner.records.sources import Code
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.secrets import redact
from samewise.runner.sweepers.base import Setting
from samewise.runner.sweepers.space import Space

_PINNED = {"name", "evaluate", "distil", "run_root", *(key.partition(".")[0] for key in SOURCES)}
"""Settings from which composing makes others."""
_SHARED = 32
"""Configs kept to be shared: the last keys of a grid change fastest."""


class Composer:
    """Composes points with similar command lines.

    The files of each choice of groups are read and merged once, and configs that differ in values
    alone are resolved once.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self._loader = Loader(project)
        self._groups = self._loader.groups()
        self._parse = lru_cache(OverridesParser.create().parse_override)
        self._bases: dict[
            tuple[str, ...], tuple[bytes, dict[str, str], list[other_choice.Change]]
        ] = {}
        self._shared = dict[tuple[str, ...], tuple[Composed, list[tuple[Any, ...]]] | None]()

    def is_group(self, key: str) -> bool:
        """Whether a key chooses from a group."""
        return key in self._groups

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose with errors in `problems`, and interpolations unchecked."""
        overrides = self.project.with_experiment(overrides)
        try:
            parsed = [self._parse(text) for text in overrides]
            # Composed as a whole, which reports what cannot be removed
            if any(map(removed, parsed)):
                return compose(overrides, project=self.project, strict=False)
            cfg, choices, changes, monitor = self._merge(parsed)
        except faults.FAILURES:
            # Composed as a whole to find what is wrong
            return compose(overrides, project=self.project, strict=False)
        cautions = other_choice.settle(cfg, changes, overrides)
        problems = [problem for group in settle(cfg, overrides, monitor) for problem in group]
        return Composed(
            cfg,
            dict(choices),
            tuple(overrides),
            self.project,
            tuple(problems),
            label_of(overrides),
            cautions=tuple(cautions),
        )

    def resolve(self, overrides: Sequence[str]) -> tuple[dict[str, Any], Composed]:
        """Compose to plain values, which configs that differ in few values share.

        Returns:
            The values, and a config that differs in values at most: its choices, problems and
            cautions are the same.
        """
        overrides, parsed = self.project.with_experiment(overrides), list[Override]()
        try:
            parsed = [self._parse(text) for text in overrides]
            values = [x for x in parsed if self._is_value(x)]
            key = tuple(x.key_or_group if x in values else str(x.input_line) for x in parsed)
            if shared := self._shared.get(key):
                alike, paths = shared
                apply(values, alike.cfg)
                new_values = [(path, plain(reduce(getitem, path, alike.cfg))) for path in paths]
                return with_values(alike.whole, new_values), alike
        except faults.FAILURES:
            values, key = list[Override](), ()
        composed = self.compose(overrides)
        if not composed.problems and any("${" in str(x) for _, x in flat(composed.whole)):
            problems = faults.unresolvable(composed.cfg)
            composed = dataclasses.replace(composed, problems=tuple(problems))
        if values and not composed.problems and key not in self._shared:
            if len(self._shared) >= _SHARED:
                del self._shared[next(iter(self._shared))]
            keys = [x.key_or_group for x in values]
            paths = dependents(self._merge(parsed)[0], keys)
            # Of two overrides of a value, the last counts
            is_apart = not any(
                overlaps(x.key_or_group, keys)
                for x in parsed
                if x not in values and not self._is_choice(x)
            )
            self._shared[key] = (
                (composed, paths)
                if is_apart and paths and not any(path[0] in _PINNED for path in paths)
                else None
            )
        return composed.whole, composed

    def _is_choice(self, override: Override) -> bool:
        return override.key_or_group in self._groups and not isinstance(override.value(), dict)

    def _is_value(self, override: Override) -> bool:
        """Whether an override sets a value that is neither a choice nor read while composing."""
        key, value = override.key_or_group, override.value()
        return (
            override.type is OverrideType.CHANGE
            and override.package is None
            and key not in self._groups
            and key.partition(".")[0] not in _PINNED
            and not key.endswith("_target_")
            and not isinstance(value, dict | list)
            and not ("$" in str(value) or "\\" in str(value) or value == "???")
        )

    def _merge(
        self, parsed: Sequence[Override]
    ) -> tuple[DictConfig, dict[str, str], list[other_choice.Change], Any]:
        """Return a new config of overrides, with what `_base` returns and the files' monitor."""
        of_groups = tuple(str(x.input_line) for x in parsed if self._is_choice(x))
        base, choices, changes = self._base(of_groups)
        cfg = pickle.loads(base)
        monitor: Any = OmegaConf.select(cfg, "evaluate.monitor", throw_on_resolution_failure=False)
        apply([x for x in parsed if not self._is_choice(x)], cfg)
        return cfg, choices, changes, monitor

    def _base(
        self, chosen: tuple[str, ...]
    ) -> tuple[bytes, dict[str, str], list[other_choice.Change]]:
        """Return the config of these choices of groups, the choices, and what each changes.

        The config is pickled: copying it takes longer than reading it.
        """
        if chosen not in self._bases:
            cfg = self._loader.compose(chosen)
            if self._loader.chooses_several(chosen) and (
                problems := compose(chosen, project=self.project, strict=False).problems
            ):
                raise ConfigError(*problems)
            choices = self._loader.choices(chosen)
            require_modest_references(cfg)
            self._bases[chosen] = (
                pickle.dumps(cfg, pickle.HIGHEST_PROTOCOL),
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
        whole: The config as plain values, with the sweep's tags.
        alike: A config that differs in values at most, with its problems and cautions.
        code: The user's code that the config reaches.
        compose: Returns the config with its types, composed anew.
    """

    point: Point
    whole: dict[str, Any]
    alike: Composed
    code: Code
    compose: Callable[[], Composed]


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
    points, codes = list[ComposedPoint](), dict[int, Code]()
    # A folder of many runs is read once
    again = cache(trained_again)
    for setting, seed in product(settings, space.seeds or (None,)):
        overrides = space.at({**setting.values, **({"seed": seed} if seed is not None else {})})
        whole, alike = composer.resolve(overrides)
        if id(alike) not in codes:
            codes[id(alike)] = reached_code(whole, alike.project.packages)
        code = codes[id(alike)]
        fingerprint = combine(fingerprint_of(whole), code.files)
        run = Path(whole["run_root"]) / alike.name / fingerprint[:12]
        point = Point(
            first + len(points),
            setting.number,
            seed,
            dict(setting.values),
            list(overrides),
            alike.name,
            fingerprint,
            str(latest(run, again(run.parent))),
            whole["evaluate"]["monitor"],
            whole["evaluate"]["mode"],
            _needs(whole),
        )
        tagged = {**whole, "tracking": _add_tags(whole["tracking"], alike.name, point, folder)}
        points.append(
            ComposedPoint(point, tagged, alike, code, partial(composer.compose, overrides))
        )
    return points


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
        saved = dump_plain(point.whole, point.compose())
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
