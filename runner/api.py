"""The commands as functions, for notebooks and scripts: `samewise.train` is `train` here.

They give the commands' bits and raise the errors that those print.

Torch, MLflow and pandas are imported when a function needs them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from samewise.runner.arguments import PATH, all_files, for_python, several
from samewise.runner.config import project
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.processes.variables import prepare as set_variables
from samewise.runner.records import shapes, sources
from samewise.runner.records.files import read_json, read_mapping
from samewise.runner.results import Trained
from samewise.runner.secrets import filter_output
from samewise.runner.sweeps.results import current_results
from samewise.runner.training.same_bits.determinism import fresh_torch_state

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from samewise.runner.config.compose import Composed
    from samewise.runner.interfaces import Batch, Prediction
    from samewise.runner.training.predictor import Predictor

_COLUMNS = (
    "name",
    "run",
    "label",
    "code",
    "state",
    "step",
    "steps",
    "monitor",
    "value",
    "seconds",
    "changed",
    "reason",
    "folder",
)


@dataclass(frozen=True)
class Transforms:
    """Turns files and samples into the batches that a run's model takes. Call it."""

    predictor: Predictor = field(repr=False)

    def __call__(self, *samples: Any) -> Batch:
        """Samples of the run's data set, or files, as one batch: transformed as in evaluation,
        collated, on the model's device.

        Raises:
            DataError: a file cannot be read, or is not what the recipe predicts from.
        """
        return self.predictor.batch_of(samples)


class LoadedRun(NamedTuple):
    """A run's model with its transforms and config: `model, transforms, config =
    samewise.load(run)`.
    """

    model: nn.Module
    """With the checkpoint's weights, in eval mode, on the config's device."""
    transforms: Transforms
    """From files or samples to the model's input."""
    config: Composed
    """The run's; `config.cfg` has the values."""


_P = ParamSpec("_P")
_R = TypeVar("_R")
_COMPUTING = threading.RLock()


def _one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let other threads wait: the random generators and the settings of torch are the process's."""

    @wraps(function)
    def call(*args: _P.args, **named: _P.kwargs) -> _R:
        with _COMPUTING:
            return function(*args, **named)

    return call


@for_python
def compose(
    *overrides: str, packages: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()
) -> Composed:
    """An experiment's config, as `samewise show` shows it.

    Args:
        overrides: As on the command line: `experiment=resnet18_digits`, `optimizer.lr=0.05`.
        packages: Packages of yours whose classes configs may name, in addition to those in your
            pyproject.toml.
        config_dirs: Config folders of yours, likewise.

    Raises:
        ConfigError: with a problem for every override that is wrong.
    """
    from samewise.runner.config.compose import compose

    return compose(
        overrides, project=project.find(packages=several(packages), configs=several(config_dirs))
    )


@for_python
@_one_at_a_time
def train(
    *experiment: str | Composed,
    packages: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    fresh: bool = False,
) -> Trained:
    """Train an experiment, resume it, or return its result if it is finished: the same bits as
    `samewise train`.

    Args:
        experiment: Overrides, or the result of `compose`.
        packages: As in `compose`.
        config_dirs: As in `compose`.
        fresh: Train again, in a folder beside the existing ones; nothing is deleted.

    Raises: ConfigError: with all that is wrong, before anything is trained; or this process cannot
        give the same bits, and why. TrainingError: training failed. Interrupted: it was asked to
        stop, and is saved; call again to resume.
    """
    from samewise.runner.config.check import settings_are_sound
    from samewise.runner.config.earlier_version import as_trained
    from samewise.runner.training.prepare import finished_summary, prepare

    sources.note_loaded()
    composed = _compose_given(experiment, packages, config_dirs)
    # With the current code, in case one config is trained twice
    composed = composed.with_new_folder() if fresh else as_trained(replace(composed))
    with filter_output():
        if settings_are_sound(composed):
            if (done := finished_summary(composed)) is not None:
                return _summary_to_trained(done, composed, is_new=False)
            set_variables(composed.cfg.reproducibility)

        with fresh_torch_state():
            ready = prepare(composed)
            from samewise.runner.training.loop import fit
            from samewise.runner.training.run import Run

            summary = (
                fit(ready)
                if isinstance(ready, Run)
                else ready or read_json(composed.folder.summary, shapes.SUMMARY)
            )
    assert summary is not None, "ranks that have trained a run leave its summary"
    return _summary_to_trained(summary, composed, is_new=True)


