"""What a run's folder tells beside its trace (logged metrics, summary, environment), held against what its config and another training give."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from samewise.runner.config.compose import Composed
from samewise.runner.config.fingerprint import combine, fingerprint_of
from samewise.runner.config.tree import differences
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.parting import Parting
from samewise.runner.records.summary import LEVELS
from samewise.runner.training.run import Run

MEASURED = ("speed/", "time/", "memory/", "system/")
"""How the names of metrics begin that tell of the machine, and not of the training: another training measures others."""

_OF_TRAINING = ("name", "reproducibility", "total_steps", "data", "optimizers")
"""What environment.json tells that a config and its data give again."""
_OF_THE_MACHINE = ("python", "platform", "versions", "cpu", "threads", "device", "variables", "git", "libraries")
"""What it tells that only the machine knew."""
_OF_THE_END = ("status", "level", "weights_sha256", "steps", "epochs", "stopped_early", "metrics")
"""What summary.json tells that another training gives again."""

Logged = Mapping[tuple[int, str], float]


def logged_partings(told: Iterable[tuple[int, str, float]], again: Logged, *, after: int = -1, until: int | None = None) -> list[Parting]:
    """Where logged metrics are not those of another training: for each metric the first step, and at how many more.

    Args:
        told: Step, name and value of all that the run logged.
        again: What another training gave.
        after: The step behind which it began.
        until: The last step that it took; None: it ended, and nothing comes after that.
    """
    found = dict[str, list[Parting]]()
    for step, name, value in told:
        if step <= after or (until is not None and step > until) or name.startswith(MEASURED):
            continue
        computed = again.get((step, name))
        if computed is None:
            found.setdefault(name, []).append(Parting(step, "metric", name, f"{name} was logged as {value!r}, and training again logs no {name} at this step"))
        elif repr(value) != repr(computed):
            found.setdefault(name, []).append(Parting(step, "metric", name, f"{name} was logged as {value!r} and is {computed!r} when computed again"))
    return [_with_more(partings) for partings in found.values()]


def _with_more(partings: list[Parting]) -> Parting:
    first = min(partings, key=lambda parting: parting.step)
    more = f" (and differs at {len(partings) - 1} more step{'s' * (len(partings) > 2)})" if len(partings) > 1 else ""
    return Parting(first.step, first.stage, first.layer, first.reason + more)


def not_logged(told: Iterable[tuple[int, str, float]], again: Logged, *, every: int) -> list[str]:
    """What another training logs that the run has not, in a sentence; losses only at multiples of `every`. The lines were deleted, or the disk was full."""
    known = {(step, name) for step, name, _ in told}
    missing = [one for one in sorted(again) if one not in known and (one[0] % every == 0 or not one[1].startswith("train/"))]
    if not missing:
        return []
    step, name = missing[0]
    return [f"metrics.jsonl lacks {len(missing)} value{'s' * (len(missing) > 1)} that training again logs: the first is {name} at step {step}"]


def summary_partings(told: Mapping[str, Any], again: Mapping[str, Any]) -> list[Parting]:
    """Where a summary is not that of another training, which has ended too."""
    pairs = differences(*({key: one.get(key) for key in _OF_THE_END if key != "level"} for one in (told, again)))
    return [Parting(again["steps"], "summary", path, _recorded("summary.json", path, one, two)) for path, one, two in pairs]


def artifact_partings(told: RunFolder, again: RunFolder, step: int) -> tuple[list[Parting], list[str]]:
    """Files under artifacts/ that another training writes too, and not alike: the tables, and sentences on pictures, whose bytes are matplotlib's."""
    common = [path.relative_to(again.artifacts) for path in sorted(again.artifacts.rglob("*")) if path.is_file()]
    names = [name for name in common if not _same_bytes(told.artifacts / name, again.artifacts / name)]
    tables = [Parting(step, "artifact", "", f"artifacts/{name} is not what training again writes") for name in names if name.suffix != ".png"]
    words = "is not the picture that is drawn here; other versions of matplotlib draw others"
    return tables, [f"cannot be verified: artifacts/{name} {words}" for name in names if name.suffix == ".png"]


def _same_bytes(told: Path, again: Path) -> bool:
    if told.is_symlink() or not told.is_file():
        return True
    return told.stat().st_size == again.stat().st_size and told.read_bytes() == again.read_bytes()


