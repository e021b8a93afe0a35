"""Checks that a data set's classes are those that a config expects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from samewise.runner.errors import DataError, Problem, first_few, nearest


def sort_classes(labels: Iterable[str]) -> list[str]:
    """The different labels in order: by number if all are finite numbers, else as text.

    Labels of one number, such as 1 and 01, are ordered as text.
    """
    different = set(labels)
    try:
        numbers = {label: float(label) for label in different}
    except ValueError:
        numbers = {}
    return (
        sorted(different, key=lambda label: (numbers.get(label, 0.0), label))
        if all(map(math.isfinite, numbers.values()))
        else sorted(different)
    )


def require_known(where: str, labels: Mapping[str, str], classes: Sequence[str]) -> None:
    """Raise a DataError if files (by name) have labels that are not among the classes."""
    known = set(classes)
    if unknown := list(dict.fromkeys(label for label in labels.values() if label not in known)):
        name = next(name for name, label in labels.items() if label == unknown[0])
        words = f"{name} belongs to an unknown class" + (
            f", one of {len(unknown)}" if len(unknown) > 1 else ""
        )
        raise DataError(
            Problem(
                where,
                words,
                first_few(unknown, 10),
                ", ".join(classes[:20]),
                nearest(unknown[0], classes),
            )
        )


def require_count(
    where: str, classes: Sequence[str], num_classes: int | None, *, of: str = "classes"
) -> None:
    """Raise a DataError unless the number of classes is as configured; None allows any."""
    if num_classes is not None and len(classes) != num_classes:
        hint = f"set dataset.num_classes={len(classes)}" if classes else "set dataset.root=FOLDER"
        reason = f"has {len(classes)} {of} ({first_few(classes, 10)})"
        raise DataError(
            Problem(
                where, reason, expected=f"{num_classes}, as dataset.num_classes says", hint=hint
            )
        )
