"""Lists the runs of a run root with name, state, progress and monitored metric, from small files only. Imports neither torch nor mlflow."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from samewise.runner.config import header, saved
from samewise.runner.config.fingerprint import identity
from samewise.runner.config.tree import at, flat
from samewise.runner.config.yaml_files import read_yaml, require_modest
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.records import locks, shapes
from samewise.runner.records.files import damaged_file, read_mapping, read_text, warn_once
from samewise.runner.records.folder import RunFolder, require_root
from samewise.runner.records.found import below
from samewise.runner.sweep.results import State, best_evaluations, latest
from samewise.runner.tracking.backends import backends_of
from samewise.runner.tracking.progress import is_behind


@dataclass(frozen=True)
class ListedRun:
    """A run in the list.

    Args:
        name: Of the experiment.
        run: The name of its folder: the start of its fingerprint, and its number if it was trained again.
        label: What was overridden.
        state: Where it stands.
        step: Optimizer steps done.
        steps: The total; 0 if unknown.
        monitor: The metric that determines the best step.
        value: The best so far; NaN if there is none.
        also: The best so far by each other monitored metric.
        metrics: All metrics, at the best step so far.
        seconds: The time spent training, if it has ended.
        changed: When its folder was last written to, in seconds since the epoch.
        reason: Why it failed.
        folder: Its own.
    """

    name: str
    run: str
    label: str
    state: State
    step: int
    steps: int
    monitor: str
    value: float
    also: Mapping[str, float]
    metrics: Mapping[str, float] = field(repr=False)
    seconds: float
    changed: float
    reason: str
    folder: str

    def facts(self) -> dict[str, Any]:
        """As plain values, for programs; NaN becomes null."""
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in {**asdict(self), "state": self.state.value}.items()}

    def get(self, key: str) -> Any:
        """The value of `--sort` and `--where`: a field, or a metric as the table shows it; None if the run lacks it, or it is NaN."""
        value = self.facts()[key] if key in ListedRun.__dataclass_fields__ else {**self.metrics, **self.also}.get(key)
        return None if isinstance(value, float) and math.isnan(value) else value


def list_runs(run_root: Path) -> list[ListedRun]:
    """All runs of a folder, the last changed at the end; a ConfigError if it does not exist. Damaged files give a warning and partial entries."""
    require_root(run_root)
    return sorted((read_run(folder) for folder in saved.below(run_root)), key=lambda one: one.changed)


def read_run(folder: RunFolder) -> ListedRun:
    """Read one run."""
    monitor, modes, label = _read_config(folder)
    summary = read_mapping(folder.summary, shapes.SUMMARY)
    steps = int(read_mapping(folder.environment, shapes.ENVIRONMENT).get("total_steps") or 0)
    failure = read_mapping(folder.failure)
    changed = max(path.stat().st_mtime for path in (folder.config, folder.metrics, folder.summary) if path.exists())
    common: dict[str, Any] = {
        "name": folder.path.absolute().parent.name,
        "run": folder.path.name,
        "label": label,
        "changed": changed,
        "folder": str(folder.path),
    }
    if summary.get("status") == "finished":
        metrics = {name: value for name, value in (summary["metrics"]["best"] or summary["metrics"]["final"]).items() if name != "step"}
        monitor = summary["metrics"]["monitor"]
        ended: dict[str, Any] = {"state": State.finished, "step": summary["steps"], "steps": steps, "seconds": summary["timings"]["training_s"], "reason": ""}
        others = {name: one[name] for name, one in (summary["metrics"].get("also") or {}).items()}
        return ListedRun(**common, **ended, monitor=monitor, also=others, metrics=metrics, value=metrics.get(monitor, math.nan))
    step, best = latest(folder, monitor)[0], best_evaluations(folder, modes)
    metrics = best.pop(monitor, {})
    state = State.running if locks.holder(folder.lock) is not None else State.failed if failure else State.interrupted
    reason = re.sub(r"^\w+Error: ", "", str(failure.get("error") or "")).partition("\n")[0] if state is State.failed else ""
    others, value = {name: one[name] for name, one in best.items()}, metrics.get(monitor, math.nan)
    going: dict[str, Any] = {"state": state, "step": step, "steps": steps, "seconds": math.nan, "reason": reason}
    return ListedRun(**common, **going, monitor=monitor, also=others, metrics=metrics, value=value)


def _read_config(folder: RunFolder) -> tuple[str, dict[str, str], str]:
    """(monitored metric, the mode of it and of the others, label), from the text: composing the config would take a hundred times as long."""
    try:
        text = read_text(folder.config) or ""
        found = re.search(r"^evaluate:\n(?:  .*\n)+", text, re.MULTILINE)
        if found is None:
            _warn(folder.config, ValueError("`evaluate` is missing"))
        evaluate = read_yaml(found[0])["evaluate"] if found else {}
        monitor = str(evaluate.get("monitor") or "")
        modes = {name: str(mode) for name, mode in {monitor: evaluate.get("mode"), **(evaluate.get("also") or {})}.items() if name}
        return monitor, modes, header.read(text)[1]
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        _warn(folder.config, error)
        return "", {}, ""


def _warn(config: Path, error: Exception) -> None:
    """Warn, once, that a run is listed without its settings, or some of them."""
    known = error if isinstance(error, ConfigError) else damaged_file(config, "it is not valid YAML" if isinstance(error, yaml.YAMLError) else str(error))
    warn_once(config, known.problems[0])


_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "~": lambda value, text: str(text) in str(value),
}


def matching(runs: Iterable[ListedRun], conditions: Sequence[str]) -> list[ListedRun]:
    """The runs that meet all conditions: `state=failed`, `valid/accuracy>0.9`, `label~lr=0.1`, `scheduler=cosine`, `clip_norm=null`.

    ConfigError if a condition cannot be parsed, names a value that no run has, or compares it with an impossible one.
    """
    found = everything = list(runs)
    for condition in conditions:
        match = re.fullmatch(r"([\w/. -]+?)\s*(!=|<=|>=|=|<|>|~)\s*(.+)", condition)
        if match is None:
            raise ConfigError(
                Problem("--where", "is not a valid condition", condition, "NAME=VALUE, NAME>VALUE, NAME~PART, ...", "state=finished, 'valid/accuracy>0.9'")
            )
        key, sign, text = match.groups()
        values = values_of("--where", key, everything)
        _require_value(condition, key, list(values.values()), sign, text)
        found = [one for one in found if _holds(values[one.folder], sign, text)]
    return found


def _holds(value: Any, sign: str, text: str) -> bool:
    if text == "null" and sign in ("=", "!="):
        return (value is None) is (sign == "=")
    if value is None:
        return False
    if isinstance(value, int | float) and sign != "~":
        return _COMPARED[sign](float(value), float(text))
    if isinstance(value, list) and sign in ("=", "!="):
        with contextlib.suppress(yaml.YAMLError):
            return _COMPARED[sign](value, read_yaml(text))
    return _COMPARED[sign](str(value), text)


def sort_runs(runs: Sequence[ListedRun], key: str) -> list[ListedRun]:
    """Sort by a field or metric, the largest first (`-KEY`: the smallest first); runs without it last. A ConfigError if no run has it."""
    name, sign = key.removeprefix("-"), 1 if key.startswith("-") else -1
    values = values_of("--sort", name, runs)
    known = [one for one in runs if values[one.folder] is not None]
    numbers = all(isinstance(values[one.folder], int | float) for one in known)
    ordered = sorted(known, key=lambda one: sign * values[one.folder] if numbers else str(values[one.folder]))
    return [*ordered, *(one for one in runs if values[one.folder] is None)]


def values_of(option: str, key: str, runs: Sequence[ListedRun]) -> dict[str, Any]:
    """Each run's value of a field, metric or setting, or its choice of a group, by folder; None if it has none.

    ConfigError, with the option's name as its path, if no run has it.
    """
    known = [*ListedRun.__dataclass_fields__, *dict.fromkeys(name for one in runs for name in (*one.metrics, *one.also))]
    if key in known:
        return {one.folder: one.get(key) for one in runs}
    configs = {one.folder: _config(one.folder) for one in runs}
    values = {folder: _setting(folder, config, key) for folder, config in configs.items()}
    if runs and all(value is None for value in values.values()) and key not in (settings := dict(flat(next(filter(None, configs.values()), {})))):
        meant = next((path for path in settings if path.endswith(f".{key}")), None)  # lr: optimizer.lr
        raise ConfigError(Problem(option, "no such column, metric or setting", key, hint=f"did you mean '{meant}'?" if meant else nearest(key, known)))
    return {folder: str(value).lower() if isinstance(value, bool) else value for folder, value in values.items()}


def _setting(folder: str, config: Mapping[str, Any], key: str) -> Any:
    found = at(config, key)
    return header.read(read_text(RunFolder(Path(folder)).config) or "")[0].get(key) if config and isinstance(found, Mapping | None) else found


def _config(folder: str) -> Mapping[str, Any]:
    """A run's settings, untyped, since types would take a hundred times as long; empty without a file, and, with a warning, if that is damaged."""
    file = RunFolder(Path(folder)).config
    try:
        if (text := read_text(file)) is None:  # a run of an MLflow store, trained elsewhere
            return {}
        require_modest(text, str(file), interpolations="none")
        header.read(text)
        read: Any = read_yaml(text)
        if isinstance(read, Mapping):
            return cast(Mapping[str, Any], read)
        raise ValueError("it has no settings")
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        _warn(file, error)
        return {}


