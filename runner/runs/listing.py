"""List the runs of a run root with name, state, progress and monitored metric.

Reads small files only, and imports neither torch nor mlflow.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from samewise.runner.config.tree import at
from samewise.runner.config.yaml_files import read_yaml, require_modest
from samewise.runner.errors import ConfigError
from samewise.runner.records import header, index, locks, shapes, sources
from samewise.runner.records.files import damaged_file, read_mapping, read_text, warn_once
from samewise.runner.records.folder import RunFolder, require_root
from samewise.runner.records.found import candidates
from samewise.runner.sweeps.results import State, best_evaluations, latest


@dataclass(frozen=True)
class ListedRun:
    """A run in the list.

    Args:
        name: The name that the user gave the run, or the experiment's.
        run: Name of the run's folder: the start of its fingerprint, and a number if it was trained
            again.
        label: The overrides, shortened.
        code: Short name of the user's code (`sources.code_name`); "" if there is none.
        state: Whether it runs, or how it has ended.
        step: Optimizer steps done.
        steps: Optimizer steps in total; 0 if unknown.
        monitor: Metric that determines the best step.
        value: Best value of `monitor` so far; NaN if there is none.
        also: Best value so far of each other monitored metric.
        metrics: All metrics, at the best step so far.
        seconds: Seconds of training; NaN if the run has not finished.
        changed: Time of the last write to its folder, in seconds since the epoch.
        reason: Why the run failed; "" otherwise.
        folder: Path of the run's folder.
        tags: Tags of the config and of `samewise runs tag`.
    """

    name: str
    run: str
    label: str
    code: str
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
    tags: Mapping[str, str]

    def facts(self) -> dict[str, Any]:
        """Return the fields as plain values, for programs; NaN becomes None."""
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in {**vars(self), "state": self.state.value}.items()
        }

    def get(self, key: str) -> Any:
        """Return the value for `--sort` and `--where`: a field, or a metric as the table shows it.

        None if the run lacks it, or it is NaN.
        """
        value = (
            getattr(self, key)
            if key in ListedRun.__dataclass_fields__
            else {**tagged(self.tags), **self.metrics, **self.also}.get(key)
        )
        return None if isinstance(value, float) and math.isnan(value) else value


def tagged(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags by the names of `--where`: `tags.team`."""
    return {f"tags.{name}": value for name, value in tags.items()}


def list_runs(run_root: Path) -> list[ListedRun]:
    """Return all runs of a folder, the last changed at the end.

    Damaged files give a warning and partial entries.

    Raises:
        ConfigError: The folder does not exist.
    """
    require_root(run_root)
    folders = candidates(run_root)
    texts = dict(index.entries(run_root, "run", _FILES, folders, _read_facts))
    return sorted(
        (_make_run(folder, texts[folder]) for folder in folders if folder in texts),
        key=lambda run: run.changed,
    )


def read_run(folder: RunFolder) -> ListedRun:
    """Read one run."""
    return _make_run(str(folder.path), _read_facts(folder))


_FILES = (
    *("config.yaml", "metrics.jsonl", "summary.json", "failure.json", "environment.json"),
    *("sources.json", "tags.json", "notes.json"),
)
"""The files that `_read_facts` reads."""


def _make_run(folder: str, facts: str) -> ListedRun:
    values: dict[str, Any] = json.loads(facts)
    state = State(values["state"])
    # No file shows that a run goes on: its lock ends with its process, however that ends
    if state is not State.finished and locks.holder(RunFolder(Path(folder)).lock) is not None:
        values["reason"], state = "", State.running
    values |= {"state": state, "folder": folder}
    return ListedRun(**values)


def _read_facts(folder: RunFolder) -> str:
    """Return the fields of a run that nobody trains, as JSON."""
    monitor, modes, label, config_tags = _read_config(folder)
    notes = read_mapping(folder.notes, shapes.NOTES)
    tags = {
        **config_tags,
        **read_mapping(folder.tags, shapes.TAGS),
        **notes.get("tags", {}),
    }
    summary = read_mapping(folder.summary, shapes.SUMMARY)
    failure = read_mapping(folder.failure)
    changed = max(
        path.stat().st_mtime
        for path in (folder.config, folder.metrics, folder.summary)
        if path.exists()
    )
    if summary.get("status") == "finished":
        results = summary["metrics"]
        state, step, monitor = State.finished, summary["steps"], results["monitor"]
        best = results["best"] or results["final"]
        evaluated = {
            name: value
            for evaluation in summary.get("evaluations", {}).values()
            if evaluation["step"] == best.get("step", step)
            for name, value in evaluation["metrics"].items()
        }
        evaluations = {**(results.get("also") or {}), monitor: {**evaluated, **best}}
    else:
        state = State.failed if failure else State.interrupted
        step, evaluations = latest(folder, monitor)[0], best_evaluations(folder, modes)
    metrics = evaluations.pop(monitor, {})
    error = str(failure.get("error") or "") if state is State.failed else ""
    facts = {
        "name": notes.get("name") or folder.path.absolute().parent.name,
        "run": folder.path.name,
        "label": label,
        "code": sources.code_name(folder.sources),
        "state": state,
        "step": step,
        "steps": int(read_mapping(folder.environment, shapes.ENVIRONMENT).get("total_steps") or 0),
        "monitor": monitor,
        "value": metrics.get(monitor, math.nan),
        "also": {name: evaluation[name] for name, evaluation in evaluations.items()},
        "metrics": {name: value for name, value in metrics.items() if name != "step"},
        "seconds": summary["timings"]["training_s"] if state is State.finished else math.nan,
        "changed": changed,
        "reason": re.sub(r"^\w+Error: ", "", error).partition("\n")[0],
        "tags": {key: str(value) for key, value in tags.items() if value is not None},
    }
    return json.dumps(facts)


