"""Digests of the parts of samewise's own files that a run uses, recorded with its environment.

Does not import torch.
"""

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
    r"samewise\.runner\.(api|arguments|cli|commands|config\.(?!instantiate)\w+|errors|interfaces"
    r"|launchers|records\.(?!checkpoint$|shards)\w+|results|secrets|sweeps|sweepers|tracking"
    r"|callbacks\.(progress|throughput|learning_rate)"
    r"|training\.(launch|agent|guards\.memory|prepare))(\.|$)"
)
"""Modules that compute nothing: their effect is a config, a file or a line on the screen."""


def record(used: Iterable[str]) -> dict[str, Any]:
    """Return a digest of the used parts of each of samewise's files, and one of the files' bytes.

    Args:
        used: The classes and functions that a run's config names, and the modules that the user's
            code imports. Names outside samewise are ignored.
    """
    own = sorted({name for name in used if name.startswith("samewise.")})
    code, state = _read(tuple(own))
    return {"code": dict(code), "code_state": state, "code_used": own}


# Once in a process, which goes on with the code that it has imported
@cache
def _read(own: tuple[str, ...]) -> tuple[Mapping[str, str], str]:
    files = sources.reach(
        [*ROOTS, *own],
        ["samewise"],
        follows=lambda name: name.startswith("samewise.") and not _SILENT.match(name),
    ).files
    code = {label: digest(digests) for label, digests in files.items()}
    return code, sources.raw_state(code)


def changes(environment: Mapping[str, Any]) -> list[str]:
    """Describe in at most one sentence how samewise's code has changed since a run was trained."""
    before: Mapping[str, str] = environment.get("code", {})
    # If the bytes are the same, no file need be parsed
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
    """Describe in at most one sentence where two environments' records of the code differ."""
    if not first.get("code") or not second.get("code"):
        return []
    # Other components, such as a strategy, use other parts of a file: then each record is compared
    # with the code as it is now
    if (first.get("code_used") or []) != (second.get("code_used") or []):
        return changes(first) or changes(second)
    before, now = first.get("code", {}), second.get("code", {})
    names = [label for label in before if label in now and before[label] != now[label]]
    version, new_version = (x.get("versions", {}).get("samewise") for x in (first, second))
    versions = f" (version {version}, now {new_version})" if version != new_version else ""
    return [f"samewise's own code has changed{versions}: {first_few(names, 5)}"] if names else []


def digest(digests: Mapping[str, str]) -> str:
    """Return a short digest of several digests: of the parts of a file, or of all files."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]
