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
from samewise.runner.results import Differences, Evaluation, Exported, Trained, Verification
from samewise.runner.secrets import filter_output
from samewise.runner.sweeps.results import current_results
from samewise.runner.training.same_bits.determinism import fresh_torch_state

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from samewise.runner.compare.comparison import PairedComparison
    from samewise.runner.config.compose import Composed
    from samewise.runner.interfaces import Batch, Prediction
    from samewise.runner.records.folder import RunFolder
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
    "tags",
)


@dataclass(frozen=True)
class Transforms:
    """Turns files and samples into the batches that a run's model takes. Call it."""

    predictor: Predictor = field(repr=False)

    def __call__(self, *samples: Any) -> Batch:
        """Return samples of the run's data set, or files, as one batch on the model's device.

        They are transformed as in evaluation, and collated.

        Raises:
            DataError: a file cannot be read, or is not what the recipe predicts from.
        """
        return self.predictor.batch_of(samples)


class LoadedRun(NamedTuple):
    """A run's model, transforms and config: `model, transforms, config = samewise.load(run)`."""

    model: nn.Module
    """With the checkpoint's weights, in eval mode, on the config's device."""
    transforms: Transforms
    """From files or samples to the model's input."""
    config: Composed
    """The run's; `config.cfg` has the values."""


_P = ParamSpec("_P")
_R = TypeVar("_R")
# Reentrant, since `predict` may call `load`
_COMPUTING = threading.RLock()


