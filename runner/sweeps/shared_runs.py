"""Find points of a sweep that are the same run, as their fingerprints are equal."""

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

    Args:
        points: All points of the sweep so far.
        composed: Returns a point's config; called only for points that share a run.

    Returns:
        Pairs of numbers, the point's and that of the first point with its run, by the keys in which
        the two differ.

    Raises:
        ConfigError: Two points differ in their data's location or their device: only one would be
            trained, and its result shown for both.
    """
    first_points, configs = dict[str, Point](), dict[int, Composed]()
    shared, conflicts = (
        dict[tuple[str, ...], list[tuple[int, int]]](),
        dict[tuple[str, ...], list[tuple[Point, Point]]](),
    )
    for point in points:
        first = first_points.setdefault(point.folder, point)
        if first is point:
            continue
        if first.number not in configs:
            configs[first.number] = composed(first)
        keys = differing_keys(configs[first.number].cfg, composed(point).cfg)
        if conflicting_keys := _decisive(keys):
            conflicts.setdefault(conflicting_keys, []).append((first, point))
        else:
            shared.setdefault(keys, []).append((point.number, first.number))
    if conflicts:
        raise ConfigError(*(_problem(keys, pairs) for keys, pairs in conflicts.items()))
    return shared


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
        hint = "restore it, or choose a different name= for a separate sweep"
        raise ConfigError(
            Problem(folder.id, f"this sweep was made with {former_values}", hint=hint)
        )


def _decisive(keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys that can change a result, though they are not in the fingerprint."""
    return tuple(key for key in keys if key == "device" or finds_data(key))


def notes(
    shared: dict[tuple[str, ...], list[tuple[int, int]]],
    noted_keys: set[tuple[str, ...]],
    *,
    start: int = 0,
) -> list[str]:
    """Describe which points are the same run as another; each set of keys once.

    Args:
        shared: Pairs of points by keys, from `require_separate`.
        noted_keys: Keys that earlier notes were about; extended.
        start: Lowest number of a point to mention.
    """
    lines = list[str]()
    for keys, pairs in shared.items():
        new = [(number + 1, first + 1) for number, first in pairs if number >= start]
        if not new or keys in noted_keys:
            continue
        noted_keys.add(keys)
        ellipsis = ", ..." if len(new) > _SHOWN else ""
        examples = ", ".join(f"{number} as {first}" for number, first in new[:_SHOWN])
        summary = f"{len(new)} points are the same runs as earlier ones ({examples}{ellipsis})"
        subject = (
            summary if len(new) > 1 else f"point {new[0][0]} is the same run as point {new[0][1]}"
        )
        key_text = f"{', '.join(keys[:_SHOWN])}{', ...' if len(keys) > _SHOWN else ''}"
        lines.append(
            f"{subject}: they differ only in {key_text}, which does not change the result"
            if keys
            else f"{subject}: they have the same settings"
        )
    return lines


def _problem(keys: tuple[str, ...], pairs: Sequence[tuple[Point, Point]]) -> Problem:
    first, second = pairs[0]
    remark = f", and {len(pairs) - 1} more" if len(pairs) > 1 else ""
    labels = f"{first.number + 1} ({first.label}) and {second.number + 1} ({second.label})"
    message = (
        f"is not part of the fingerprint, so points {labels}{remark} would be one run, trained "
        "only once"
    )
    hint = f"'name=NAME-{'-'.join(f'${{{key}}}' for key in keys)}' makes them separate runs"
    return Problem(", ".join(keys), message, hint=hint)
