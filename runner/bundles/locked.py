"""The environment as exact versions: of samewise's dependencies, theirs, and the user's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from samewise.runner.errors import ConfigError, Problem

# No address and no option: the text may be a stranger's, and pip would follow it
_PIN = re.compile(r"[a-z0-9][a-z0-9.-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*")


def pins(imported: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each distribution that a run needs, by name.

    Args:
        imported: Distributions, or importable packages, in addition to samewise's own dependencies.
    """
    owners = metadata.packages_distributions()
    queue = [("samewise", extra) for extra in ("", *_extras("samewise"))]
    queue += [(owner, "") for name in imported for owner in owners.get(name, [name])]
    versions, visited = dict[str, str](), set[tuple[str, str]]()
    while queue:
        name, extra = queue.pop()
        if (canonicalize_name(name), extra) in visited:
            continue
        visited.add((canonicalize_name(name), extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            # The requirement is for another platform, or of an extra that is not installed
            continue
        versions[canonicalize_name(name)] = distribution.version
        for requirement in map(_parse_requirement, distribution.requires or ()):
            if requirement and (
                requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            ):
                queue += [(requirement.name, x) for x in ("", *requirement.extras)]
    # samewise itself is in the bundle as code
    versions.pop("samewise", None)
    return dict(sorted(versions.items()))


def text(pins: Mapping[str, str], python: str) -> str:
    """Format pins as a requirements file."""
    return "".join(
        [f"# Python {python}\n", *(f"{name}=={version}\n" for name, version in pins.items())]
    )


def read(text: str) -> list[str]:
    """Read the pins from a requirements file.

    Raises:
        ConfigError: A line is not `name==version` but, say, an address or an option.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    invalid = [line for line in lines if not _PIN.fullmatch(line)]
    if invalid:
        raise ConfigError(
            *(
                Problem(
                    "requirements.txt",
                    "is not an exact version of a package",
                    line,
                    "name==version",
                )
                for line in invalid[:5]
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
