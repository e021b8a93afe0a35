"""The points of a sweep, composed and checked: all of them, before any starts. What many points share is composed once."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from samewise.runner import overrides as faults
from samewise.runner.compose import Composed, chosen_in, compose, config_loader, groups, root_config, without_hydra
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.fingerprint import plain
from samewise.runner.project import Project
from samewise.runner.sweep.folder import Point, SweepFolder
from samewise.runner.sweep.space import Space
from samewise.runner.sweepers.base import Setting


class Composer:
    """Composes points whose command lines are alike: the files of each choice of groups are read and merged once.

    Args:
        project: Where the user's own config folders lie.
    """

    def __init__(self, project: Project) -> None:
        self._project = project
        self._loader = config_loader(project)
        self._groups = groups(self._loader)
        self._parser = OverridesParser.create()
        self._bases: dict[tuple[str, ...], tuple[DictConfig, dict[str, str]]] = {}

    def compose(self, given: Sequence[str]) -> Composed:
        """As `compose.compose`, with what is wrong as its `problems`."""
        try:
            read = self._parser.parse_overrides(list(given))
            of_groups = [override for override in read if override.key_or_group in self._groups and not isinstance(override.value(), dict)]
            base, choices = self._base(tuple(str(override.input_line) for override in of_groups))
            cfg = copy.deepcopy(base)
            rest = [override for override in read if override not in of_groups]
            ConfigLoaderImpl._apply_overrides_to_config(rest, cfg)  # pyright: ignore[reportPrivateUsage]  (what Hydra itself calls at this point)
        except faults.FAILURES:
            return compose(given, project=self._project, strict=False)  # tells what is wrong
        return Composed(cfg, dict(choices), tuple(given), self._project, tuple(faults.unresolvable(cfg)))

    def _base(self, chosen: tuple[str, ...]) -> tuple[DictConfig, dict[str, str]]:
        if chosen not in self._bases:
            cfg = root_config(self._loader, chosen)
            self._bases[chosen] = (without_hydra(cfg), chosen_in(cfg))
        return self._bases[chosen]


def identity(space: Space, project: Project, *, sweeper: Mapping[str, Any]) -> tuple[str, Composed]:
    """The sweep's id, and the config that its points share: the experiment's name and a hash of what varies about what.

    Raises:
        ConfigError: what the points share is wrong by itself.
    """
    shared = compose(space.fixed, project=project)
    told = {
        "shared": shared.fingerprint,
        "varied": sorted([part.key, part.text] for part in space.parts if not isinstance(part, str)),
        "sweeper": {key: value for key, value in sweeper.items() if key != "trials"},  # more of them is the same sweep, longer
        "name": shared.name,
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    varied = next((part for part in space.parts if not isinstance(part, str) and part.key == "experiment"), None)
    return f"{'experiments' if varied else shared.name}-{digest}", shared


def composed_points(
    settings: Sequence[Setting], space: Space, folder: SweepFolder, composer: Composer, *, first: int, tags: Mapping[str, str]
) -> list[tuple[Point, Composed]]:
    """The points of some settings, each with every seed, in order.

    Args:
        settings: What to try.
        space: What varies.
        folder: The sweep's, whose id the runs are tagged with.
        composer: Composes.
        first: The number of the first point.
        tags: Further tags of every run.
    """
    made = list[tuple[Point, Composed]]()
    for setting in settings:
        for seed in space.seeds or (None,):
            overrides = space.at({**setting.values, **({"seed": seed} if seed is not None else {})})
            composed = composer.compose(overrides)
            number = first + len(made)
            cfg = composed.cfg
            point = Point(
                number,
                setting.number,
                seed,
                dict(setting.values),
                list(overrides),
                composed.name,
                composed.fingerprint,
                str(composed.folder.path),
                str(cfg.evaluate.monitor),
                str(cfg.evaluate.mode.value),
                _needs(cfg),
            )
            made.append((point, _tagged(composed, point, folder, tags)))
    return made


def _needs(cfg: Any) -> dict[str, Any]:
    """What its job needs of a machine."""
    strategy = cfg.strategy
    processes = int(strategy.get("nproc") or (1 if strategy.get("rank_invariant") else cfg.replicas))
    return {
        "threads": processes * (int(cfg.reproducibility.threads) + int(cfg.loader.num_workers)),
        "processes": processes,
        "wants_gpu": str(cfg.device.value) != "cpu",
        "variables": {str(name): str(value) for name, value in cfg.reproducibility.variables.items()},
    }


def _tagged(composed: Composed, point: Point, folder: SweepFolder, tags: Mapping[str, str]) -> Composed:
    """With the names by which the run is found in MLflow; they change no result."""
    cfg = composed.cfg
    if cfg.tracking.run_name is None:
        cfg.tracking.run_name = f"{composed.name} {point.label}"
    cfg.tracking.tags = {**cfg.tracking.tags, "sweep": folder.id, "sweep.point": str(point.number), "sweep.setting": str(point.setting), **tags}
    return dataclasses.replace(composed, cfg=cfg)


def problems_of(points: Sequence[tuple[Point, Composed]], project: Project) -> list[Problem]:
    """Everything that is wrong with any of the points, each thing once, with how many points have it. Imports torch."""
    from samewise.runner.check import components, machine, settings

    found = dict[tuple[str, str], list[tuple[Point, Problem]]]()
    seen = dict[str, list[Problem]]()
    for point, composed in points:
        whole = plain(composed.cfg)
        of_components = [*components.required_are_there(whole), *_once(seen, whole, lambda some: components.problems_in(some, project))]
        local = [*composed.problems, *settings.problems_in(whole), *of_components]
        for problem in local:
            found.setdefault((problem.path, problem.message), []).append((point, problem))
    for _, composed in points[:1]:
        for problem in machine.problems(composed.cfg):
            found.setdefault((problem.path, problem.message), []).append((points[0][0], problem))
    return [_counted(each, len(points)) for each in found.values()]


def _once(seen: dict[str, list[Problem]], whole: Mapping[str, Any], find: Any) -> list[Problem]:
    """What `find` says of the parts of a config, each different part looked at once."""
    found = list[Problem]()
    for key, part in whole.items():
        text = f"{key} {json.dumps(part, sort_keys=True, default=str)}"
        if text not in seen:
            seen[text] = find({key: part})
        found += seen[text]
    return found


def _counted(each: Sequence[tuple[Point, Problem]], points: int) -> Problem:
    (first, problem), count = each[0], len(each)
    where = "every point" if count == points else f"{count} of {points} points, first {first.label}"
    return problem if points == 1 else dataclasses.replace(problem, message=f"{problem.message} (in {where})")


def write_configs(points: Sequence[tuple[Point, Composed]], folder: SweepFolder) -> None:
    """Keep each point's resolved config, so that what is edited later changes nothing."""
    from samewise.runner.compose import dump

    for point, composed in points:
        folder.config(point.number).write_text(dump(composed), encoding="utf-8")


def same_runs(points: Sequence[Point]) -> dict[str, int]:
    """For each run's folder the first point that has it."""
    first = dict[str, int]()
    for point in points:
        first.setdefault(str(Path(point.folder)), point.number)
    return first


def require_sound(points: Sequence[tuple[Point, Composed]], project: Project) -> None:
    """Raise everything that is wrong with the points.

    Raises:
        ConfigError: something is.
    """
    found = problems_of(points, project)
    if found:
        raise ConfigError(*found)