@for_python
@_one_at_a_time
def load(
    run: str | Path | Trained,
    *overrides: str,
    checkpoint: str | int = "best",
    weights: str | None = None,
    run_root: str | Path = "runs",
    packages: Sequence[str] = (),
    trust: bool = False,
) -> LoadedRun:
    """Load a run's model, its transforms and its config.

    Args:
        run: What `train` gave; or the run's folder or name, the start of its fingerprint, or its
            MLflow run id.
        overrides: Values to change in the run's config: `device=cpu`.
        checkpoint: best, last, or a step.
        weights: Those that a callback keeps under this name, as `ema`; None: the trained ones.
        run_root: Where to look for runs.
        packages: As in `compose`.
        trust: Use a folder that someone else has made and that you trust; remembered for it as it
            is now.

    Raises:
        ConfigError: the run does not exist, or is not one of yours.
        CheckpointError: it has no such checkpoint.
    """
    from samewise.runner.config import saved

    wanted: Any = run.folder if isinstance(run, Trained) else run
    if not isinstance(wanted, PATH):
        raise ConfigError(
            Problem("run", "is not a run", wanted, f"what samewise.train returned, or {saved.RUN}")
        )
    folder = saved.find(os.fspath(wanted), run_root=Path(run_root))
    composed = replace(
        saved.trusted_config_of(folder, overrides, trust=trust),
        project=project.find(packages=several(packages)),
    )
    set_variables(composed.cfg.reproducibility)

    # Imports torch, which must come after the variables
    from samewise.runner.records import (
        checkpoint as checkpoints,
    )
    from samewise.runner.records import kept_checkpoints
    from samewise.runner.training.predictor import build_predictor

    with fresh_torch_state():
        which = "best" if checkpoint == composed.cfg.evaluate.monitor else str(checkpoint)
        state = checkpoints.load(kept_checkpoints.choose_checkpoint(folder.checkpoints, which).path)
        labels = (
            (read_json(folder.environment, shapes.ENVIRONMENT) or {})
            .get("data", {})
            .get("train", {})
        )
        predictor = build_predictor(
            composed, composed.project, state, labels=labels, weights=weights
        )
    sources.warn_of_changes(folder.sources)
    kept_checkpoints.note_if_not_meant(
        folder.checkpoints, read_mapping(folder.summary, shapes.SUMMARY), which
    )
    return LoadedRun(predictor.model, Transforms(predictor), composed)


@for_python
@_one_at_a_time
def predict(
    run: LoadedRun | Trained | str | Path,
    *files: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    threshold: float | None = None,
    batch: int = 1,
    **how: Any,
) -> list[Prediction]:
    """Apply a run's model to files.

    A file's result does not depend on the other files, unless the model takes several at once.

    Args:
        run: What `load` gave, or what it takes.
        files: Images, videos or audio files, as the run's recipe predicts from, folders of them, or
            patterns; or lists of these.
        output: A folder for pictures and sounds; None: none are written.
        threshold: The least score of a box or a class; None: all.
        batch: How many files the model takes at once. In a batch the last bits of a prediction may
            differ.
        how: As in `load`, if `run` is not loaded yet.

    Returns:
        A prediction for each file, in their order; `values()` of it are plain values.

    Raises:
        ConfigError: with a problem for each file that cannot be read; or no file is given.
    """
    asked = all_files(files)
    if isinstance(run, LoadedRun) and how:
        raise ConfigError(
            *(
                Problem(
                    name,
                    "is for a run that is not loaded yet",
                    value,
                    hint="give it to samewise.load",
                )
                for name, value in how.items()
            )
        )
    loaded = run if isinstance(run, LoadedRun) else load(run, **how)
    with fresh_torch_state():
        predictor, folder = loaded.transforms.predictor, None if output is None else Path(output)
        made = predictor.predict_files(
            predictor.files(asked), folder, threshold=threshold, batch=batch
        )
        return [prediction for _, prediction, _ in made]


@for_python
def runs(
    run_root: str | Path = "runs",
    *,
    where: Sequence[str] = (),
    sort: str | None = None,
    diff: bool = False,
    uri: str | None = None,
) -> pandas.DataFrame:
    """A table of all runs, as `samewise runs` lists them: a row for each, a column for each fact,
    each metric and, with `diff`, each value that differs.

    Args:
        run_root: Where the runs are.
        where: Conditions, all of which must hold: `state=finished`, `valid/accuracy>0.9`.
        sort: A column or metric, the largest first; `-KEY`: the smallest first.
        diff: Add what differs between their configs.
        uri: List what this MLflow store has instead. MLflow's tokens in the environment are sent
            there.

    Raises:
        ConfigError: a condition cannot be read, or names what no run has.
    """
    import pandas

    from samewise.runner.runs import listing, selection

    stored = dict[str, dict[str, Any]]()
    if uri is None:
        found = listing.list_runs(Path(run_root))
    else:
        from samewise.runner.runs.stored_runs import list_stored

        found, stored = list_stored(uri)
    found = selection.matching(found, several(where))
    if sort:
        found = selection.sort_runs(found, sort)
    differing = (selection.varying(found) if uri is None else stored) if diff and found else {}
    rows = [
        {
            **(facts := one.facts()),
            **facts.pop("metrics"),
            **one.also,
            **differing.get(one.folder, {}),
        }
        for one in found
    ]
    table = pandas.DataFrame(rows, columns=None if rows else list(_COLUMNS))
    table["changed"] = pandas.to_datetime(table["changed"], unit="s", utc=True)
    return table