def _require_value(condition: str, key: str, values: Sequence[Any], sign: str, text: str) -> None:
    """Refuse an unknown state, and a numeric comparison with a value that is not a number."""
    if key == "state" and sign in ("=", "!=") and text not in State.__members__:
        raise ConfigError(Problem("--where", "no such state", condition, f"one of: {', '.join(State)}", nearest(text, State)))
    if sign != "~" and not (text == "null" and sign in ("=", "!=")) and any(isinstance(value, int | float) for value in values):
        try:
            float(text)
        except ValueError:
            raise ConfigError(Problem("--where", "compares a number with text", condition, "NAME=NUMBER, NAME>NUMBER, ...")) from None


def varying(runs: Sequence[ListedRun]) -> dict[str, dict[str, Any]]:
    """The settings that affect the result and differ between runs: by folder, the values by path of the config. A damaged config gives a warning."""
    known = {one.folder: _identity(RunFolder(Path(one.folder)).config) for one in runs}
    paths = dict.fromkeys(path for config in known.values() for path in config)
    kept = [path for path in paths if len({repr(config.get(path, "-")) for config in known.values() if config}) > 1]
    return {folder: {path: config.get(path, "-") for path in kept} for folder, config in known.items()}


def _identity(file: Path) -> dict[str, Any]:
    try:
        return dict(flat(identity(saved.config_in(file).whole)))
    except ConfigError as error:
        _warn(file, error)
        return {}


