"""Compares a second training with a recorded run by steps, and checkpoints with the trace."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, final

from samewise.runner.errors import CheckpointError, SamewiseError
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records import checkpoint, shapes, trace_reader
from samewise.runner.records.digest import (
    value_digest,
    weights_sha256,
)
from samewise.runner.records.files import parse_json, read_json, read_lines
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.roots import alterations
from samewise.runner.verify.divergence import (
    Divergence,
    describe_tensors,
    explain,
    first_altered_tensor,
    first_divergence,
    only_in,
    other_start,
    same_start,
    unknown_since,
)


class Diverged(SamewiseError):
    """Ends the second training at the first difference."""

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence
        super().__init__(str(divergence))


@final
class Comparison(Callback):
    """Compares each step's trace line with the recorded run's.

    Args:
        folder: The recorded run's folder.
        logged: Its metrics, by step and name.
        steps: The number of steps to compare; None: all.
        goes_on: Whether to note every difference, rather than end at the first.
        settings: The settings that differ from the recorded run's, which may explain a difference.
    """

    def __init__(
        self,
        folder: RunFolder,
        logged: Mapping[tuple[int, str], float],
        *,
        steps: int | None = None,
        goes_on: bool = False,
        settings: Collection[str] = (),
    ) -> None:
        self._head, self._lines = trace_reader.read_trace_of(folder)
        self.algorithm = trace_reader.algorithm_of(folder.trace, self._head)
        """The algorithm of the recorded digests, for the second training."""
        self.total = sum(steps is None or step <= steps for step in self._lines)
        """The number of steps to compare: those in the trace, such as every hundredth."""
        self.missing = trace_reader.missing_start(self._lines)
        """A description of lines that the trace lacks."""
        self.compared = 0
        self.divergences: list[Divergence] = []
        """The differences noted."""
        self.doubted: Collection[int] = ()
        """Steps whose checkpoint has other weights than the trace."""
        self.repeated = set[int]()
        """Doubted steps after which the second training has the checkpoint's weights too: a
        callback changes them after they are traced."""
        self._checkpoints = folder.checkpoints
        self._logged, self._goes_on, self._settings = logged, goes_on, settings
        # Train to the end if the summary is compared too
        self._to_the_end = steps is None and folder.summary.exists()
        summary = (read_json(folder.summary, shapes.SUMMARY) or {}) if self._to_the_end else {}
        # A sparse trace ends earlier
        self._stopped, self._stop_at = (
            summary.get("stopped_early"),
            max([summary.get("steps", 0), *self._lines]),
        )
        self._is_at_stop = self._has_begun = False

    @property
    def steps(self) -> Collection[int]:
        """The steps in the recorded run's trace."""
        return self._lines.keys()

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        expected, actual = self._lines.get(outcome.step), run.traced
        # Only a run that stopped before its last step needs a reason
        self._is_at_stop = self._stop_at <= outcome.step < run.total_steps
        diverged = None if self._has_begun else other_start(self._head, _head_of(run))
        self._has_begun = True
        if not diverged and expected is not None and actual.get("step") == outcome.step:
            diverged = self._difference(run, outcome, (expected, actual))
            self.compared += diverged is None or self._goes_on
        if not diverged and outcome.step in self.doubted and self._are_kept(run, outcome.step):
            self.repeated.add(outcome.step)
        if diverged and not self._goes_on:
            raise Diverged(diverged)
        self.divergences += [diverged] if diverged else []

    def _difference(
        self, run: RunView, outcome: Outcome, lines: tuple[dict[str, Any], Mapping[str, Any]]
    ) -> Divergence | None:
        """Return the difference of two lines of a step."""
        step, several, actual = (
            outcome.step,
            len(outcome.gradient_norms) > 1,
            first_divergence(self._head, *lines),
        )
        recorded = {
            name: (self._logged.get((step, f"train/{name}")), here)
            for name, here in {**outcome.losses, **outcome.gradient_norms}.items()
        }
        logged = {
            name: (there, here) for name, (there, here) in recorded.items() if there is not None
        }
        if not actual:
            return None
        # After a difference, steps begin with other weights
        compared = (
            step - 1 in self._lines or same_start(self._head, _head_of(run), step)
        ) and not self.divergences
        stage, layer, reason = explain(
            actual,
            [self._head] * 2,
            lines,
            self._settings,
            logged=logged,
            several=several,
            is_compared=compared,
        )
        if stage in ("gradients", "weights") and (message := self._other_tensors(run)):
            layer, reason = "", message
        return Divergence(step, stage, layer, reason, since=unknown_since(step, self._lines))

    def _other_tensors(self, run: RunView) -> str:
        """Describe parameters and buffers that only one of the models has."""
        other = _head_of(run)
        return describe_tensors(
            [only_in(self._head, other), only_in(other, self._head)], ("there", "here")
        )

    def _are_kept(self, run: RunView, step: int) -> bool:
        try:
            state = checkpoint.load(self._checkpoints / f"step-{step:08d}")
        except CheckpointError:
            return False
        weights = state["model"]
        return state["step"] == step and all(
            name in weights
            and value_digest(weights[name].contiguous()) == value_digest(tensor.contiguous())
            for name, tensor in run.weights()
        )

    def stop_reason(self) -> str | None:
        if self._stopped and self._is_at_stop and not self._goes_on:
            # The reason may not occur here, such as the decision of a sweep
            return self._stopped
        if self._goes_on or self.compared < self.total or self._to_the_end:
            return None
        return "everything that the first run recorded has been compared"


