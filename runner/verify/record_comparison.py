"""Compares what a run's folder records besides the trace (logged metrics, summary, environment)
with its config and with a second training.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samewise.runner.config import saved
from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import combine, fingerprint_of, identity
from samewise.runner.config.tree import differences, flat
from samewise.runner.data.dataset import fingerprint
from samewise.runner.errors import first_few
from samewise.runner.records import checkpoint, kept_checkpoints, shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.secrets import HIDDEN
from samewise.runner.tracking.journal import read_entries
from samewise.runner.training.run import Run
from samewise.runner.verify.divergence import Divergence

MEASURED = ("speed/", "time/", "memory/", "system/")
"""Prefixes of metrics that measure the machine rather than the training, and differ in another
training."""

_OF_TRAINING = ("name", "reproducibility", "total_steps", "data", "optimizers")
"""The entries of environment.json that follow from a config and its data."""
_OF_THE_END = ("status", "level", "weights_sha256", "steps", "epochs", "stopped_early", "metrics")
"""What summary.json tells that another training gives again."""

Logged = Mapping[tuple[int, str], float]


def logged_divergences(
    recorded: Iterable[tuple[int, str, float]],
    again: Logged,
    *,
    after: int = -1,
    until: int | None = None,
    left_out: Collection[str] = (),
) -> list[Divergence]:
    """Where logged metrics differ from those of another training: for each metric the first step,
    and how many more.

    Args:
        recorded: Step, name and value of all that the run logged.
        again: What another training gave.
        after: The step behind which it began.
        until: The last step that it took; None: it ended, and nothing comes after that.
        left_out: As from `left_out_on_resuming`: of these, one that `again` never has cannot be
            compared.
    """
    found, skipped = dict[str, list[Divergence]](), unlogged(left_out, again)
    for step, name, value in recorded:
        if (
            step <= after
            or (until is not None and step > until)
            or name.startswith(MEASURED)
            or name in skipped
        ):
            continue
        computed = again.get((step, name))
        if computed is None:
            reason = (
                f"{name} was logged as {value!r}, and training again logs no {name} at this step"
            )
            found.setdefault(name, []).append(Divergence(step, "metric", name, reason))
        elif repr(value) != repr(computed):
            found.setdefault(name, []).append(
                Divergence(
                    step,
                    "metric",
                    name,
                    f"{name} was logged as {value!r} and is {computed!r} when computed again",
                )
            )
    return [_with_more(divergences) for divergences in found.values()]


def _with_more(divergences: list[Divergence]) -> Divergence:
    first = min(divergences, key=lambda divergence: divergence.step)
    more = (
        f" (and differs at {len(divergences) - 1} more step{'s' * (len(divergences) > 2)})"
        if len(divergences) > 1
        else ""
    )
    return Divergence(first.step, first.stage, first.layer, first.reason + more)


def left_out_on_resuming(journal: Path) -> set[str]:
    """Metrics that a run logged before it was last resumed and not since: perhaps of a callback
    that it was resumed without.
    """
    before, now, sessions = set[str](), set[str](), 0
    for entry, _ in read_entries(journal):
        if entry.status == "RUNNING":
            before, now, sessions = before | now, set[str](), sessions + 1
        now |= entry.metrics.keys()
    return (
        {name for name in before - now if not name.startswith(MEASURED)} if sessions > 1 else set()
    )


def unlogged(names: Collection[str], again: Logged) -> set[str]:
    """Those metrics that another training does not log at any step."""
    return set(names) - {name for _, name in again} if names else set()


def summary_divergences(recorded: Mapping[str, Any], again: Mapping[str, Any]) -> list[Divergence]:
    """Where a summary differs from that of another completed training."""
    pairs = differences(
        *({key: x.get(key) for key in _OF_THE_END if key != "level"} for x in (recorded, again))
    )
    return [
        Divergence(again["steps"], "summary", path, _describe("summary.json", path, x, two))
        for path, x, two in pairs
    ]


def artifact_divergences(
    recorded: RunFolder, again: RunFolder, step: int
) -> tuple[list[Divergence], list[str]]:
    """Tables under artifacts/ that differ from those of another training, and sentences on
    pictures, whose bytes depend on matplotlib.
    """
    common = [
        path.relative_to(again.artifacts)
        for path in sorted(again.artifacts.rglob("*"))
        if path.is_file()
    ]
    names = [
        name
        for name in common
        if not _same_bytes(recorded.artifacts / name, again.artifacts / name)
    ]
    tables = [
        Divergence(step, "artifact", "", f"artifacts/{name} is not what training again writes")
        for name in names
        if name.suffix != ".png"
    ]
    message = (
        "differs from the picture drawn here; other versions of matplotlib draw it differently"
    )
    return tables, [
        f"cannot be verified: artifacts/{name} {message}" for name in names if name.suffix == ".png"
    ]


def _same_bytes(recorded: Path, again: Path) -> bool:
    if recorded.is_symlink() or not recorded.is_file():
        return True
    return (
        recorded.stat().st_size == again.stat().st_size
        and recorded.read_bytes() == again.read_bytes()
    )


def recorded_config(folder: RunFolder, overrides: Sequence[str]) -> Composed:
    """The config of a run.

    Where its files of weights are elsewhere now, as overrides say, they are found there if their
    content is what the run began with.
    """
    original = saved.config_in(folder.config)
    changes = [
        override
        for override in overrides
        if override.partition("=")[0] in ("initialise.weights", "resume_from")
    ]
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


def alterations(folder: RunFolder, original: Composed, run: Run, *, foreign: bool) -> list[str]:
    """What was altered in a run's summary and environment, in words, as far as can be known without
    training.

    Args:
        folder: The recorded run's.
        original: Its config.
        run: Built from that, new.
        foreign: Whether `run` is another experiment, or the environment here is one that gives
            other bits.
    """
    summary, recorded = (
        read_json(folder.summary, shapes.SUMMARY) or {},
        read_json(folder.environment, shapes.ENVIRONMENT) or {},
    )
    lines = [
        *_fingerprints(folder, original, summary, recorded),
        *kept_checkpoints.misled_links(folder.checkpoints, summary),
    ]
    if not foreign:
        here = {
            **run.environment,
            "name": original.name,
            "reproducibility": original.cfg.reproducibility.level,
            "total_steps": run.total_steps,
        }
        fields = [key for key in _OF_TRAINING if key in recorded]
        pairs = differences(
            {key: recorded[key] for key in fields},
            json.loads(json.dumps({key: here[key] for key in fields})),
        )
        lines += [_describe("environment.json", *pair) for pair in pairs]
        lengths = {"steps_per_epoch": run.plan.steps_per_epoch, "total_steps": run.total_steps}
        for path in [kept.path for kept in checkpoint.list_checkpoints(folder.checkpoints)]:
            manifest = kept_checkpoints.manifest_of(path) or {}
            fields = {key: manifest[key] for key in lengths if key in manifest}
            lines += [
                _describe(f"{path.name}/manifest.json", *pair)
                for pair in differences(fields, {key: lengths[key] for key in fields})
            ]
    return lines


def hidden_settings(original: Composed) -> list[str]:
    """The settings that count for the fingerprint and whose secrets are not in the config, since it
    comes from a tracking store.
    """
    return [
        path
        for path, value in flat(identity(original.whole))
        if isinstance(value, str) and HIDDEN in value
    ]


def _fingerprints(
    folder: RunFolder, original: Composed, *records: Mapping[str, Any]
) -> Iterator[str]:
    """Where config, code, summary and environment do not belong to one experiment.

    Nothing if that cannot be known.

    The checkpoint that the run continues counts too, and may be gone; secrets are not in a config
    from a tracking store.
    """
    if hidden_settings(original):
        return
    if original.cfg.resume_from and not Path(original.cfg.resume_from).expanduser().exists():
        return
    code, config = read_json(folder.sources, shapes.SOURCES) or {}, fingerprint_of(original.whole)
    start = code.get("config") or config
    expected = combine(start, code.get("files") or {})
    fingerprints = {
        name: record["fingerprint"]
        for name, record in zip(("summary.json", "environment.json"), records, strict=True)
        if "fingerprint" in record
    }
    other_fingerprints = set(fingerprints.values()) - {expected}
    if start != config or (
        not code and len(other_fingerprints) == 1 and expected not in fingerprints.values()
    ):
        yield (
            f"config.yaml is that of another experiment: its fingerprint is {config[:12]}, and "
            f"the run was begun with {(other_fingerprints or {start}).pop()[:12]}"
        )
        return
    for name, one in fingerprints.items():
        if one != expected:
            yield (
                f"{name}: the fingerprint is recorded as {one[:12]}, and is {expected[:12]} "
                "when computed again"
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


def describe_foreign(foreign: Sequence[str], again: Run, overridden: Collection[str] = ()) -> str:
    """Describe what differs in the environment, the data last, with the reason.

    `overridden`: the settings that were changed for `again`.
    """
    data = [line for line in foreign if line.startswith("data.")]
    lines = (
        [
            "the environments differ in what can change bits: "
            + "; ".join(line for line in foreign if line not in data)
        ]
        if len(data) < len(foreign)
        else []
    )
    if not data:
        return lines[0]
    if paths := [path for path in overridden if path.startswith("dataset.")]:
        return "; ".join(
            [
                *lines,
                f"the data differ (the overrides change {first_few(paths, 3)}): " + "; ".join(data),
            ]
        )
    samples = {
        name: split.dataset
        for name, split in again.splits.items()
        if not hasattr(split.dataset, "fingerprint")
    }
    prints = {
        f"dataset.{name}": (
            again.environment["data"][name]["fingerprint"],
            fingerprint(data, f"dataset.{name}"),
        )
        for name, data in samples.items()
    }
    changing = [name for name, (x, y) in prints.items() if x != y]
    reason = (
        f"{' and '.join(changing)} gives other samples each time it is read"
        if changing
        else "files have changed, or the data set does not repeat"
    )
    return "; ".join([*lines, f"the data differ ({reason}): " + "; ".join(data)])
