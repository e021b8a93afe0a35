"""The environment as exact versions: samewise's dependencies, theirs, and what the user's own code
imports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from samewise.runner.errors import ConfigError, Problem

_PIN = re.compile(r"[a-z0-9][a-z0-9.-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")


def pins(imported: Iterable[str]) -> dict[str, str]:
    """The installed version of each distribution that a run needs, by name.

    Args:
        imported: Distributions, or importable packages, in addition to samewise's own dependencies.
    """
    owners = metadata.packages_distributions()
    todo = [("samewise", extra) for extra in ("", *_extras("samewise"))]
    todo += [(owner, "") for name in imported for owner in owners.get(name, [name])]
    found, seen = dict[str, str](), set[tuple[str, str]]()
    while todo:
        name, extra = todo.pop()
        if (canonicalize_name(name), extra) in seen:
            continue
        seen.add((canonicalize_name(name), extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            # For another platform, or an extra that is not installed
            continue
        found[canonicalize_name(name)] = distribution.version
        for requirement in map(_parse_requirement, distribution.requires or ()):
            if requirement and (
                requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            ):
                todo += [(requirement.name, one) for one in ("", *requirement.extras)]
    # Its code is in the bundle
    found.pop("samewise", None)
    return dict(sorted(found.items()))


def text(pins: Mapping[str, str], python: str) -> str:
    """Format pins as a requirements file."""
    return "".join(
        [f"# Python {python}\n", *(f"{name}=={version}\n" for name, version in pins.items())]
    )


def read(text: str) -> list[str]:
    """Read the pins from a requirements file.

    ConfigError if a line is not `name==version` but, say, an address or an option.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    wrong = [line for line in lines if not _PIN.fullmatch(line)]
    if wrong:
        raise ConfigError(
            *(
                Problem(
                    "requirements.txt",
                    "is not an exact version of a package",
                    line,
                    "name==version",
                )
                for line in wrong[:5]
            )
        )
    return lines


def _extras(name: str) -> list[str]:
    try:
        return metadata.metadata(name).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []


def _parse_requirement(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None
