"""Everything that a run needs is restored: everything reachable in a run that is resumed at every step is compared with one that was never stopped.

The final weights alone would show that something was lost, but not what; and not losses that leave them unchanged, such as a counter or a callback's average.
"""

import itertools
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from samewise_runner_resuming import Killed, Seen, composed, cut, first_difference, on_ranks, stopped, trained
from samewise_runner_resuming_space import FURTHER, OPTIMIZERS, SCHEDULERS, TINY, drawn

from samewise.runner.config.catalogue import choices_of
from samewise.runner.config.project import Project
from samewise.runner.records import checkpoint
from samewise.runner.training import resuming
from samewise.runner.training.run import Run


@pytest.fixture
def resumed(tmp_path):
    """Trains in one piece, and again resumed at every step; returns the first difference."""

    def run(*overrides: str, tiny: list[str] = TINY) -> str | None:
        config = composed(*tiny, *overrides)
        whole, pieces = trained(config, tmp_path / "whole"), trained(config, tmp_path / "pieces", before_step=stopped)
        assert whole.pieces == 1
        assert pieces.pieces > 2
        return first_difference(whole, pieces)

    return run


def test_every_choice_can_be_drawn():
    for group, drawn_from in {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}.items():
        assert choices_of(group, project=Project(Path.cwd())).keys() <= {*drawn_from}
    drawn_callbacks = str(FURTHER["callbacks"])
    assert all(name in drawn_callbacks for name in choices_of("callbacks", project=Project(Path.cwd())) if name not in ("none", "progress"))


@pytest.mark.parametrize(
    ("number", "optimizer", "scheduler"),
    [
        pytest.param(number, *pair, marks=[pytest.mark.slow] * (number % 2 or number >= len(SCHEDULERS)))
        for number, pair in enumerate(zip(OPTIMIZERS, itertools.cycle(SCHEDULERS), strict=False))
    ],
)
def test_each_optimizer_and_schedule_resumes_with_random_other_choices(resumed, number, optimizer, scheduler):
    overrides = drawn(random.Random(number), optimizer, scheduler)
    assert resumed(*overrides) is None, f"samewise train {' '.join(overrides)}"


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(100, 106), *(pytest.param(number, marks=pytest.mark.long) for number in range(106, 160))])
def test_random_choices_resume(resumed, number):
    chance = random.Random(number)
    overrides = [*drawn(chance, chance.choice([*OPTIMIZERS]), chance.choice([*SCHEDULERS])), "max_steps=7"]
    assert resumed(*overrides) is None, f"samewise train {' '.join(overrides)}"


GAN = ["experiment=gan_digits", "debug=tiny", "model.width=4", "tracking=none", "checkpoint.every_steps=1", "dataset.samples=40", "max_steps=4"]
GAN += ["evaluate.every_steps=2", "scheduler=by_optimizer"]


def test_a_recipe_with_an_optimizer_for_each_phase_resumes(resumed):
    assert resumed(tiny=GAN) is None


RECIPES = {
    "resnet18_digits": ["model.width=4", "scheduler.cycle_momentum=true"],
    "retinanet_bccd": [],
    "wav2letter_spoken_digits": ["dataset.samples=32"],
    "conv_tasnet_spoken_digits": ["dataset.samples=32"],
    "wavernn_spoken_digits": ["dataset.clips=32"],
    "linear_diabetes": ["dataset.samples=32"],
    "vae_mnist": ["dataset.samples=32"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_resumes(resumed, name):
    few = ["tracking=none", "checkpoint.every_steps=1", "max_steps=4", "evaluate.every_steps=2", "callbacks=[default,ema]"]
    assert resumed(tiny=[f"experiment={name}", "debug=tiny", *few, *RECIPES[name]]) is None


def test_an_experiment_that_starts_from_a_checkpoint_restores_all_of_it(tmp_path):
    config = composed(*TINY, "callbacks=[ema,early_stopping]", "optimizer=adamw", "scheduler=plateau", "checkpoint.keep_every_steps=1")
    whole = trained(config, tmp_path / "whole")
    config.cfg.resume_from = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    again = trained(config, tmp_path / "again")
    assert next(iter(again.moments)) == ("begins", 2)
    its_own = ["['run'].fingerprint", "['run'].progress.best"]
    assert first_difference(replace(whole, left={}), replace(again, left={}), without=its_own) is None


def test_a_run_killed_between_checkpoints_resumes(tmp_path):
    """Each piece is killed before its second step after a checkpoint; the first is then trained again."""
    seldom = ["checkpoint.every_steps=2", "checkpoint.every_epochs=null", "checkpoint.keep_best=0"]
    config = composed(*TINY, *seldom, "callbacks=[default,ema]", "max_steps=5")
    begun = list[int]()

    def kill(run: Run) -> None:
        begun.append(run.step)
        if run.step % 2 and begun.count(run.step) == 1:
            raise Killed

    whole, pieces = trained(config, tmp_path / "whole"), trained(config, tmp_path / "pieces", before_step=kill)
    assert begun == [0, 1, 0, 1, 2, 3, 2, 3, 4]
    assert list(whole.moments) == list(pieces.moments)
    assert first_difference(whole, pieces) is None


def test_a_run_killed_between_its_last_checkpoint_and_its_results_resumes(tmp_path, monkeypatch):
    config = composed(*TINY, "max_steps=2", "callbacks=ema")
    folder, clocks = tmp_path / "run", list[float]()
    whole = trained(config, folder)
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "artifacts")
    restore = resuming.restore
    monkeypatch.setattr(resuming, "restore", lambda run, state: (restore(run, state), clocks.append(run.progress.earlier_s)))
    again = trained(config, folder)
    assert again.moments == {}
    assert first_difference(whole, again) is None
    assert clocks == [checkpoint.load(folder / "checkpoints" / "latest")["seconds"]]


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
