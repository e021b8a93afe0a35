"""Everything that a run needs is restored: everything reachable in a run that is resumed at every step is compared with one that was never stopped.

The final weights alone would show that something was lost, but not what; and not losses that leave them unchanged, such as a counter or a callback's average.
"""

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samewise_runner_resuming import Killed, Seen, at_once, composed, cut, first_difference, on_ranks, stopped, trained
from samewise_runner_resuming_space import FURTHER, OPTIMIZERS, SCHEDULERS, TINY, drawn
from samewise_tiny import DIGITS

from samewise.runner.config.catalogue import choices_of
from samewise.runner.config.compose import Composed
from samewise.runner.config.project import Project
from samewise.runner.data.keyed import training_keys
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Callback, Outcome, RunView
from samewise.runner.records import checkpoint
from samewise.runner.records.digest import state_sha256
from samewise.runner.training import batches, resuming
from samewise.runner.training.dry_run import dry_run
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
@pytest.mark.parametrize("number", [*range(100, 103), *(pytest.param(number, marks=pytest.mark.long) for number in range(103, 160))])
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
    "elastic, uneven": ["strategy=elastic", "strategy.uneven=true", "replicas=3", "accumulate=2", "optimizer=adamw"],
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


FOUR_EPOCHS = [*DIGITS, "model.width=8", "max_epochs=4", "checkpoint.every_steps=2"]


def train(samewise, run_root: Path, *overrides: str) -> Path:
    done = samewise("train", *FOUR_EPOCHS, f"run_root={run_root}", *overrides, "--json", code=0)
    return Path(json.loads(done.stdout)["folder"])


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_run_resumes_with_step_optimizer_schedule_and_averages(samewise, tmp_path):
    whole = train(samewise, tmp_path / "whole", "max_steps=4", "callbacks=ema", "callbacks.ema.every_steps=1")
    checkpoint = shutil.move(whole / "checkpoints" / "step-00000002", tmp_path / "kept")
    overrides = ("max_steps=4", "callbacks=ema", "callbacks.ema.every_steps=1", f"resume_from={checkpoint}")
    rest = train(samewise, tmp_path / "rest", *overrides)
    assert summary(rest)["weights_sha256"] == summary(whole)["weights_sha256"]
    assert summary(rest)["metrics"]["final"] == summary(whole)["metrics"]["final"]
    assert rest.name != whole.name, "it is another experiment"
    head, *lines = map(json.loads, (rest / "trace.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [3, 4]
    (kept,) = (line for line in map(json.loads, (whole / "trace.jsonl").read_text().splitlines()[1:]) if line["step"] == 2)
    assert head["initial"] == {"step": 2, "weights": kept["layers"]["weights"]}

    elsewhere = shutil.move(checkpoint, tmp_path / "elsewhere")
    again = train(samewise, tmp_path / "again", *overrides[:-1], f"resume_from={elsewhere}")
    assert again.name == rest.name, "what the checkpoint holds counts, not where it lies"


def test_what_continues_a_run_has_one_fingerprint_however_often_and_wherever_that_run_was_trained(tmp_path):
    """The checkpoint's file says how long training took, and its bytes depend on how it was written."""
    ways = [(), ("checkpoint.background=false",)]
    for number, way in enumerate(ways):
        trained(composed(*TINY, "callbacks=ema", "max_steps=2", *way), tmp_path / str(number))
    starts = [tmp_path / str(number) / "checkpoints" / "latest" for number in range(len(ways))]
    assert len({json.loads((one / "manifest.json").read_text())["sha256"] for one in starts}) > 1
    assert len({composed(*TINY, "callbacks=ema", f"resume_from={one}").fingerprint for one in starts}) == 1
    state = checkpoint.load(starts[0])
    state["schedule"] = {**state["schedule"], "other": 1}
    assert state_sha256(state) != state_sha256(checkpoint.load(starts[0]))


@pytest.mark.parametrize(
    ("before", "overrides", "said"),
    [
        ("adamw", ["optimizer=adamax"], "optimizer: it is Adamax here, and AdamW in that run"),
        ("adam", ["optimizer=adam", "optimizer.amsgrad=true"], "optimizer.amsgrad: needs averages that the checkpoint does not have"),
    ],
)
def test_an_optimizer_that_needs_what_the_checkpoint_lacks_is_refused_by_check_and_before_the_first_step(tmp_path, before, overrides, said):
    trained(composed(*TINY, f"optimizer={before}", "max_steps=1"), tmp_path / "one")
    other = composed(*TINY, *overrides, "max_steps=2", f"resume_from={tmp_path}/one/checkpoints/latest")
    for attempt in (lambda: dry_run(other, other.project), lambda: trained(other, tmp_path / "two")):
        with pytest.raises(ConfigError, match=f"resume_from: does not fit this experiment: {said}"):
            attempt()
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "+param_groups.f={match: 0.*, frozen: true}",
            "+param_groups.g={match: 1.*, frozen: true}",
            "param_groups: other parameters are trained than in the checkpoint: only here: 0.weight",
        ),
        ("initialise.frozen=[0.*]", "param_groups=none", r"only here: 0\.weight, 0\.bias"),
        ("param_groups=none", "param_groups=head_only", r"param_groups: other .*only there: 0\.weight, "),
    ],
)
def test_other_frozen_parameters_than_in_the_checkpoint_are_refused_by_check_and_before_the_first_step(tmp_path, before, after, said):
    trained(composed(*TINY, "optimizer=adamw", before, "max_steps=1"), tmp_path / "one")
    start = tmp_path / "one" / "checkpoints" / "latest"
    other = composed(*TINY, "optimizer=adamw", after, "max_steps=2", f"resume_from={start}")
    for attempt in (lambda: dry_run(other, other.project), lambda: trained(other, tmp_path / "two")):
        with pytest.raises(ConfigError, match=said) as caught:
            attempt()
        assert caught.value.problems[0].hint.startswith("freeze the same parameters as that run; to train some later, use frozen_until in a single run; or ")
    assert not (tmp_path / "two").exists()