def alterations(folder: RunFolder, original: Composed, run: Run, *, foreign: bool) -> list[str]:
    """What in a run's summary and environment was altered, in words, as far as no training is needed to know it.

    Args:
        folder: The recorded run's.
        original: Its config.
        run: Built from that, new.
        foreign: Whether `run` is another experiment, or the environment here is one that gives other bits.
    """
    summary, recorded = read_json(folder.summary, shapes.SUMMARY) or {}, read_json(folder.environment, shapes.ENVIRONMENT) or {}
    said = [f"{name}: {reason}" for name, told in (("summary.json", summary), ("environment.json", recorded)) if (reason := _level(told, run))]
    if summary and recorded.get("level", summary["level"]) != summary["level"]:
        said.append(f"summary.json has the level {summary['level']}, and environment.json {recorded['level']}: one of them was altered")
    said += [*_fingerprints(folder, original, summary, recorded), *_contradictions(recorded)]
    if not foreign:
        here = {**run.environment, "name": original.name, "reproducibility": original.cfg.reproducibility.level, "total_steps": run.total_steps}
        known = [key for key in _OF_TRAINING if key in recorded]
        pairs = differences({key: recorded[key] for key in known}, json.loads(json.dumps({key: here[key] for key in known})))
        said += [_recorded("environment.json", *pair) for pair in pairs]
    return said


def _fingerprints(folder: RunFolder, original: Composed, *records: Mapping[str, Any]) -> Iterator[str]:
    """Where config, code, summary and environment do not belong to one experiment."""
    code, config = read_json(folder.sources, shapes.SOURCES) or {}, fingerprint_of(original.whole)
    begun = code.get("config") or config
    expected = combine(begun, code.get("files") or {})
    told = {name: record["fingerprint"] for name, record in zip(("summary.json", "environment.json"), records, strict=True) if "fingerprint" in record}
    others = set(told.values()) - {expected}
    if begun != config or (not code and len(others) == 1 and expected not in told.values()):
        yield f"config.yaml is that of another experiment: its fingerprint is {config[:12]}, and the run was begun with {(others or {begun}).pop()[:12]}"
        return
    for name, one in told.items():
        if one != expected:
            yield f"{name}: the fingerprint is recorded as {one[:12]}, and is {expected[:12]} when computed again"


def _recorded(file: str, path: str, one: Any, two: Any) -> str:
    if one in (None, "???"):
        return f"{file}: {path} is missing, and is {two!r} when computed again"
    again = "there is none when computed again" if two in (None, "???") else f"is {two!r} when computed again"
    return f"{file}: {path} is recorded as {one!r}, and {again}"


def _level(told: Mapping[str, Any], run: Run) -> str:
    """That a level is more than config and strategy can promise, in words."""
    level, most = told.get("level"), run.recorder.level
    order = list(LEVELS)
    if level is None or (level in order and order.index(level) <= order.index(most)):
        return ""
    return f"the level is recorded as {level}, and the most that this config can claim is {most}"


def _contradictions(recorded: Mapping[str, Any]) -> Iterator[str]:
    """Where environment.json tells one thing twice, and not alike."""
    shown = dict(_facts(recorded)) | {"device": recorded.get("device")}
    shown |= {f"data.{split}": facts.get("fingerprint") for split, facts in recorded.get("data", {}).items()}
    shown |= {f"optimizers.{phase}": facts.get("implementation") for phase, facts in recorded.get("optimizers", {}).items()}
    for name, value in recorded.get("decides", {}).items():
        if shown.get(name, value) != value:
            yield f"environment.json contradicts itself: {name} is {shown[name]!r} where it is shown, and {value!r} under `decides`"


def unverifiable(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Facts of the recording machine that differ here and decide no bit, so that nothing tells whether they are true, in a sentence."""
    one, two = dict(_facts(recorded)), dict(_facts(json.loads(json.dumps(here))))
    own = {"versions.samewise"} - two.keys()  # of the copy in a bundle: its code is compared by content
    differing = [name for name in one if name not in recorded.get("decides", {}) and name not in own and one[name] != two.get(name)]
    said = "; ".join(f"{name} recorded as {one[name]!r}, here {two.get(name)!r}" for name in differing)
    return [f"cannot be verified: {said}"] if said else []


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _OF_THE_MACHINE:
        value = record.get(key)
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", one) for name, one in value.items() if name != "diff")
        elif value is not None:
            yield key, value
