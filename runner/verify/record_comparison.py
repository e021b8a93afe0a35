"""Compares a run's metrics, summary and environment with its config and with a second training."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.config import saved
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import combine, fingerprint_of
from samewise.runner.config.schema import SOURCES
from samewise.runner.config.tree import differences
from samewise.runner.errors import first_few
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.verify.divergence import Divergence

MEASURED = ("speed/", "time/", "memory/", "system/")
"""Prefixes of metrics that measure the machine, and so differ in a second training."""

_OF_THE_END = ("status", "level", "weights_sha256", "steps", "epochs", "stopped_early", "metrics")
"""The entries of summary.json that a second training repeats."""

Logged = Mapping[tuple[int, str], float]


def logged_divergences(
    recorded: Iterable[tuple[int, str, float]],
    again: Logged,
    *,
    until: int | None = None,
) -> list[Divergence]:
    """Compare logged metrics with those of a second training.

    Args:
        recorded: Step, name and value of each metric that the run logged.
        again: The metrics of the second training.
        until: Its last step; None: it trained to the end.

    Returns:
        For each metric that differs the first step, with the number of further ones.
    """
    by_name = dict[str, list[Divergence]]()
    for step, name, value in recorded:
        if (until is not None and step > until) or name.startswith(MEASURED):
            continue
        computed = again.get((step, name))
        # By `repr`, so that NaN equals NaN
        if repr(value) != repr(computed):
            reason = f"{name} was logged as {value!r}" + (
                f", and training again logs no {name} at this step"
                if computed is None
                else f" and is {computed!r} when computed again"
            )
            by_name.setdefault(name, []).append(Divergence(step, "metric", name, reason))
    return [_with_more(divergences) for divergences in by_name.values()]


def _with_more(divergences: list[Divergence]) -> Divergence:
    first = min(divergences, key=lambda divergence: divergence.step)
    more = (
        f" (and differs at {len(divergences) - 1} more step{'s' * (len(divergences) > 2)})"
        if len(divergences) > 1
        else ""
    )
    return Divergence(first.step, first.stage, first.layer, first.reason + more)


def summary_divergences(recorded: Mapping[str, Any], again: Mapping[str, Any]) -> list[Divergence]:
    """Compare a summary with that of a second training."""
    pairs = differences(
        *({key: x.get(key) for key in _OF_THE_END if key != "level"} for x in (recorded, again))
    )
    return [
        Divergence(again["steps"], "summary", path, _describe("summary.json", path, *values))
        for path, *values in pairs
    ]


def artifact_divergences(recorded: RunFolder, again: RunFolder, step: int) -> list[Divergence]:
    """Compare the tables under artifacts/ with those of a second training."""
    names = [
        path.relative_to(again.artifacts)
        for path in sorted(again.artifacts.rglob("*"))
        # Other versions of matplotlib draw other bytes
        if path.is_file() and path.suffix != ".png"
    ]
    return [
        Divergence(step, "artifact", "", f"artifacts/{name} differs from a second training's")
        for name in names
        if not _same_bytes(recorded.artifacts / name, again.artifacts / name)
    ]


def _same_bytes(recorded: Path, again: Path) -> bool:
    # A link may lead out of the folder, to any file of the user's
    if recorded.is_symlink() or not recorded.is_file():
        return True
    return (
        recorded.stat().st_size == again.stat().st_size
        and recorded.read_bytes() == again.read_bytes()
    )


def recorded_config(folder: RunFolder, overrides: Sequence[str]) -> Composed:
    """Return the config of a run.

    Overrides that move its files of weights are applied if the files' content is the same.
    """
    original = saved.config_in(folder.config)
    changes = [override for override in overrides if override.partition("=")[0] in SOURCES]
    record = (
        read_json(folder.summary, shapes.SUMMARY)
        or read_json(folder.environment, shapes.ENVIRONMENT)
        or {}
    )
    if not changes or "fingerprint" not in record:
        return original
    code, moved = (
        read_json(folder.sources, shapes.SOURCES) or {},
        saved.config_in(folder.config, changes),
    )
    return (
        moved
        if combine(fingerprint_of(moved.whole), code.get("files") or {}) == record["fingerprint"]
        else original
    )


def _describe(file: str, path: str, value: Any, other: Any) -> str:
    if value in (None, "???"):
        return f"{file}: {path} is missing, and is {other!r} when computed again"
    again = (
        "there is none when computed again"
        if other in (None, "???")
        else f"is {other!r} when computed again"
    )
    return f"{file}: {path} is recorded as {value!r}, and {again}"


def describe_foreign(foreign: Sequence[str], overridden: Collection[str] = ()) -> str:
    """Describe the differences of environments, those of the data last, with the reason.

    Args:
        foreign: The differences, a line each.
        overridden: The settings that overrides change.
    """
    data = [line for line in foreign if line.startswith("data.")]
    other = [line for line in foreign if line not in data]
    paths = [path for path in overridden if path.startswith("dataset.")]
    reason = (
        f"the overrides change {first_few(paths, 3)}"
        if paths
        else "files have changed, or the data set does not repeat"
    )
    parts = {
        "the environments differ in what can change bits": other,
        f"the data differ ({reason})": data,
    }
    return "; ".join(f"{text}: {'; '.join(lines)}" for text, lines in parts.items() if lines)
