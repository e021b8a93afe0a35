"""Checks that a data set's classes are those that a config expects."""

import math
from collections.abc import Collection, Iterable, Sequence

from samewise.datasets.parts.names import difference, require_distinct, twin
from samewise.runner.errors import DataError, Problem, first_few, nearest


def sort_classes(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels in order: by number if all are finite numbers, else as text.

    Labels of one number, such as 1 and 01, are ordered as text.
    """
    different = set(labels)
    try:
        numbers = {label: float(label) for label in different}
    except ValueError:
        numbers = {}
    return (
        sorted(different, key=lambda label: (numbers.get(label, 0.0), label))
        # float() also reads "nan" and "inf", which have no place in an order
        if all(map(math.isfinite, numbers.values()))
        else sorted(different)
    )


def object_names(classes: Sequence[str]) -> list[str]:
    """Return the classes without the background, which may be listed first."""
    return list(map(str, classes))[classes[:1] == ["background"] :]


def number_classes(
    where: str, labels: Collection[str], classes: Sequence[str] | None
) -> tuple[list[str], dict[str, int]]:
    """Return the class names, and the number of each label.

    Args:
        where: The labels' place, for the message.
        labels: All labels that occur: names, or numbers of `classes`.
        classes: Class names in the order of their numbers; None: the labels, sorted.

    Raises:
        DataError: A label is not among the classes.
    """
    names = list(map(str, classes)) if classes is not None else sort_classes(labels)
    numbers = {str(number): number for number in range(len(classes or ()))}
    numbers |= {name: number for number, name in enumerate(names)}
    unknown = (("a sample", x) for x in sorted(labels) if x not in numbers)
    require_known(where, unknown, names)
    return names, numbers


def require_known(where: str, labels: Iterable[tuple[str, str]], classes: Sequence[str]) -> None:
    """Raise a DataError unless each label is among the classes.

    Args:
        where: The file or folder of the labels, for the message.
        labels: (file name, label) pairs.
        classes: The known classes.
    """
    known_classes, file_of_label = set(classes), dict[str, str]()
    for name, label in labels:
        if label not in known_classes:
            file_of_label.setdefault(label, name)
    if unknown := list(file_of_label):
        name = file_of_label[unknown[0]]
        count = f", one of {len(unknown)}" if len(unknown) > 1 else ""
        reason = f"{name} belongs to an unknown class{count}"
        expected, hint = ", ".join(classes[:20]), nearest(unknown[0], classes)
        if spelling := twin(unknown[0], classes):
            hint = f"did you mean {spelling!r}{difference(spelling, unknown[0])}?"
        raise DataError(Problem(where, reason, first_few(unknown, 10), expected, hint))


def require_count(
    where: str,
    classes: Sequence[str],
    num_classes: int | None,
    *,
    kind: str = "classes",
    labels: int | None = None,
    left_out: str = "",
) -> None:
    """Raise a DataError unless the class names are distinct and as many as configured.

    Args:
        where: The classes' file or folder, for the message.
        classes: Class names, without a background.
        num_classes: The configured number; None allows any number.
        kind: The noun for the classes in messages.
        labels: Number of labels, where the background is one of them; None: one for each class.
        left_out: Description of files that are not samples, by their endings.
    """
    require_distinct(where, classes, what="class")
    count = len(classes) if labels is None else labels
    if num_classes is None or count == num_classes:
        return
    numbered = f", with numbers up to {count - 1}" if len(classes) < count - 1 else ""
    background = "" if labels is None else f"{numbered}, with the background {count}"
    reason = f"has {len(classes)} {kind} ({first_few(classes, 12)}){background}"
    question = (
        f"are recordings of a class among {left_out}, which are left out? If not, "
        if left_out and count < num_classes
        else ""
    )
    raise DataError(
        Problem(
            where,
            reason,
            expected=f"{num_classes}, as dataset.num_classes says",
            hint=f"{question}set dataset.num_classes={count}",
        )
    )
