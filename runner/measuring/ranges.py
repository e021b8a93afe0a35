"""Measure the parts of a step: wrap them with a clock, so that the loop has no timing code."""

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from samewise.runner.callbacks.progress import ProgressBar
from samewise.runner.data.dataset import WithTransform
from samewise.runner.data.loading import MicroBatch
from samewise.runner.strategies.pipeline import Pipeline
from samewise.runner.training.phase import TrainingPhase
from samewise.runner.training.run import Run

RANGES = {
    "data": "waiting for a batch, or making it if there are no workers",
    "transfer": "the transfer of the batch to the device",
    "transforms": "sample transforms made in this process, and batch transforms",
    "forward": "the model and its loss",
    "backward": "gradients",
    "exchange": "adding up gradients over replicas and processes, "
    "excluding overlap with the backward "
    "pass",
    "optimizer": "averaging and clipping gradients, and the update",
    "trace": "digests, and the line of the trace",
    "callbacks": "what callbacks do after a step, without tracking",
    "tracking": "metrics, to the journal",
    "other": "the loop itself, seeds and checks",
}
"""Parts of a step, in its order, with their meaning.

A part's own parts are named after a slash: `transforms/RandomCrop`.
"""


class Clock:
    """Adds up the time of nested ranges, each without the ranges inside it.

    Args:
        device: Device of the run. On CUDA a range starts and ends with a wait for the device, so
            that work counts where it was launched.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.waits = self._cuda
        """Whether to wait for the device; otherwise a range's time is that of launching its work.
        """
        self.marks = False
        """Whether torch's profiler sees the ranges. NVIDIA's (Nsight Systems) always does."""
        self.spent = defaultdict[str, float](float)
        """Seconds by range."""
        self._open = ["other"]
        self._last_switch = time.perf_counter()

    def restart(self) -> None:
        """Clear the measurements."""
        self.spent.clear()
        self._switch()

    def _switch(self) -> None:
        """Count the time since the last switch to the innermost open range."""
        if self.waits:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.spent[self._open[-1]] += now - self._last_switch
        self._last_switch = now

    @contextmanager
    def range(self, name: str) -> Generator[None]:
        """Count the time within to `name`."""
        self._switch()
        self._open.append(name)
        try:
            with ExitStack() as stack:
                if self.marks:
                    stack.enter_context(torch.profiler.record_function(name))
                if self._cuda:
                    stack.enter_context(torch.cuda.nvtx.range(name))
                yield
        finally:
            self._switch()
            self._open.pop()

    def time_calls(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its calls are counted to `name`."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self.range(name):
                return function(*args, **kwargs)

        return called

    def stop(self) -> dict[str, float]:
        """Return the seconds by range so far; their sum is the time since `restart`."""
        self._switch()
        return dict(self.spent)


class _Timed:
    """Wraps an object, and counts some of its methods to a range."""

    def __init__(self, inner: Any, clock: Clock, **ranges: str) -> None:
        self._inner, self._clock = inner, clock
        for method, name in ranges.items():
            setattr(self, method, clock.time_calls(name, getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)


class _TimedPrecision(_Timed):
    def stepper(self, optimizer: Any, step: Callable[[], Any]) -> Callable[..., Any]:
        return self._clock.time_calls("optimizer", self._inner.stepper(optimizer, step))


class _TimedStrategy(_Timed):
    """Counts `carry` to the backward pass, except for calls of the forward pass inside."""

    def carry(self, micro_batches: Any, forward: Callable[..., Any]) -> Any:
        # A pipeline mixes both passes, as does a process that only serves another's calls
        is_mixed = isinstance(self._inner, Pipeline) or not micro_batches
        with self._clock.range("forward" if is_mixed else "backward"):
            return self._inner.carry(micro_batches, self._clock.time_calls("other", forward))


@dataclass(frozen=True)
class _TimedPhase(TrainingPhase):
    clock: Any = None

    def condition_gradients(self, tally: Any, precision: Any) -> Any:
        with self.clock.range("optimizer"):
            return super().condition_gradients(tally, precision)


class _TimedSamples(_Timed):
    """Wraps a data set: loading samples counts as "data", their transforms as "transforms"."""

    def __getitem__(self, index: int) -> Any:
        with self._clock.range("data/data set"):
            return self._inner[index]


def with_clock(run: Run, clock: Clock) -> Run:
    """Return the run with its parts timed as the loop calls them; they compute the same."""
    recorder, transforms = run.recorder, run.transforms
    recorder.trace = _Timed(
        recorder.trace,
        clock,
        record="trace",
        digests="trace",
        digest_gradients="trace",
        digest_weights="trace",
    )  # pyright: ignore[reportAttributeAccessIssue]
    recorder.tracker = _Timed(recorder.tracker, clock, log="tracking")  # pyright: ignore[reportAttributeAccessIssue]
    timed_callbacks = {
        name: callback
        for name, callback in recorder.callbacks.items()
        if not isinstance(callback, ProgressBar)
    }
    recorder.callbacks = {  # pyright: ignore[reportAttributeAccessIssue]
        name: _Timed(callback, clock, on_step=f"callbacks/{name}")
        for name, callback in timed_callbacks.items()
    }  # pyright: ignore[reportAttributeAccessIssue]
    parts: dict[str, Any] = {
        "recipe": _Timed(run.recipe, clock, loss="forward"),
        "precision": _TimedPrecision(run.precision, clock, update="optimizer"),
        "strategy": _TimedStrategy(run.strategy, clock, reduce="exchange"),
        "phases": [_TimedPhase(**vars(phase), clock=clock) for phase in run.phases],
        "to_device": clock.time_calls("transfer", run.to_device),
        "transforms": {
            **transforms,
            "train": clock.time_calls("transforms/batch transforms", transforms["train"]),
        },
    }
    return replace(run, **parts)


@contextmanager
def time_samples(run: Run, clock: Clock) -> Generator[None]:
    """Time the samples made by this process within: the data set, and each transform by class."""
    keyed = run.splits["train"].keyed
    dataset = keyed.dataset
    inner = _TimedSamples(dataset.inner if isinstance(dataset, WithTransform) else dataset, clock)
    transforms = dataset.transforms if isinstance(dataset, WithTransform) else ()
    timed_transforms = [
        clock.time_calls(f"transforms/{getattr(x, '__name__', type(x).__name__)}", x)
        for x in transforms
    ]
    keyed.dataset = WithTransform.of(inner, timed_transforms, getattr(dataset, "path", ""))
    try:
        yield
    finally:
        keyed.dataset = dataset


def time_batches(batches: Iterator[list[MicroBatch]], clock: Clock) -> Iterator[list[MicroBatch]]:
    """Yield the batches; the wait for each counts as "data"."""
    while True:
        # A for loop would leave the wait for the batch unmeasured
        with clock.range("data"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def sum_by_part(spent: dict[str, float]) -> dict[str, float]:
    """Return the seconds by part of a step, from those of each range."""
    return {
        part: sum(seconds for name, seconds in spent.items() if name.partition("/")[0] == part)
        for part in RANGES
    }
