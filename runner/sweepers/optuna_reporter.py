"""Report each evaluation of a job to Optuna's study, and stop the run if the pruner decides so."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.interfaces import Callback, RunView
from samewise.runner.records.files import write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.sweepers import optuna_study
from samewise.runner.sweepers.optuna_study import optuna
from samewise.runner.tracking import journal


@final
class Reporter(Callback):
    """Reports from the main process.

    A pruned run stops like an interrupted one: it saves, and can be resumed to its full length.

    Args:
        folder: The sweep's folder.
        trial: The trial's number.
        metric: Name of the metric to report: `valid/accuracy`.
        pruner: The pruner's name.
        pruner_options: The pruner's arguments.
    """

    def __init__(
        self,
        *,
        folder: str,
        trial: int,
        metric: str,
        pruner: str,
        pruner_options: Mapping[str, Any],
    ) -> None:
        self._folder, self._number, self._metric = SweepFolder(Path(folder)), trial, metric
        self._pruner, self._pruner_options = pruner, pruner_options
        self._trial: optuna.Trial | None = None
        self._pruned = ""

    def on_start(self, run: RunView) -> None:
        """Attach to the trial, and report the evaluations of a run that began outside the sweep."""
        if not run.is_main:
            return
        trial = optuna_study.attach(
            self._folder.path,
            self._number,
            pruner=optuna_study.pruner(self._pruner, self._pruner_options),
        )
        stored_trial = trial.storage.get_trial(trial._trial_id)  # pyright: ignore[reportPrivateUsage]
        # A trial that had failed cannot be changed
        if stored_trial.state.is_finished():
            return
        self._trial = trial
        values = {
            key: value
            for key, value in journal.logged_values(RunFolder(run.folder).metrics).items()
            if key[0] <= run.step
        }
        for number, value in optuna_study.metric_by_evaluation(
            values, self._metric, run.evaluation_interval
        ).items():
            if number not in stored_trial.intermediate_values:
                self._report(run, value, number)

    def on_evaluation(self, run: RunView, metrics: Mapping[str, float]) -> None:
        if self._trial is None:
            return
        if self._metric not in metrics:
            raise ConfigError(
                Problem(
                    "sweeper.objectives",
                    "the run does not have this metric",
                    self._metric,
                    hint=nearest(self._metric, sorted(metrics)),
                )
            )
        self._report(
            run,
            metrics[self._metric],
            optuna_study.evaluation_number(run.step, run.evaluation_interval),
        )

    def _report(self, run: RunView, value: float, number: int) -> None:
        if self._trial is None or self._pruned:
            return
        try:
            should_prune = optuna_study.report(self._trial, value, number)
        except OSError as error:
            # A full disk is no reason to end the training
            print(f"warning: an evaluation was not reported to the sweep: {error}", file=sys.stderr)
            return
        if should_prune and not run.is_over and not run.is_stopping:
            self._pruned = f"{self._metric} {value:.4g} at evaluation {number}, by {self._pruner}"
            run.interrupt(f"the sweep's pruner ({self._pruned})")

    def on_end(self, run: RunView) -> None:
        """Record that the run was pruned, if that is why it stopped."""
        if not self._pruned or run.is_over or not run.is_saved:
            return
        write_json(RunFolder(run.folder).tags, {"sweep.pruned": self._pruned})
        point = next(
            (point for point in self._folder.points() if point.setting == self._number), None
        )
        if point is not None:
            self._folder.note(point.number, pruned=self._pruned)
