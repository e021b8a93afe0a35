"""Each process of a resumed run has what it had before: like test_resuming.py, for the strategies with several processes."""

from pathlib import Path

import pytest
from samewise_runner_resuming import Seen, cut, first_difference, on_ranks

KEPT = ["checkpoint.keep_every_steps=1", "evaluate.every_steps=2", "callbacks=[ema]"]
FSDP = ["strategy=fsdp", "replicas=2", "strategy.shard=['3']"]
STAGES = ["strategy.split=['3']", "accumulate=2"]
ALIKE = {
    "elastic": ["strategy=elastic", "replicas=2"],
    "elastic, uneven": ["strategy=elastic", "strategy.uneven=true", "replicas=3", "accumulate=2", "optimizer=adamw"],
    "ddp on two": ["strategy=ddp", "replicas=2"],
    "ddp on two, zero": ["strategy=ddp", "replicas=2", "strategy.zero=true", "optimizer=adam"],
    "fsdp": [*FSDP, "optimizer=adamw"],
    "fsdp, its checkpoints in shards": [*FSDP, "checkpoint.sharded=true", "precision=bf16"],
    "pipeline": ["strategy=pipeline", *STAGES, "strategy.rank_invariant=false", "memory_format=channels_last"],
    "rpc": ["strategy=rpc", *STAGES, "optimizer=adam"],
}


def resume(folder: Path, ranks: int, *overrides: str, after: int, on: int | None = None) -> tuple[list[Seen], list[Seen]]:
    """What each rank saw of a run, and of the same run resumed after a step on the same or another number of ranks."""
    whole = on_ranks(folder / "whole", ranks, *KEPT, *overrides)
    (run,) = (folder / "whole").glob("*/*/")
    cut(run, folder / "again" / run.relative_to(folder / "whole"), after=after)
    again = on_ranks(folder / "again", on or ranks, *KEPT, *overrides)
    assert all(next(iter(one.moments)) == ("begins", after) for one in again)
    return whole, again


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.fsdp] * name.startswith("fsdp")) for name in ALIKE])
def test_resuming_on_as_many_ranks_restores_everything(tmp_path, name):
    whole, again = resume(tmp_path, 2, *ALIKE[name], after=2)
    assert [first_difference(one, other) for one, other in zip(whole, again, strict=True)] == [None, None]


def test_resuming_on_one_rank_after_two_restores_everything(tmp_path):
    """Except for what each process carries, and how it reports that."""
    whole, again = resume(tmp_path, 2, "strategy=elastic", "replicas=2", "accumulate=2", "optimizer=adamw", "scheduler=plateau", after=3, on=1)
    assert first_difference(whole[0], again[0], without=("['strategy']", "['given']", "['generators']")) is None
