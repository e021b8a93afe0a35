"""samewise's own code as part of the environment that affects bits: digests of what a run reaches
in its files. Does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import samewise
from samewise.runner.errors import first_few
from samewise.runner.records import sources

ROOTS = (
    "samewise.runner.training.loop.fit",
    "samewise.runner.training.build.build",
    "samewise.runner.processes.variables.prepare",
)
_SILENT = re.compile(
    r"samewise\.runner\.(api|arguments|cli|commands|config\.(?!instantiate)\w+|errors|interfaces|launchers|records\.(?!checkpoint$|shards)\w+|results|secrets|sweeps|sweepers|tracking"
    r"|callbacks\.(progress|throughput|learning_rate)|training\.(launch|agent|guards\.memory|prepare))(\.|$)"
)
"""Modules that compute nothing: what they do is in a config, on paper or on the screen."""


def record(used: Iterable[str]) -> dict[str, Any]:
    """A digest for each of samewise's files of what is reached in it.

    Of the files' bytes; and the names from which that was reached.

    `used`: the classes and functions that a run's config names, and the modules that the user's
    code imports; of others than samewise's too.
    """
    own = sorted({name for name in used if name.startswith("samewise.")})
    code, state = _read(tuple(own))
    return {"code": dict(code), "code_state": state, "code_used": own}


@cache
def _read(own: tuple[str, ...]) -> tuple[Mapping[str, str], str]:
    """Once in a process, which goes on with the code that it has imported."""
    files = sources.reach(
        [*ROOTS, *own],
        ["samewise"],
        follows=lambda name: name.startswith("samewise.") and not _SILENT.match(name),
    ).files
    code = {label: digest(digests) for label, digests in files.items()}
    return code, sources.raw_state(code)


def changes(environment: Mapping[str, Any]) -> list[str]:
    """What has changed in samewise's code since a run computed with it: a sentence, or nothing."""
    before: Mapping[str, str] = environment.get("code", {})
    if not before or environment.get("code_state") == sources.raw_state(before):
        return []
    return differences(
        environment,
        {
            **record(environment.get("code_used", ())),
            "versions": {"samewise": samewise.__version__},
        },
    )


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Where what two environments record of files that both contain differs: a sentence, or
    nothing.
    """
    if not first.get("code") or not second.get("code"):
        return []
    # Other components, such as a strategy, reach other parts of a file: each record is then
    # compared with the code as it is now.
    if (first.get("code_used") or []) != (second.get("code_used") or []):
        return changes(first) or changes(second)
    before, now = first.get("code", {}), second.get("code", {})
    names = [label for label in before if label in now and before[label] != now[label]]
    one, two = (environment.get("versions", {}).get("samewise") for environment in (first, second))
    versions = f" (version {one}, now {two})" if one != two else ""
    return [f"samewise's own code has changed{versions}: {first_few(names, 5)}"] if names else []


def digest(digests: Mapping[str, str]) -> str:
    """A short digest of many: of the parts of a file, or of all files."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]