def _one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let other threads wait: the random generators and the settings of torch are the process's."""

    @wraps(function)
    def call(*args: _P.args, **arguments: _P.kwargs) -> _R:
        with _COMPUTING:
            return function(*args, **arguments)

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
    """Train an experiment, resume it, or return its result if it is finished.

    The bits are those of `samewise train`.

    Args:
        experiment: Overrides, or the result of `compose`.
        packages: As in `compose`.
        config_dirs: As in `compose`.
        fresh: Train again, in a folder beside the existing ones; nothing is deleted.

    Raises:
        ConfigError: With all problems, before anything is trained; or with the reason why this
            process cannot give the same bits.
        TrainingError: Training failed.
        Interrupted: A signal stopped it, and it is saved; call again to resume.
    """
    from samewise.runner.config.check import settings_are_sound
    from samewise.runner.training.prepare import finished_summary, prepare

    # Modules of a notebook's earlier cells are not imports of this experiment
    sources.note_loaded()
    composed = _compose_given(experiment, packages, config_dirs)
    # With the current code, in case one config is trained twice
    composed = composed.with_new_folder() if fresh else replace(composed)
    with filter_output():
        # A finished run is found before torch is imported
        if settings_are_sound(composed):
            if (done := finished_summary(composed)) is not None:
                return _summary_to_trained(done, composed, is_new=False)
            set_variables(composed.cfg.reproducibility)

        with fresh_torch_state():
            # A script may have changed what it has imported
            ready = prepare(composed, forks=False)
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
    folder, composed = _open(run, overrides, run_root, packages, trust=trust)
    # Imports torch, which must come after the variables
    from samewise.runner.records import kept_checkpoints
    from samewise.runner.records.checkpoint import load as load_state
    from samewise.runner.training.predictor import build_predictor

    with fresh_torch_state():
        # The link of the monitored metric is called `best`; only others bear a metric's name
        which = "best" if checkpoint == composed.cfg.evaluate.monitor else str(checkpoint)
        state = load_state(kept_checkpoints.choose_checkpoint(folder.checkpoints, which).path)
        predictor = build_predictor(
            composed,
            composed.project,
            state,
            labels=(read_json(folder.environment, shapes.ENVIRONMENT) or {})
            .get("data", {})
            .get("train", {}),
            weights=weights,
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
    paths = all_files(files)
    ConfigError.raise_all(
        Problem(name, "is for a run that is not loaded yet", value, hint="give it to samewise.load")
        for name, value in how.items()
        if isinstance(run, LoadedRun)
    )
    loaded = run if isinstance(run, LoadedRun) else load(run, **how)
    with fresh_torch_state():
        predictor, folder = loaded.transforms.predictor, None if output is None else Path(output)
        predictions = predictor.predict_files(
            predictor.files(paths), folder, threshold=threshold, batch=batch
        )
        return [prediction for _, prediction, _ in predictions]


@for_python
@_one_at_a_time
def evaluate(
    run: str | Path | Trained,
    *overrides: str,
    split: str = "valid",
    checkpoint: str | int = "best",
    weights: str | None = None,
    pictures: str | Path | None = None,
    run_root: str | Path = "runs",
    packages: Sequence[str] = (),
    trust: bool = False,
) -> Evaluation:
    """Evaluate a run's checkpoint on one of its splits, as `samewise eval` does.

    Args:
        run: As in `load`.
        overrides: As in `load`.
        split: train, valid, test, or a further one of the data set.
        checkpoint: As in `load`.
        weights: Only those that a callback keeps under this name, as `ema`; None: all.
        pictures: A folder for pictures; None: in the run's folder.
        run_root: As in `load`.
        packages: As in `compose`.
        trust: As in `load`.

    Raises:
        ConfigError: the run does not exist, is not one of yours, or the data do not fit it.
        CheckpointError: it has no such checkpoint.
    """
    folder, composed = _open(run, overrides, run_root, packages, trust=trust)
    # Imports torch, which must come after the variables
    from samewise.runner.training.restored import evaluate_checkpoint

    with fresh_torch_state():
        return evaluate_checkpoint(
            folder,
            composed,
            composed.project,
            split=split,
            checkpoint=str(checkpoint),
            weights=weights,
            pictures=None if pictures is None else Path(pictures),
        )


@for_python
@_one_at_a_time
def export(
    run: str | Path | Trained,
    output: str | Path,
    *overrides: str,
    to: Sequence[str] = ("pt2",),
    checkpoint: str | int = "best",
    weights: str | None = None,
    module: str | None = None,
    bare: bool = False,
    tolerance: float = 1e-4,
    run_root: str | Path = "runs",
    packages: Sequence[str] = (),
    trust: bool = False,
) -> Exported:
    """Write a run's model for other runtimes, and compare each file with the model.

    Args:
        run: As in `load`.
        output: A new or an empty folder.
        overrides: As in `load`.
        to: Formats: safetensors, pt2, aoti, onnx, executorch, executorch_portable.
        checkpoint: As in `load`.
        weights: As in `load`.
        module: Only this module of the model, as `backbone`; None: what the recipe calls.
        bare: Leave out the batch transforms before the model.
        tolerance: The largest error of a format, as a share of the largest number.
        run_root: As in `load`.
        packages: As in `compose`.
        trust: As in `load`.

    Raises:
        ConfigError: the folder is not empty, a package is missing, or a format is further off.
        CheckpointError: the run has no such checkpoint.
    """
    from samewise.runner.exports.names import require_sound

    formats = require_sound(several(to), tolerance)
    folder, composed = _open(run, [*overrides, "device=cpu"], run_root, packages, trust=trust)
    # Imports torch, which must come after the variables
    from samewise.runner.exports.of_run import calls_of_run, export_run

    with fresh_torch_state():
        calls, about = calls_of_run(
            folder,
            composed,
            composed.project,
            overrides=overrides,
            checkpoint=str(checkpoint),
            weights=weights,
            module=module,
            bare=bare,
        )
        return export_run(Path(output), calls, about, to=formats, tolerance=tolerance)


@for_python
@_one_at_a_time
def verify(
    run: str | Path | Trained,
    *overrides: str,
    steps: int | None = None,
    audit: int | None = None,
    coarse: bool = False,
    anyway: bool = False,
    run_root: str | Path = "runs",
    uri: str | None = None,
    packages: Sequence[str] = (),
    trust: bool = False,
) -> Verification:
    """Train a run again, and compare it with its record, as `samewise verify` does.

    Args:
        run: As in `load`; or a bundle's file.
        overrides: As in `load`.
        steps: How many steps to compare, with `audit` of each part; None: all.
        audit: How many parts to train, each from one kept checkpoint to the next; None: all steps.
        coarse: Do not repeat the first step that differs to name its first tensor.
        anyway: Train even if the environments differ in what can change bits.
        run_root: As in `load`.
        uri: As in `runs`: the MLflow store that has the run.
        packages: As in `compose`.
        trust: As in `load`.

    Raises:
        ConfigError: the run does not exist, is not one of yours, or cannot be repeated here.
    """
    from samewise.runner.bundles.received import open_received
    from samewise.runner.verify.request import Request

    request = Request(
        run=_name_of(run),
        run_root=Path(run_root),
        overrides=overrides,
        steps=steps,
        audit=audit,
        coarse=coarse,
        anyway=anyway,
    )
    opened = open_received(request.run, run_root=request.run_root, uri=uri, trust=trust)
    with filter_output(), opened as folder:
        composed = request.config_of(folder, trust=trust)
        set_variables(composed.cfg.reproducibility)
        with fresh_torch_state():
            from samewise.runner.verify.verdict import verify_run

            return verify_run(folder, composed, project.find(packages=several(packages)), request)


@for_python
def diff(
    first: str | Path | Trained, second: str | Path | Trained, *, run_root: str | Path = "runs"
) -> Differences:
    """Compare two runs by their records, as `samewise diff` does: nothing is trained.

    Args:
        first: As `run` in `load`.
        second: Likewise.
        run_root: As in `load`.

    Raises:
        ConfigError: a run does not exist.
    """
    from samewise.runner.config import saved
    from samewise.runner.verify.two_runs import compare

    return compare(*(saved.find(_name_of(run), run_root=Path(run_root)) for run in (first, second)))


@for_python
def compare(
    first: str | Path | Trained,
    second: str | Path | Trained,
    *overrides: str,
    metrics: Sequence[str] = (),
    seeds: int | None = None,
    until: float | None = None,
    budget: int | None = None,
    run_root: str | Path = "runs",
    packages: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    trust: bool = False,
) -> list[PairedComparison]:
    """Compare settings by pairs of runs with the same seed, as `samewise compare` does.

    Returns a comparison for each setting of `first` and each metric; `print` shows its sentence.

    Args:
        first: Overrides in one string, a run, a bundle, a sweep, or a setting of a sweep.
        second: The baseline, likewise; one setting.
        overrides: Overrides of both.
        metrics: Metrics at the best step; `final/...`: at the last; `seconds`, `steps`: cost. ():
            `evaluate.monitor`.
        seeds: Train what is missing for so many pairs.
        until: Train pairs until the difference is settled, or known to plus and minus this.
        budget: Most optimizer steps to train, of all runs together.
        run_root: Where the runs are.
        packages: As in `compose`.
        config_dirs: As in `compose`.
        trust: As in `load`.

    Raises:
        ConfigError: there are no such settings, no pairs or no such metric.
        Interrupted: asked to stop; call again to resume.
    """
    from samewise.runner.compare.comparison import compare
    from samewise.runner.compare.sides import Place

    own_project = project.find(packages=several(packages), configs=several(config_dirs))
    with filter_output():
        return compare(
            _name_of(first),
            _name_of(second),
            Place(own_project, Path(run_root), overrides, trust),
            metrics=several(metrics),
            seeds=seeds,
            until=until,
            budget=budget,
        )


@for_python
def runs(
    run_root: str | Path = "runs",
    *,
    where: Sequence[str] = (),
    sort: str | None = None,
    diff: bool = False,
    uri: str | None = None,
) -> pandas.DataFrame:
    """Return a table of all runs, as `samewise runs` lists them: a row for each.

    It has a column for each fact, each metric and, with `diff`, each value that differs.

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

    from samewise.runner.runs.selection import select

    listed, differing = select(Path(run_root), uri=uri, where=several(where), sort=sort, diff=diff)
    rows = [
        {
            **(facts := run.facts()),
            **facts.pop("metrics"),
            **run.also,
            **differing.get(run.folder, {}),
        }
        for run in listed
    ]
    # Without rows pandas makes no columns, and `changed` is read below
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
    """Train with several values, each run in a separate process, or resume a sweep.

    Returns a table with a row for each run, including those that failed.

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

    ConfigError.raise_if(
        not overrides,
        "sweep",
        "has no values to try",
        expected="overrides, one with several values",
        hint="optimizer.lr=0.03,0.1",
    )
    ConfigError.raise_if(
        run_root is not None and any("=" in x for x in overrides),
        "run_root",
        "is where a sweep is looked up by its id, and these overrides make a new one",
        str(run_root),
        hint=f"as an override: 'run_root={run_root}'",
    )
    own_project = project.find(packages=several(packages), configs=several(config_dirs))
    with filter_output():
        ready = running.prepare_sweep(
            overrides, own_project, run_root=Path(run_root or "runs"), trust=trust, wait=wait
        )
        running.run_sweep(ready, wait=wait, retry_failed=retry_failed)
        rows = [as_plain_values(x) for x in current_results(ready.folder, own_project)]
    columns = ("state", "reason", "steps", "seconds", "weights_sha256", "folder")
    return pandas.DataFrame(
        [
            {
                **{
                    key: _number(text)
                    for key, text in {**row["values"], "seed": row["seed"]}.items()
                },
                **row["best"],
                **{name: row[name] for name in columns},
            }
            for row in rows
        ]
    )


def _number(text: Any) -> Any:
    """Convert a sweep's value to a number if it is one."""
    # int first, since float() reads whole numbers too
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text


def _name_of(run: object) -> str:
    """The run that an argument names: its folder, if `train` has returned it."""
    name = run.folder if isinstance(run, Trained) else run
    if isinstance(name, PATH):
        return os.fspath(name)
    from samewise.runner.config import saved

    raise ConfigError(
        Problem("run", "is not a run", name, f"what samewise.train returned, or {saved.RUN}")
    )


def _open(
    run: object,
    overrides: Sequence[str],
    run_root: str | Path,
    packages: Sequence[str],
    *,
    trust: bool,
) -> tuple[RunFolder, Composed]:
    """Find a run, read its config with the overrides, and set its environment variables."""
    from samewise.runner.config import saved

    folder = saved.find(_name_of(run), run_root=Path(run_root))
    composed = saved.trusted_config_of(folder, overrides, trust=trust)
    set_variables(composed.cfg.reproducibility)
    return folder, replace(composed, project=project.find(packages=several(packages)))


def _compose_given(
    experiment: Sequence[Any], packages: Sequence[str], config_dirs: Sequence[str | Path]
) -> Composed:
    from samewise.runner.config.compose import Composed

    overrides = [x for x in experiment if isinstance(x, str)]
    if len(overrides) == len(experiment):
        return compose(*overrides, packages=packages, config_dirs=config_dirs)
    if len(experiment) == 1 and isinstance(experiment[0], Composed):
        return experiment[0]
    wrong = next((x for x in experiment if not isinstance(x, str | Composed)), None)
    raise ConfigError(
        Problem(
            "experiment",
            "takes overrides, each a string, or one composed config",
            wrong,
            hint="samewise.train(samewise.compose(...)), with all overrides there"
            if wrong is None
            else "samewise.train('experiment=NAME', 'optimizer.lr=0.05')",
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