def trained_from(runs: Sequence[ListedRun], run_root: Path) -> list[str]:
    """The folders of other runs, in this run root or theirs, whose config names a checkpoint of one of these, by whatever path."""
    those = {Path(one.folder).resolve() for one in runs}
    roots = [*dict.fromkeys(one.parent.parent for one in those), run_root]  # run_root last: its runs are named by it
    others = {folder.path.resolve(): str(folder.path) for root in roots for folder in below(root)}
    return [folder for place, folder in others.items() if place not in those and _names_checkpoint(folder, those)]


def _names_checkpoint(folder: str, those: Collection[Path]) -> bool:
    text, config = read_text(RunFolder(Path(folder)).config) or "", _config(folder)
    named = [value for key in ("initialise.weights", "resume_from") if isinstance(value := at(config, key), str)]
    places = [Path(os.path.realpath(os.path.expanduser(value))) for value in named]  # a link may lead there
    return any(f"{one.name}/checkpoints/" in text or any(place.is_relative_to(one) for place in places) for one in those)


def in_mlflow(runs: Sequence[ListedRun]) -> list[ListedRun]:
    """Those of which MLflow has something."""
    return [one for one in runs if read_mapping(RunFolder(Path(one.folder)).tracking, shapes.TRACKING).get("run_id")]


def unsent(runs: Sequence[ListedRun]) -> list[ListedRun]:
    """Those that are tracked in MLflow, which does not have everything yet."""
    settings = {one.folder: {key: at(_config(one.folder), f"tracking.{key}") for key in ("enabled", "report_to")} for one in runs}
    return [one for one in runs if "mlflow" in backends_of(settings[one.folder]) and is_behind(RunFolder(Path(one.folder)))]


def require_no_links(runs: Sequence[ListedRun]) -> None:
    """ConfigError if a run's folder, or its experiment's, is a link: what is deleted would be elsewhere. A run root may be one."""
    folders = [Path(one.folder).absolute() for one in runs]
    links = dict.fromkeys(path for folder in folders for path in (folder.parent, folder) if path.is_symlink())
    if links:
        hint = "nothing has been deleted; remove the link, or name the run by the folder to which it leads"
        raise ConfigError(*(Problem(str(link), f"is a link to {link.resolve()}", hint=hint) for link in links))


def delete(runs: Sequence[ListedRun]) -> None:
    """Delete runs' folders with their checkpoints; their records in MLflow stay. ConfigError if one is being written or sent: then none is deleted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(soft + 2 * len(runs), hard)), hard))  # a file for each lock
    with contextlib.ExitStack() as held:
        for one in runs:
            folder = RunFolder(Path(one.folder))
            for lock, doing in ((folder.lock, "written"), (folder.sending, "sent")):
                try:
                    held.enter_context(locks.hold(lock, sign=False))
                except locks.LockHeld as holder:
                    hint = "wait for it, or stop it; nothing has been deleted"
                    raise ConfigError(Problem(one.folder, f"is being {doing} by {holder}", hint=hint)) from None
        for folder in [Path(one.folder).resolve() for one in runs]:
            shutil.rmtree(folder)
            if not any(folder.parent.iterdir()):
                folder.parent.rmdir()


def size_of(one: ListedRun) -> int:
    """The size of a run's folder in bytes; links count as 0."""
    return sum(path.lstat().st_size for path in Path(one.folder).rglob("*") if path.is_file() and not path.is_symlink())


def age(changed: float) -> str:
    """`5 min`, `3 h`, `12 d`."""
    minutes = max(0.0, time.time() - changed) / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h" if minutes < 48 * 60 else f"{minutes / 1440:.0f} d"
