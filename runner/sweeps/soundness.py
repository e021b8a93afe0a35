"""Check every point of a sweep before one starts, and find points that are the same run.

What points share is checked once.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from samewise.runner.config import compose
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import finds_data
from samewise.runner.config.project import Project
from samewise.runner.config.tree import at, differences, differing_keys
from samewise.runner.errors import ConfigError, Problem, first_few
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.sweepers.space import Space
from samewise.runner.sweeps.points import ComposedPoint, Composer


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
            *point.alike.problems,
            *settings.problems_in(point.whole),
            *component_problems,
        ):
            problems.setdefault((problem.path, problem.message), []).append((point.point, problem))
        what = {"machine": [point.whole[key] for key in ("device", "run_root", "strategy")]}
        for problem in _find_once(
            machine_problems,
            what,
            lambda _, point=point: machine.problems(point.compose().cfg, elsewhere=elsewhere),
        ):
            problems.setdefault((problem.path, problem.message), []).append((point.point, problem))
    # Other machines have other devices, and a config with problems cannot be built
    if not problems and not elsewhere:
        for point in points:
            what = {
                "processes": [
                    point.whole[key] for key in ("strategy", "device", "replicas", "accumulate")
                ]
            }
            for problem in _find_once(
                machine_problems, what, lambda _, point=point: _misfits(point.compose(), project)
            ):
                problems.setdefault((problem.path, problem.message), []).append(
                    (point.point, problem)
                )
    ConfigError.raise_all(_count_points(entries, len(points)) for entries in problems.values())


def cautions(points: Sequence[ComposedPoint], reported: set[tuple[str, str]]) -> list[Problem]:
    """Return what was left out of the points' configs or kept in them, each once.

    Args:
        points: The points.
        reported: (path, message) of what was reported; extended.
    """
    entries_of = dict[tuple[str, str], list[tuple[Point, Problem]]]()
    for point in points:
        for caution in point.alike.cautions:
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
        # A thousand points have few distinct parts, and are to be checked within a minute
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


_SHOWN = 5


def require_separate(points: Sequence[Point], composer: Composer, *, start: int = 0) -> str:
    """Find the points that are the same run as an earlier one.

    Args:
        points: All points of the sweep so far.
        composer: Composes the points that share a run.
        start: Number of the first point that is new.

    Returns:
        A sentence about the new ones; empty if there are none.

    Raises:
        ConfigError: Two points differ in their data's location or their device: only one would be
            trained, and its result shown for both.
    """
    first_points, shared = dict[str, Point](), list[str]()
    conflicts = dict[tuple[str, ...], list[tuple[Point, Point]]]()
    for point in points:
        first = first_points.setdefault(point.folder, point)
        if first is point or point.number < start:
            continue
        wholes = [composer.resolve(x.overrides)[0] for x in (first, point)]
        if _decisive([path for path, *_ in differences(*wholes)]) and (
            keys := _decisive(
                differing_keys(*(composer.compose(x.overrides).cfg for x in (first, point)))
            )
        ):
            conflicts.setdefault(keys, []).append((first, point))
        shared.append(f"{point.number + 1} as {first.number + 1}")
    ConfigError.raise_all(_problem(keys, pairs) for keys, pairs in conflicts.items())
    return (
        f"points that are the same run as an earlier one, since they differ in nothing that "
        f"changes the result: {first_few(shared, _SHOWN)}"
        if shared
        else ""
    )


def require_same_data(folder: SweepFolder, space: Space, composer: Composer) -> None:
    """Require that a sweep's command names the data and the device that the sweep was made with.

    Raises:
        ConfigError: It names others.
    """
    point = next(iter(folder.points()), None)
    if point is None:
        return
    saved = compose.load(folder.config(point.number))
    now = composer.compose(
        space.at({**point.values, **({"seed": point.seed} if point.seed is not None else {})})
    )
    if changed_keys := _decisive(differing_keys(saved.cfg, now.cfg)):
        former_values = ", ".join(
            f"{key}={at(saved.whole, key)} (now {at(now.whole, key)})" for key in changed_keys
        )
        raise ConfigError(
            Problem(
                folder.id,
                f"this sweep was made with {former_values}",
                hint="restore it, or choose a different name= for a separate sweep",
            )
        )


def _decisive(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that can change a result, though they are not in the fingerprint."""
    return tuple(key for key in keys if key == "device" or finds_data(key))


def _problem(keys: tuple[str, ...], pairs: Sequence[tuple[Point, Point]]) -> Problem:
    first, second = pairs[0]
    remark = f", and {len(pairs) - 1} more" if len(pairs) > 1 else ""
    labels = f"{first.number + 1} ({first.label}) and {second.number + 1} ({second.label})"
    return Problem(
        ", ".join(keys),
        f"is not part of the fingerprint, so points {labels}{remark} would be one run, trained "
        "only once",
        hint=f"'name=NAME-{'-'.join(f'${{{key}}}' for key in keys)}' makes them separate runs",
    )
