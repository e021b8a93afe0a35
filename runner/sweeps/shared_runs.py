"""Points of a sweep that are one run, since their settings differ in nothing that the fingerprint
contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from samewise.runner.config import compose
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import finds_data
from samewise.runner.config.tree import at, differing_keys
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.sweep_folder import Point, SweepFolder
from samewise.runner.sweepers.space import Space
from samewise.runner.sweeps.points import Composer

_SHOWN = 5


def require_separate(
    points: Sequence[Point], composed: Callable[[Point], Composed]
) -> dict[tuple[str, ...], list[tuple[int, int]]]:
    """Find the points that are the same run as an earlier one.

    Returns the numbers of the point and of the first one with its run, by the keys in which the two
    differ. ConfigError if two differ in their data's location or their device: only one would be
    trained, and its result shown for both.

    Args:
        points: All of the sweep so far.
        composed: Gives a point's config; called only for points that share a run.
    """
    firsts, configs = dict[str, Point](), dict[int, Composed]()
    found, wrong = (
        dict[tuple[str, ...], list[tuple[int, int]]](),
        dict[tuple[str, ...], list[tuple[Point, Point]]](),
    )
    for point in points:
        first = firsts.setdefault(point.folder, point)
        if first is point:
            continue
        if first.number not in configs:
            configs[first.number] = composed(first)
        keys = differing_keys(configs[first.number].cfg, composed(point).cfg)
        if decisive := _decisive(keys):
            wrong.setdefault(decisive, []).append((first, point))
        else:
            found.setdefault(keys, []).append((point.number, first.number))
    if wrong:
        raise ConfigError(*(_problem(keys, pairs) for keys, pairs in wrong.items()))
    return found


def require_same_data(folder: SweepFolder, space: Space, composer: Composer) -> None:
    """Raise a ConfigError if a sweep that exists was made with data elsewhere, or for another
    device, than its command now names.
    """
    point = next(iter(folder.points()), None)
    if point is None:
        return
    saved = compose.load(folder.config(point.number))
    now = composer.compose(
        space.at({**point.values, **({"seed": point.seed} if point.seed is not None else {})})
    )
    if changed := _decisive(differing_keys(saved.cfg, now.cfg)):
        words = ", ".join(
            f"{key}={at(saved.whole, key)} (now {at(now.whole, key)})" for key in changed
        )
        hint = "restore it, or choose a different name= for a separate sweep"
        raise ConfigError(Problem(folder.id, f"this sweep was made with {words}", hint=hint))


def _decisive(keys: Sequence[str]) -> tuple[str, ...]:
    """Those of the keys that can change a result, though they are not in the fingerprint."""
    return tuple(key for key in keys if key == "device" or finds_data(key))


def notes(
    found: dict[tuple[str, ...], list[tuple[int, int]]],
    told: set[tuple[str, ...]],
    *,
    start: int = 0,
) -> list[str]:
    """Say which points are the same run as another; each set of keys once.

    Args:
        found: As from `require_separate`.
        told: The keys of which it was said; grows.
        start: Leave out points with smaller numbers.
    """
    said = list[str]()
    for keys, pairs in found.items():
        new = [(number + 1, first + 1) for number, first in pairs if number >= start]
        if not new or keys in told:
            continue
        told.add(keys)
        more = ", ..." if len(new) > _SHOWN else ""
        which = ", ".join(f"{number} as {first}" for number, first in new[:_SHOWN])
        several = f"{len(new)} points are the same runs as earlier ones ({which}{more})"
        what = (
            several if len(new) > 1 else f"point {new[0][0]} is the same run as point {new[0][1]}"
        )
        shown = f"{', '.join(keys[:_SHOWN])}{', ...' if len(keys) > _SHOWN else ''}"
        said.append(
            f"{what}: they differ only in {shown}, which does not change the result"
            if keys
            else f"{what}: they have the same settings"
        )
    return said


def _problem(keys: tuple[str, ...], pairs: Sequence[tuple[Point, Point]]) -> Problem:
    first, second = pairs[0]
    more = f", and {len(pairs) - 1} more" if len(pairs) > 1 else ""
    labels = f"{first.number + 1} ({first.label}) and {second.number + 1} ({second.label})"
    words = (
        f"is not part of the fingerprint, so points {labels}{more} would be one run, trained "
        "only once"
    )
    hint = f"'name=NAME-{'-'.join(f'${{{key}}}' for key in keys)}' makes them separate runs"
    return Problem(", ".join(keys), words, hint=hint)