def _read_config(folder: RunFolder) -> tuple[str, dict[str, str], str, Mapping[str, Any]]:
    """Return the monitored metric, the modes of all monitored metrics, the label and the tags."""
    # From the text: composing the config would take a hundred times as long
    try:
        text = read_text(folder.config) or ""
        sections = re.findall(r"^(?:evaluate|tracking):\n(?:  .*\n)+", text, re.MULTILINE)
        settings = read_yaml("".join(sections)) or {}
        if "evaluate" not in settings:
            warn_of(folder.config, ValueError("`evaluate` is missing"))
        evaluate = settings.get("evaluate", {})
        monitor = str(evaluate.get("monitor") or "")
        modes = {
            name: str(mode)
            for name, mode in {
                monitor: evaluate.get("mode"),
                **(evaluate.get("also") or {}),
            }.items()
            if name
        }
        return monitor, modes, header.read(text)[1], at(settings, "tracking.tags") or {}
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        warn_of(folder.config, error)
        return "", {}, "", {}


def warn_of(config: Path, error: Exception) -> None:
    """Warn, once, that a run is listed without some of its settings."""
    problem = (
        error
        if isinstance(error, ConfigError)
        else damaged_file(
            config, "it is not valid YAML" if isinstance(error, yaml.YAMLError) else str(error)
        )
    )
    warn_once(config, problem.problems[0])


def setting_lines(run_root: Path, folders: Iterable[str]) -> dict[str, str]:
    """Return runs' settings by folder: the config's first lines of comments, then `as_lines`.

    Empty without a config, or, with a warning, if that is damaged.
    """
    texts = index.entries(run_root, "settings", ("config.yaml",), folders, _read_settings)
    return dict.fromkeys(folders, "") | dict(texts)


def _read_settings(folder: RunFolder) -> str:
    try:
        # Runs of an MLflow store may have been trained on another machine
        text = read_text(folder.config) or ""
        require_modest(text, str(folder.config), interpolations="none")
        header.read(text)
        # Untyped, since types would take a hundred times as long
        settings: Any = read_yaml(text)
        if not isinstance(settings, Mapping):
            raise ValueError("it has no settings")
        comments = re.findall(r"\A(?:#.*\n)*", text)[0] or "#\n"
        return comments + as_lines(_leaves(cast(Mapping[str, Any], settings)))
    except (ConfigError, TypeError, ValueError, yaml.YAMLError) as error:
        warn_of(folder.config, error)
        return ""


def _leaves(node: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    """Yield paths and values; a list and an empty mapping are values."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast(Mapping[str, Any], value), f"{under}{key}.")
        else:
            yield f"{under}{key}", value


def as_lines(settings: Iterable[tuple[str, Any]]) -> str:
    """Format settings as a line of JSON for each: path and value."""
    return "".join(json.dumps(pair, default=str) + "\n" for pair in settings)


def setting(lines: str, key: str) -> Any:
    """Return a setting in `setting_lines`; for a group, the choice that the config names."""
    value = value_at(lines, key)
    return header.read(lines)[0].get(key) if lines and isinstance(value, Mapping | None) else value


def value_at(lines: str, key: str) -> Any:
    """Return a value in `setting_lines`; None if it is missing, or a mapping that is not empty."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        # The path may lead into a list
        start = lines.find(f"\n[{json.dumps('.'.join(parts[:end]))}, ") + 1
        if start:
            return at(json.loads(lines[start : lines.index("\n", start)])[1], parts[end:])
    return None


def differing(settings: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the values that differ between runs, by folder and path.

    Args:
        settings: `as_lines` by folder; runs without any are not compared.
    """
    compared = [lines for lines in settings.values() if lines]
    common = set(compared[0].splitlines() if compared else ())
    for lines in compared:
        common.intersection_update(lines.splitlines())
    values = {
        folder: dict(json.loads(x) for x in lines.splitlines() if x not in common)
        for folder, lines in settings.items()
    }
    paths = dict.fromkeys(path for config in values.values() for path in config)
    return {
        folder: {path: config.get(path, "-") for path in paths} for folder, config in values.items()
    }


def age(changed: float) -> str:
    """Format the time since a change: `5 min`, `3 h`, `12 d`."""
    minutes = max(0.0, time.time() - changed) / 60
    return (
        f"{minutes:.0f} min"
        if minutes < 90
        else f"{minutes / 60:.0f} h"
        if minutes < 48 * 60
        else f"{minutes / 1440:.0f} d"
    )