class Counting(Callback):
    """Has state that its state_dict lacks."""

    def __init__(self) -> None:
        self.seen = {"steps": [0]}

    def on_step(self, run: RunView, outcome: Outcome) -> None:
        self.seen["steps"][0] += 1


RICH = ["callbacks=[ema,early_stopping]", "evaluate.every_steps=1"]
RICH += ["callbacks.early_stopping.min_delta=9", "scheduler=plateau", "scheduler.patience=3", "scheduler.threshold=10.0", "optimizer=adamw", "replicas=2"]
RICH += ["precision=fp16", "precision.initial_scale=64", "precision.growth_interval=2", "memory_format=channels_last", "initialise.frozen=[3.*]", "max_steps=4"]
RICH += ["checkpoint.keep_every_steps=1"]
"""As many settings as possible whose state must be restored."""


def optimizer_states(run: Run) -> list[dict[str, Any]]:
    return [*run.phases[0].optimizer.state.values()]


def set_strides(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data = parameter.data.contiguous()


def share_a_moment(run: Run) -> None:
    first, second, *_ = (state for state in optimizer_states(run) if state["exp_avg"].shape == (4,))
    first["exp_avg"] = second["exp_avg"]


FAULTS = {
    "an average begun anew": (lambda run: run.callbacks["ema"]._averaged.load_state_dict(run.model.state_dict()), "callbacks['ema']._averaged._modules['0']"),
    "patience begun anew": (lambda run: vars(run.callbacks["early_stopping"]).update(_waited=0), "callbacks['early_stopping']._waited: 1 and 0"),
    "a plateau forgotten": (lambda run: vars(run.schedule).update(bad=0), ".schedule.bad: 2 and 0"),
    "the first loss scale": (lambda run: run.precision.begin(run.strategy.device), ".precision._scaler.state_dict()['scale']"),
    "a counter of steps that lost one": (lambda run: optimizer_states(run)[0]["step"].sub_(1), "['step']"),
    "a counter of another dtype": (lambda run: optimizer_states(run)[0].update(step=optimizer_states(run)[0]["step"].double()), "['step']"),
    "a moment rounded": (lambda run: optimizer_states(run)[-1].update(exp_avg_sq=optimizer_states(run)[-1]["exp_avg_sq"].bfloat16().float()), "['exp_avg_sq']"),
    "two moments in one": (share_a_moment, "['exp_avg']: "),
    "another learning rate": (lambda run: run.phases[0].optimizer.param_groups[0].update(lr=0.5), ".param_groups[0]['lr']"),
    "statistics of batch norm forgotten": (lambda run: run.model[1].reset_running_stats(), "['1']._buffers['running_mean']"),
    "frozen weights thawed": (lambda run: run.model.requires_grad_(True), "_modules['3']._parameters['weight']"),
    "weights that lie otherwise": (set_strides, "_modules['0']._parameters['weight']"),
    "a layer left in evaluation": (lambda run: run.model[5].eval(), "['5'].training: True and False"),
    "the best forgotten": (lambda run: run.progress.best.clear(), ".best['valid/loss']"),
    "another order": (lambda run: vars(run.order).update(_seed=1), "_seed: 0 and 1"),
    "another cut of it": (lambda run: vars(run).update(plan=replace(run.plan, samples=31)), ".plan.samples: 32 and 31"),
}


@pytest.fixture(scope="module")
def rich(tmp_path_factory) -> tuple[Composed, Path, Seen]:
    config, folder = composed(*TINY, *RICH), tmp_path_factory.mktemp("rich") / "whole"
    return config, folder, trained(config, folder)


def test_without_a_fault_nothing_is_lost(rich, tmp_path):
    config, folder, whole = rich
    part = trained(config, cut(folder, tmp_path / "run", after=2), before_step=stopped, most=1)
    assert [*part.moments] == [("begins", 2), ("stepped", 3), ("evaluated", 3)]
    assert first_difference(whole, part) is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(rich, tmp_path, monkeypatch, name):
    (config, folder, whole), (fault, path), restore = rich, FAULTS[name], resuming.restore
    monkeypatch.setattr(resuming, "restore", lambda run, state: (restore(run, state), fault(run)))
    part = trained(config, cut(folder, tmp_path / "run", after=2), before_step=stopped, most=1)
    found = first_difference(whole, part)
    assert found is not None
    assert found.startswith("begins at step 2: ")
    assert path in found


def test_a_shifted_order_is_found_by_the_next_batch(rich, tmp_path, monkeypatch):
    config, folder, whole = rich
    monkeypatch.setattr(batches, "training_keys", lambda *args, first_step, **settings: training_keys(*args, first_step=first_step + 1, **settings))
    part = trained(config, cut(folder, tmp_path / "run", after=2), before_step=stopped, most=1)
    assert first_difference(whole, part).startswith("begins at step 2: ['given'][0].batch['image']: ")


def test_state_that_a_callback_does_not_save_is_found_and_named(tmp_path):
    config = composed(*TINY)
    whole, pieces = (
        trained(config, tmp_path / name, before_step=before_step, prepare=lambda run: run.callbacks.update(counting=Counting()))
        for name, before_step in {"whole": at_once, "pieces": stopped}.items()
    )
    assert first_difference(whole, pieces) == "begins at step 1: ['run'].recorder.callbacks['counting'].seen['steps'][0]: 1 and 0"
