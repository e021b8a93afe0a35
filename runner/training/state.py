"""A run's state, for checkpoints, and its summary at the end."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.interfaces import Recipe
from samewise.runner.optim.states import load_state
from samewise.runner.records import shards
from samewise.runner.records.checkpoint_writer import retry
from samewise.runner.records.digest import weights_sha256
from samewise.runner.training.evaluation import left_out
from samewise.runner.training.guards.catalogue import watch
from samewise.runner.training.run import Guard, Run


def state_of(run: Run) -> dict[str, Any]:
    """Collect what a resumed run needs, as named tensors and plain values.

    A sharded tensor is this process's shard.
    """
    return {
        **run.progress.state(),
        "fingerprint": run.fingerprint,
        "model": run.model.state_dict(),
        "optimizers": {
            phase.spec.name: run.strategy.layout.optimizer_state(phase.optimizer)
            for phase in run.phases
        },
        "schedule": run.schedule.state_dict(),
        "precision": run.precision.state_dict(),
        "callbacks": {name: callback.state_dict() for name, callback in run.callbacks.items()},
        "trace": run.recorder.trace.chain,
    }


def restore(
    run: Run, state: Mapping[str, Any], changed_options: Collection[str] | None = ()
) -> None:
    """Restore a state that `state_of` collected.

    Args:
        run: The run, freshly built.
        state: The state.
        changed_options: The optimizers' options that differ from those of the run that was saved,
            and keep this run's values; None: unknown.
    """
    run.progress.load_state(state)
    run.recorder.saved, run.recorder.saved_s = run.step, run.progress.seconds
    load_weights(run.model, state["model"])
    for phase in run.phases:
        load_state(phase.optimizer, state["optimizers"][phase.spec.name], changed_options)
    run.schedule.load_state_dict(state["schedule"])
    run.precision.load_state_dict(state["precision"])
    for name, callback in run.callbacks.items():
        callback.load_state_dict(state["callbacks"].get(name, {}))


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load a checkpoint's weights into a model.

    Raises:
        ConfigError: The model has other names or shapes, since overrides have changed it.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        # The first line of torch's message says only that there are errors
        lines = [line.strip().rstrip(".") for line in str(error).splitlines()[1:]]
        raise ConfigError(
            Problem(
                "model",
                f"is not the one that the checkpoint was taken from: {lines[0]}"
                + (f", and {len(lines) - 1} more differences" if len(lines) > 1 else ""),
                hint="leave out the overrides that change the model",
            )
        ) from error


def save(run: Run) -> None:
    """Write a checkpoint, and make everything logged before it durable.

    Raises:
        TrainingError: A weight is not finite, the run's folder is missing, or the checkpoint
            before this one could not be written.
        ConfigError: A new model could not load it.
    """
    # Whatever is wrong is found before anything is written
    watch(run, Guard.before_checkpoint)
    run.recorder.require_folder()
    layout = run.strategy.layout
    state = (
        _write_shards(run)
        if run.checkpoint.sharded and layout.shards > 1
        else layout.whole(state_of(run))
    )
    if run.strategy.peers.is_main:
        # First, so that no checkpoint is ahead of the journal and the trace after a crash
        run.recorder.tracker.before_checkpoint(run.step)
        run.recorder.trace.sync()
        run.checkpoints.save(
            run.step, state, {**run.progress.metrics} if run.progress.evaluated == run.step else {}
        )
    run.recorder.saved, run.recorder.saved_s = run.step, run.progress.seconds
    run.strategy.peers.save_heard = run.strategy.peers.save_agreed = False


def _write_shards(run: Run) -> dict[str, Any]:
    """Write this process's shards; return the rest of the state, with all shards' digests."""
    peers = run.strategy.peers
    folder = Path(peers.first(lambda: str(run.checkpoints.shards_folder(run.step))))
    state, tensors = shards.split(state_of(run))
    retry(folder, partial(shards.save, tensors, folder))
    return {
        **state,
        "shards": {
            name: digest
            for some in peers.gather(shards.digests(folder, peers.rank))
            for name, digest in some.items()
        },
    }


def weights_digest(run: Run) -> str:
    """Return the SHA-256 of the weights, on rank 0. All ranks must call it."""
    return weights_sha256(run.strategy.layout.whole(run.model.state_dict()))


def summarise(run: Run) -> dict[str, Any]:
    """Return the run's summary, as in `summary.json`."""
    seconds = run.progress.seconds
    sometimes = {"also": run.progress.also, "evaluated": left_out(run, "valid")}
    return {
        "status": "finished",
        "fingerprint": run.fingerprint,
        "level": run.recorder.level,
        "weights_sha256": weights_digest(run),
        "steps": run.step,
        "epochs": run.epoch,
        "stopped_early": run.recorder.stop_reason(),
        "metrics": {
            "final": run.progress.metrics,
            "best": run.progress.best,
            "monitor": run.evaluate.monitor,
            **{name: value for name, value in sometimes.items() if value},
        },
        **(
            {"predicts": False}
            if type(run.recipe).read is Recipe.read or type(run.recipe).predict is Recipe.predict
            else {}
        ),
        "timings": {
            "training_s": round(seconds, 3),
            "step_ms": round(1000 * seconds / max(run.step, 1), 3),
        },
    }
