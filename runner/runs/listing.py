"""List the runs of a run root with name, state, progress and monitored metric.

Reads small files only, and imports neither torch nor mlflow.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from samewise.runner.config import saved
from samewise.runner.config.tree import at
from samewise.runner.config.yaml_files import read_yaml, require_modest
from samewise.runner.errors import ConfigError
from samewise.runner.records import header, locks, shapes, sources
from samewise.runner.records.files import damaged_file, read_mapping, read_text, warn_once
from samewise.runner.records.folder import RunFolder, require_root
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
            for key, value in {**asdict(self), "state": self.state.value}.items()
        }

    def get(self, key: str) -> Any:
        """Return the value for `--sort` and `--where`: a field, or a metric as the table shows it.

        None if the run lacks it, or it is NaN.
        """
        value = (
            self.facts()[key]
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
    return sorted(
        (read_run(folder) for folder in saved.below(run_root)), key=lambda run: run.changed
    )


def read_run(folder: RunFolder) -> ListedRun:
    """Read one run."""
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
        # The lock ends with its process: a killed run could not record that it has ended
        is_running = locks.holder(folder.lock) is not None
        state = State.running if is_running else State.failed if failure else State.interrupted
        step, evaluations = latest(folder, monitor)[0], best_evaluations(folder, modes)
    metrics = evaluations.pop(monitor, {})
    error = str(failure.get("error") or "") if state is State.failed else ""
    return ListedRun(
        name=notes.get("name") or folder.path.absolute().parent.name,
        run=folder.path.name,
        label=label,
        code=sources.code_name(folder.sources),
        state=state,
        step=step,
        steps=int(read_mapping(folder.environment, shapes.ENVIRONMENT).get("total_steps") or 0),
        monitor=monitor,
        value=metrics.get(monitor, math.nan),
        also={name: evaluation[name] for name, evaluation in evaluations.items()},
        metrics={name: value for name, value in metrics.items() if name != "step"},
        seconds=summary["timings"]["training_s"] if state is State.finished else math.nan,
        changed=changed,
        reason=re.sub(r"^\w+Error: ", "", error).partition("\n")[0],
        folder=str(folder.path),
        tags={key: str(value) for key, value in tags.items() if value is not None},
    )


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


def settings_of(folder: str) -> Mapping[str, Any]:
    """Return a run's settings; empty without a file, or, with a warning, if that is damaged."""
    file = RunFolder(Path(folder)).config
    try:
        # Runs of an MLflow store may have been trained on another machine
        if (text := read_text(file)) is None:
            return {}
        require_modest(text, str(file), interpolations="none")
        header.read(text)
        # Untyped, since types would take a hundred times as long
        settings: Any = read_yaml(text)
        if isinstance(settings, Mapping):
            return cast(Mapping[str, Any], settings)
        raise ValueError("it has no settings")
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        warn_of(file, error)
        return {}


def differing(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the values that differ between runs, by folder and path.

    Args:
        configs: Values by folder and path; runs without any are not compared.
    """
    paths = [
        path
        for path in dict.fromkeys(path for config in configs.values() for path in config)
        # By repr, since values may be lists
        if len({repr(config.get(path, "-")) for config in configs.values() if config}) > 1
    ]
    return {
        folder: {path: config.get(path, "-") for path in paths}
        for folder, config in configs.items()
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
