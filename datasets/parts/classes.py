"""Checks that a data set's classes are those that a config expects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from samewise.datasets.parts.names import difference, misspelt, require_distinct
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


def object_names(classes: Sequence[str]) -> list[str]:
    """The classes without the background, which may be listed first."""
    return list(map(str, classes))[classes[:1] == ["background"] :]


def require_known(where: str, labels: Iterable[tuple[str, str]], classes: Sequence[str]) -> None:
    """Raise a DataError if labels, each beside a file's name, are not among the classes."""
    known, first = set(classes), dict[str, str]()
    for name, label in labels:
        if label not in known:
            first.setdefault(label, name)
    if unknown := list(first):
        name = first[unknown[0]]
        count = f", one of {len(unknown)}" if len(unknown) > 1 else ""
        reason = f"{name} belongs to an unknown class{count}"
        expected, hint = ", ".join(classes[:20]), nearest(unknown[0], classes)
        raise DataError(Problem(where, reason, first_few(unknown, 10), expected, hint))


def require_count(
    where: str,
    classes: Sequence[str],
    num_classes: int | None,
    *,
    of: str = "classes",
    labels: int | None = None,
    files: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise a DataError unless the classes have distinct names, and are as many as configured.

    Args:
        where: Their file or folder, for the message.
        classes: Their names, without a background.
        num_classes: What the config says; None allows any number.
        of: What they are called.
        labels: How many labels there are, where the background is one; None: one for each class.
        files: Where each sample of a class is, if known: a name is taken for misspelt where it is
            rare beside one that is like it.
    """
    require_distinct(where, classes, what="class")
    count = len(classes) if labels is None else labels
    if num_classes is None or count == num_classes:
        return
    numbered = f", with numbers up to {count - 1}" if len(classes) < count - 1 else ""
    background = "" if labels is None else f"{numbered}, with the background {count}"
    reason = f"has {len(classes)} {of} ({first_few(classes, 12)}){background}"
    near = misspelt(classes, {name: len(files[name]) for name in files})
    asked = ""
    # Of names that are alike, one at least is right; rare ones are all suspect
    if 0 < count - num_classes < len(near) + bool(files):
        name, alike = near[0]
        seen = f" ({first_few(sorted(set(files[name])), 3)})" if files.get(name) else ""
        meant = " or ".join(f"{other!r}{difference(other, name)}" for other in alike)
        asked = f"is '{name}'{difference(name, alike[0])}{seen} a misspelt {meant}? If not, "
    set_count = f"set dataset.num_classes={count}" if classes else "set dataset.root=FOLDER"
    expected = f"{num_classes}, as dataset.num_classes says"
    raise DataError(Problem(where, reason, expected=expected, hint=f"{asked}{set_count}"))
