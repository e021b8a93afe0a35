"""Checks every point of a sweep before one starts. What points share is checked once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samewise.runner.config.compose import Composed
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.sweep_folder import Point
from samewise.runner.sweeps.points import ComposedPoint


def require_sound(
    points: Sequence[ComposedPoint], project: Project, *, elsewhere: bool = False
) -> None:
    """Raise all problems of the points as a ConfigError: each once, with the number of points that
    have it.

    Args:
        points: Which.
        project: The user's own.
        elsewhere: They run on other machines.
    """
    from samewise.runner.config.check import components, machine, settings

    def find(some: Mapping[str, Any]) -> list[Problem]:
        return components.problems_in(some, project)

    found = dict[tuple[str, str], list[tuple[Point, Problem]]]()
    seen, seen_here = dict[str, list[Problem]](), dict[str, list[Problem]]()
    for made in points:
        of_components = [
            *components.required_are_there(made.whole),
            *_find_once(seen, made.whole, find),
        ]
        for problem in (*made.composed.problems, *settings.problems_in(made.whole), *of_components):
            found.setdefault((problem.path, problem.message), []).append((made.point, problem))
        what = {"machine": [made.whole[key] for key in ("device", "run_root", "strategy")]}
        for problem in _find_once(
            seen_here,
            what,
            lambda _, made=made: machine.problems(made.composed.cfg, elsewhere=elsewhere),
        ):
            found.setdefault((problem.path, problem.message), []).append((made.point, problem))
    if not found and not elsewhere:
        for made in points:
            what = {
                "processes": [
                    made.whole[key] for key in ("strategy", "device", "replicas", "accumulate")
                ]
            }
            for problem in _find_once(
                seen_here, what, lambda _, made=made: _misfits(made.composed, project)
            ):
                found.setdefault((problem.path, problem.message), []).append((made.point, problem))
    if found:
        raise ConfigError(*(_count_points(each, len(points)) for each in found.values()))


def cautions(points: Sequence[ComposedPoint], told: set[tuple[str, str]]) -> list[Problem]:
    """Settings left out of the points' configs, and those kept.

    Each once, with the number of points.

    Args:
        points: Which.
        told: What has been told, as (path, message); grows.
    """
    found = dict[tuple[str, str], list[tuple[Point, Problem]]]()
    for made in points:
        for caution in made.composed.cautions:
            found.setdefault((caution.path, caution.message), []).append((made.point, caution))
    new = [_count_points(each, len(points)) for key, each in found.items() if key not in told]
    told |= found.keys()
    return new


def _misfits(composed: Composed, project: Project) -> list[Problem]:
    from samewise.runner.training.dry_run import require_processes

    try:
        require_processes(composed, project)
    except ConfigError as error:
        return list(error.problems)
    return []


def _find_once(
    seen: dict[str, list[Problem]],
    whole: Mapping[str, Any],
    find: Callable[[Mapping[str, Any]], list[Problem]],
) -> list[Problem]:
    """The results of `find` for the parts of a config, each distinct part checked once."""
    found = list[Problem]()
    for key, part in whole.items():
        text = f"{key} {json.dumps(part, sort_keys=True, default=str)}"
        if text not in seen:
            seen[text] = find({key: part})
        found += seen[text]
    return found


def _count_points(each: Sequence[tuple[Point, Problem]], points: int) -> Problem:
    (first, problem), count = each[0], len({point.number for point, _ in each})
    where = "every point" if count == points else f"{count} of {points} points, first {first.label}"
    return (
        problem
        if points == 1
        else dataclasses.replace(problem, message=f"{problem.message} (in {where})")
    )
