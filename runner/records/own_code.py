"""samewise's own code as part of the environment that affects bits: digests of the files that a run computes with. Does not import torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from samewise.runner.errors import first_few
from samewise.runner.records import sources

ROOTS = ("samewise.runner.training.loop", "samewise.runner.training.build")
_SILENT = re.compile(
    r"samewise\.runner\.(cli|commands|config\.(?!instantiate)\w+|errors|interfaces|launchers|records\.(?!checkpoint$|shards)\w+|secrets|sweep|sweepers|tracking"
    r"|callbacks\.(progress|throughput|learning_rate)|training\.(launch|agent|memory|prepare))(\.|$)"
)
"""Modules that compute nothing: what they do is in a config, on paper or on the screen."""


def record(used: Iterable[str]) -> dict[str, Any]:
    """A digest for each of samewise's files used by the classes and functions that a run's config, or the user's code, names; and one of their bytes."""
    code, state = _read(frozenset(name for name in used if name.startswith("samewise.")))
    return {"code": dict(code), "code_state": state}


@cache
def _read(own: frozenset[str]) -> tuple[Mapping[str, str], str]:
    """Once in a process, which goes on with the code that it has imported."""
    files = sources.reach([*ROOTS, *sorted(own)], ["samewise"], follows=lambda name: name.partition(".")[0] == "samewise" and not _SILENT.match(name)).files
    code = {label: digest(digests) for label, digests in files.items()}
    return code, sources.raw_state(code)


def changes(environment: Mapping[str, Any]) -> list[str]:
    """What has changed in samewise's code since a run computed with it: a sentence, or nothing."""
    before: Mapping[str, str] = environment.get("code", {})
    if not before or environment.get("code_state") == sources.raw_state(before):
        return []
    found = sources.files_present(before)
    return differences(before, {label: digest(digests) for label, digests in found.items()})


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Where two records differ in files that both contain: a sentence, or nothing."""
    names = [label for label in before if label in now and before[label] != now[label]]
    return [f"samewise's own code has changed: {first_few(names, 5)}"] if names else []


def digest(digests: Mapping[str, str]) -> str:
    """A short digest of many: of the parts of a file, or of all files."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:16]
