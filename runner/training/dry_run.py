"""Builds a run, and tries one step and one evaluation batch in memory, for `check`."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, open_dict

from samewise.runner.config.compose import Composed
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.data import streams
from samewise.runner.errors import SamewiseError
from samewise.runner.processes.memory import refuse_too_much_memory
from samewise.runner.records.folder import RunFolder
from samewise.runner.strategies.base import Strategy
from samewise.runner.strategies.simulated import simulate_ranks
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.continued import continue_from
from samewise.runner.training.failures import explain_trial
from samewise.runner.training.guards.catalogue import CODE, watch
from samewise.runner.training.loop import train_step
from samewise.runner.training.run import Guard, Run

LONG = 100_000
"""Schedules of more steps are not tried to their end: torch's take 10 microseconds for a step."""


def dry_run(
    composed: Composed, project: Project, look: Callable[[Run], object] = lambda run: None
) -> list[str]:
    """Take one optimizer step and measure one batch of the validation split; keep nothing.

    If the strategy needs several processes, this is rank 0 of as many, with the others simulated:
    it computes its own part of the step.

    Args:
        composed: The config.
        project: The project whose packages the config may name.
        look: Called with the run after its step.

    Returns:
        Sentences about these processes, and warnings.

    Raises:
        ConfigError: A part cannot be made, or parts do not fit together.
    """
    # As if this were the only process: the config may be for a machine with other devices
    with simulate_ranks(0, 1):
        strategy, processes = _requested_processes(composed, project)
        run = (
            _step(composed, project, look, alone=True)
            if processes == 1 or not strategy.pretends
            else None
        )
    if processes == 1:
        return _warnings(run)
    with simulate_ranks(0, processes):
        if run is not None:
            _begin(strategy, composed)
            strategy.end()
            strategy.require_fit(run.model)
            return [
                f"{processes} processes: only their settings and the split of the model were "
                "checked; the step was tried in one process",
                *_warnings(run),
            ]
    # The last rank is only begun, to read its share of the micro-batches
    with simulate_ranks(processes - 1, processes):
        last, _ = _requested_processes(composed, project)
        _begin(last, composed)
        of_last = last.micro_batches
        last.end()
    with simulate_ranks(0, processes):
        run = _step(composed, project, look, alone=False)
        return [*_plan(run.strategy, of_last, processes), *_warnings(run)]


def require_processes(composed: Composed, project: Project) -> None:
    """Raise a ConfigError if the strategy's processes cannot run the replicas."""
    with simulate_ranks(0, 1):
        strategy, processes = _requested_processes(composed, project)
    if processes > 1:
        with simulate_ranks(0, processes):
            _begin(strategy, composed)
            strategy.end()


def _requested_processes(composed: Composed, project: Project) -> tuple[Strategy, int]:
    """Return the strategy, and the number of processes that it requests."""
    strategy = instantiate(composed.cfg.strategy, "strategy", allowed=project.packages)
    return strategy, strategy.processes(str(composed.cfg.device), composed.cfg.replicas)


def _begin(strategy: Strategy, composed: Composed) -> None:
    strategy.begin(str(composed.cfg.device), composed.cfg.replicas, composed.cfg.accumulate)


def _step(
    composed: Composed, project: Project, look: Callable[[Run], object], *, alone: bool
) -> Run:
    """Take the step; return the run, with its strategy ended."""
    with (
        tempfile.TemporaryDirectory(prefix="samewise-check-") as temporary,
        streams.preserve_generators(),
    ):
        run = build(_disable_caches(composed), project, RunFolder(Path(temporary)), alone=alone)
        try:
            run.recorder.prints = False
            run.guards.extend(guard(run) for guard in CODE)
            watch(run, Guard.at_start)
            # Otherwise the kernel would kill the process without a message
            with refuse_too_much_memory() if run.strategy.device.type == "cpu" else nullcontext():
                # max_steps=0 only evaluates
                if run.total_steps:
                    train_step(run, next(TrainingBatches(run)))
                if 0 < run.total_steps <= LONG:
                    # Some of torch's schedulers cannot be stepped beyond an end of their own
                    run.schedule.rates(run.total_steps - 1, run.schedule.span)
                watch(run, Guard.before_evaluation)
                if run.config.resume_from:
                    continue_from(run, run.config.resume_from)
                look(run)
        except SamewiseError:
            raise
        # The user's code may also call sys.exit
        except (Exception, SystemExit) as error:
            raise explain_trial(error, composed, run) from error
        finally:
            run.strategy.end()
    return run


def _disable_caches(composed: Composed) -> Composed:
    """Return the config with no images cached in memory, which a single step does not need."""
    cfg = composed.cfg.copy()
    with open_dict(cfg):
        cached = [
            split
            for split in cfg.dataset.values()
            if isinstance(split, DictConfig)
            and str(split.get("_target_")).startswith("samewise.datasets.")
            and split.get("cache") == "memory"
        ]
        # First the data set's own key, while its splits still refer to it: a key that nothing
        # reads is an error
        for node in [cfg.dataset, *cached] if cached else []:
            if node.get("cache") == "memory":
                node.cache = "none"
    return replace(composed, cfg=cfg)


def _warnings(run: Run | None) -> list[str]:
    return [f"warning: {caution}" for caution in run.recorder.cautions] if run else []


def _plan(first: Strategy, of_last: Sequence[int], size: int) -> list[str]:
    import torch

    lines = [
        f"{size} processes, tried as rank 0 with the others simulated: rank 0 takes "
        f"{_span(first.micro_batches)}, rank {size - 1} {_span(of_last)}",
        *first.describe(),
    ]
    devices = torch.cuda.device_count() if first.device.type == "cuda" else 0
    if devices and devices < size:
        lines.append(
            f"this machine has {devices} CUDA device{'s' * (devices > 1)}: `train` would "
            f"not start {size} processes here"
        )
    return lines


def _span(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"micro-batch {numbers[0]}"
    return f"micro-batches {numbers[0]} to {numbers[-1]}"