def _head_of(run: RunView) -> dict[str, Any]:
    # The first line of a trace is its head
    _, line = next(read_lines(run.folder / "trace.jsonl"), (1, b"{}"))
    return parse_json(line)


def checkpoint_divergences(folder: RunFolder) -> list[Divergence]:
    """Find altered checkpoints, and states that disagree with the trace or the summary."""
    head, lines = trace_reader.read_trace_of(folder)
    altered, divergences = alterations(folder), list[Divergence]()
    for saved in checkpoint.list_checkpoints(folder.checkpoints):
        try:
            state = checkpoint.load(saved.path)
        except CheckpointError as error:
            divergences.append(
                Divergence(saved.step, "checkpoint", "", str(error.problems[0]).partition("\n")[0])
            )
            continue
        divergences += _mismatch(head, lines, saved, state)
        if reason := altered.get(str(saved.step)):
            divergences.append(Divergence(saved.step, "root", "", reason))
        summary = read_json(folder.summary, shapes.SUMMARY) or {}
        if (
            saved.step == summary.get("steps")
            and (digest := weights_sha256(state["model"])) != summary["weights_sha256"]
        ):
            reason = (
                f"summary.json has weights_sha256 {summary['weights_sha256'][:16]}..., and "
                f"{saved.path.name} has {digest[:16]}..."
            )
            divergences.append(Divergence(saved.step, "summary", "weights_sha256", reason))
    return divergences


def _mismatch(
    head: Mapping[str, Any],
    lines: Mapping[int, Any],
    saved: checkpoint.CheckpointFolder,
    state: Mapping[str, Any],
) -> Iterator[Divergence]:
    """Compare a checkpoint with the trace at its step."""
    if state["step"] != saved.step:
        yield Divergence(
            saved.step, "checkpoint", "", f"{saved.path.name} was taken at step {state['step']}"
        )
        return
    line = lines.get(saved.step)
    layer = first_altered_tensor(head, line, state["model"]) if line else None
    if layer is not None:
        yield Divergence(
            saved.step,
            "checkpoint",
            layer,
            f"the weights in {saved.path.name} differ from those in the trace",
        )
    # The chain's state belongs to the last traced step, which may be an earlier one
    before = max((step for step in lines if step <= saved.step), default=None)
    if (
        before is not None
        and "trace" in state
        and state["trace"] != int(lines[before]["chain"], 16)
    ):
        reason = (
            f"{saved.path.name} was not taken in a run with this trace: the trace was altered "
            f"at step {before} or before, or the checkpoint was"
        )
        yield Divergence(saved.step, "chain", "", reason)


def metric_divergences(
    folder: RunFolder, logged: Mapping[tuple[int, str], float]
) -> list[Divergence]:
    """Compare the metrics in a run's summary and checkpoints with those logged."""
    summary = read_json(folder.summary, shapes.SUMMARY) or {}
    recorded = [
        (saved.path.name, saved.step, saved.metrics or {})
        for saved in checkpoint.list_checkpoints(folder.checkpoints)
    ]
    if summary:
        best = summary["metrics"]["best"]
        recorded += [
            ("summary.json", summary["steps"], summary["metrics"]["final"]),
            ("summary.json", int(best.get("step", 0)), best),
        ]
    return [
        Divergence(
            step, "metric", name, f"{name} is {value!r} in {place}, and was logged as {noted!r}"
        )
        for place, step, metrics in recorded
        for name, value in metrics.items()
        # By `repr`, so that NaN equals NaN
        if (noted := logged.get((step, name))) is not None and repr(noted) != repr(float(value))
    ]


def loss_divergences(
    folder: RunFolder, logged: Mapping[tuple[int, str], float]
) -> list[Divergence]:
    """Compare the logged losses with those in the trace."""
    recorded = [
        (step, float.fromhex(line["loss"]), logged.get((step, "train/loss")))
        for step, line in trace_reader.read_trace_of(folder)[1].items()
    ]
    return [
        Divergence(
            step,
            "metric",
            "train/loss",
            f"train/loss is {noted!r} in metrics.jsonl, and {loss!r} in trace.jsonl",
        )
        for step, loss, noted in recorded
        if noted is not None and repr(noted) != repr(loss)
    ]
