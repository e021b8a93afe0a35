"""Check every point of a sweep before one starts. What points share is checked once."""

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
    """Raise all problems of the points, each once, with the number of points that have it.

    Args:
        points: The points.
        project: The user's project.
        elsewhere: Whether the points run on other machines.

    Raises:
        ConfigError: There are problems.
    """
    from samewise.runner.config.check import components, machine, settings

    def find(parts: Mapping[str, Any]) -> list[Problem]:
        return components.problems_in(parts, project)

    problems = dict[tuple[str, str], list[tuple[Point, Problem]]]()
    part_problems, machine_problems = dict[str, list[Problem]](), dict[str, list[Problem]]()
    for point in points:
        component_problems = [
            *components.required_are_there(point.whole),
            *_find_once(part_problems, point.whole, find),
        ]
        for problem in (
            *point.composed.problems,
            *settings.problems_in(point.whole),
            *component_problems,
        ):
            problems.setdefault((problem.path, problem.message), []).append((point.point, problem))
        what = {"machine": [point.whole[key] for key in ("device", "run_root", "strategy")]}
        for problem in _find_once(
            machine_problems,
            what,
            lambda _, point=point: machine.problems(point.composed.cfg, elsewhere=elsewhere),
        ):
            problems.setdefault((problem.path, problem.message), []).append((point.point, problem))
    if not problems and not elsewhere:
        for point in points:
            what = {
                "processes": [
                    point.whole[key] for key in ("strategy", "device", "replicas", "accumulate")
                ]
            }
            for problem in _find_once(
                machine_problems, what, lambda _, point=point: _misfits(point.composed, project)
            ):
                problems.setdefault((problem.path, problem.message), []).append(
                    (point.point, problem)
                )
    if problems:
        raise ConfigError(*(_count_points(entries, len(points)) for entries in problems.values()))


def cautions(points: Sequence[ComposedPoint], reported: set[tuple[str, str]]) -> list[Problem]:
    """Return what was left out of the points' configs or kept in them, each once.

    Args:
        points: The points.
        reported: (path, message) of what was reported; extended.
    """
    entries_of = dict[tuple[str, str], list[tuple[Point, Problem]]]()
    for point in points:
        for caution in point.composed.cautions:
            entries_of.setdefault((caution.path, caution.message), []).append(
                (point.point, caution)
            )
    new = [
        _count_points(entries, len(points))
        for key, entries in entries_of.items()
        if key not in reported
    ]
    reported |= entries_of.keys()
    return new


def _misfits(composed: Composed, project: Project) -> list[Problem]:
    """Return the problems of a run's processes with its replicas and devices."""
    from samewise.runner.training.dry_run import require_processes

    try:
        require_processes(composed, project)
    except ConfigError as error:
        return list(error.problems)
    return []


def _find_once(
    problems_of_part: dict[str, list[Problem]],
    parts: Mapping[str, Any],
    find: Callable[[Mapping[str, Any]], list[Problem]],
) -> list[Problem]:
    """Return the results of `find` for the parts of a config, each distinct part checked once."""
    problems = list[Problem]()
    for key, part in parts.items():
        text = f"{key} {json.dumps(part, sort_keys=True, default=str)}"
        if text not in problems_of_part:
            problems_of_part[text] = find({key: part})
        problems += problems_of_part[text]
    return problems


def _count_points(entries: Sequence[tuple[Point, Problem]], points: int) -> Problem:
    """Return a problem with the number of points that have it."""
    (first, problem), count = entries[0], len({point.number for point, _ in entries})
    where = "every point" if count == points else f"{count} of {points} points, first {first.label}"
    return (
        problem
        if points == 1
        else dataclasses.replace(problem, message=f"{problem.message} (in {where})")
    )