@for_python
def sweep(
    *overrides: str,
    wait: bool = True,
    retry_failed: bool = False,
    run_root: str | Path | None = None,
    packages: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    trust: bool = False,
) -> pandas.DataFrame:
    """Train with several values, each run in a separate process, or resume a sweep: a table with a
    row for each run, including those that failed.

    Args:
        overrides: As on the command line, some with several values: `optimizer.lr=0.03,0.1`,
            `seed=range(3)`; or a sweep's id or folder.
        wait: Wait until all have ended; otherwise only until they are submitted, if the launcher
            submits to a cluster.
        retry_failed: Run those again that have failed.
        run_root: Where to look for a sweep by its id; None: in runs. A new sweep takes the override
            `run_root=FOLDER`.
        packages: As in `compose`.
        config_dirs: As in `compose`.
        trust: As in `load`.

    Raises:
        ConfigError: what is wrong with any of them, before one starts.
        Interrupted: asked to stop; call again to resume.
    """
    import pandas

    from samewise.runner.sweeps import running
    from samewise.runner.sweeps.report.tables import as_plain_values

    if not overrides:
        raise ConfigError(
            Problem(
                "sweep",
                "has no values to try",
                expected="overrides, one with several values",
                hint="optimizer.lr=0.03,0.1",
            )
        )
    if run_root is not None and any("=" in one for one in overrides):
        hint = f"as an override: 'run_root={run_root}'"
        raise ConfigError(
            Problem(
                "run_root",
                "is where a sweep is looked up by its id, and these overrides make a new one",
                str(run_root),
                hint=hint,
            )
        )
    mine = project.find(packages=several(packages), configs=several(config_dirs))
    with filter_output():
        ready = running.prepare_sweep(
            overrides, mine, run_root=Path(run_root or "runs"), trust=trust, wait=wait
        )
        running.run_sweep(ready, wait=wait, retry_failed=retry_failed)
        rows = [as_plain_values(one) for one in current_results(ready.folder, mine)]
    kept = ("state", "reason", "steps", "seconds", "weights_sha256", "folder")
    return pandas.DataFrame(
        [
            {
                **{
                    key: _number(text)
                    for key, text in {**row["values"], "seed": row["seed"]}.items()
                },
                **row["best"],
                **{name: row[name] for name in kept},
            }
            for row in rows
        ]
    )


def _number(text: Any) -> Any:
    """Convert a sweep's value to a number if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text


def _compose_given(
    experiment: Sequence[Any], packages: Sequence[str], config_dirs: Sequence[str | Path]
) -> Composed:
    from samewise.runner.config.compose import Composed

    given = [one for one in experiment if isinstance(one, str)]
    if len(given) == len(experiment):
        return compose(*given, packages=packages, config_dirs=config_dirs)
    if len(experiment) == 1 and isinstance(experiment[0], Composed):
        return experiment[0]
    hint = "samewise.train(samewise.compose(...)), with all overrides there"
    wrong = next((one for one in experiment if not isinstance(one, str | Composed)), None)
    if wrong is not None:
        hint = (
            "samewise.train(*overrides)"
            if isinstance(wrong, list | tuple)
            else "samewise.train('experiment=NAME', 'optimizer.lr=0.05')"
        )
    raise ConfigError(
        Problem(
            "experiment", "takes overrides, each a string, or one composed config", wrong, hint=hint
        )
    )


def _summary_to_trained(summary: Any, composed: Composed, *, is_new: bool) -> Trained:
    metrics = summary["metrics"]
    return Trained(
        folder=composed.folder.path,
        steps=summary["steps"],
        metrics=dict(metrics["final"]),
        best=dict(metrics["best"]),
        monitor=metrics["monitor"],
        weights_sha256=summary["weights_sha256"],
        level=summary["level"],
        is_new=is_new,
    )
