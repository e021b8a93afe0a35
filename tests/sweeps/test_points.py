"""The points of a sweep: composed as `train` composes them, all checked before any starts, and named so that they can be distinguished."""

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from omegaconf import OmegaConf

from samewise.runner.config.compose import compose, dump, dump_plain, parse
from samewise.runner.config.loader import Loader
from samewise.runner.config.project import Project
from samewise.runner.config.tree import flat, plain
from samewise.runner.errors import ConfigError
from samewise.runner.records.sweep_folder import SweepFolder
from samewise.runner.sweepers.grid import Grid
from samewise.runner.sweepers.space import read_space
from samewise.runner.sweeps.points import Composer, compose_points, identity
from samewise.runner.sweeps.soundness import require_sound

BARE = Project(Path(__file__).parent)


def points(tmp_path: Path, *given: str):
    space = read_space(given, project=BARE)
    grid = Grid()
    grid.open(space, tmp_path, monitor="valid/loss", mode="min")
    return compose_points(list(grid.settings()), space, SweepFolder(tmp_path / "digits-1"), Composer(BARE), first=0)


VARIED = ("experiment=resnet18_digits,retinanet_bccd", "optimizer.lr=0.1,0.2", "callbacks=[default],[default,ema]", "seed=range(2)")
MONITORED = ("evaluate.monitor=[valid/accuracy,valid/loss]", "optimizer=sgd,adam", "seed=range(2)")


@pytest.mark.parametrize("given", [VARIED, MONITORED, ("optimizer=sgd,adam", "seed=range(2)")])
def test_a_point_equals_the_experiment_of_its_overrides(tmp_path: Path, given: tuple[str, ...]) -> None:
    for made in points(tmp_path, *given)[::3]:
        alone = compose(made.point.overrides, project=BARE)
        assert made.point.fingerprint == alone.fingerprint
        assert made.whole == {**alone.whole, "tracking": made.whole["tracking"]}
        assert made.point.folder == str(alone.folder.path)
        assert dump(made.compose()) == dump(alone)
        assert made.point.mode == str(alone.cfg.evaluate.mode)
        same = parse(dump_plain({**made.whole, "tracking": plain(alone.cfg.tracking)}, alone))
        assert same.fingerprint == alone.fingerprint
        assert dump(same) == dump(alone)


EXPERIMENTS = ("resnet18_digits", "retinanet_bccd", "gan_digits", "wav2letter_spoken_digits", "gpt_unicode_names", "resnet50_fine_tuned")
CHOICES = ("model=resnet18,resnet20_cifar", "optimizer=sgd,adam", "scheduler=cosine,constant", "callbacks=[default],[default,ema]", "strategy=one,ddp")
EDITS = ("~callbacks.progress", "+model.added=1,2", "++optimizer.momentum=0.5,null", "evaluate.monitor=[valid/loss,valid/accuracy],valid/loss", "evaluate.mode=min,max",
         "name='study-${batch_size}'", "evaluate.monitor='valid/${precision.dtype}'", "optimizer={lr:0.5},{lr:2}", "+tracking.tags.of='${seed}',b")  # fmt: skip
VALUES = ("1,2", "0.5,null", "true,false", "some,text", "[1,2],[3]", "'${seed}',7", "'${model}'", "16", "'${oc.env:HOME}-${replicas}'", "???,3")


def drawn(draw: Random) -> tuple[str, ...]:
    """A sweep's overrides: choices of groups, and values, suitable or not, of any keys and of those to which others refer."""
    experiment = f"experiment={draw.choice(EXPERIMENTS)}"
    raw = dict(flat(OmegaConf.to_container(compose([experiment], project=BARE).cfg, resolve=False)))
    referred = [path for value in raw.values() for path in re.findall(r"\$\{([\w.]+)\}", str(value)) if path in raw]
    free = [path for path in raw if not path.startswith(("sweeper", "launcher", "evaluate.mode"))]
    keys = ["seed", "batch_size", *draw.sample(free, 3), *draw.sample(referred, 2)]
    edits = [*draw.sample(CHOICES, draw.choice([0, 0, 1, 2])), *draw.sample(EDITS, draw.choice([0, 0, 1]))]
    values = [f"{key}={draw.choice(VALUES)}" for key in dict.fromkeys(draw.sample(keys, draw.choice([1, 2, 3])))]
    return (experiment, *draw.sample([*edits, *values], len(edits) + len(values)))


@pytest.mark.parametrize("count", [24, *(pytest.param(200 + number, marks=[pytest.mark.slow, pytest.mark.long]) for number in range(5))])
def test_points_of_any_sweep_equal_what_is_composed_alone(count: int) -> None:
    draw = Random(count)
    while count > 0:
        space, composer = read_space(drawn(draw), project=BARE), Composer(BARE)
        drawn_points = [space.at({**values, "seed": seed}) for values in space.grid() for seed in space.seeds or ("0",)]
        for overrides in draw.sample(drawn_points, min(8, len(drawn_points))):
            alone = compose(overrides, project=BARE, strict=False)
            whole, alike = composer.resolve(overrides)
            assert repr(whole) == repr(alone.whole), overrides
            assert (bool(alike.problems), alike.choices, alike.name) == (bool(alone.problems), alone.choices, alone.name), overrides
            count -= 1


def test_a_thousand_points_read_their_files_once_and_hold_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()

    def counted(self: Any, *args: Any, _do: Any = Loader.compose) -> Any:
        calls["files"] += 1
        return _do(self, *args)

    monkeypatch.setattr(Loader, "compose", counted)
    monkeypatch.setattr(Composer, "compose", lambda *args, _do=Composer.compose: calls.update(["whole"]) or _do(*args))
    made = points(tmp_path, "experiment=resnet18_digits", "dataset.num_classes=10,11", "optimizer.lr=0.1,0.2", "seed=range(250)")
    assert calls == {"files": 1, "whole": 1}
    assert len({x.point.fingerprint for x in made}) == 1000
    assert made[-1].whole["model"]["num_classes"] == 11
    assert all(x.whole["transforms"] is made[0].whole["transforms"] for x in made)


def test_a_value_may_belong_to_a_choice_that_varies(tmp_path: Path) -> None:
    given = ("experiment=resnet18_digits", "replicas=2", "strategy=elastic,ddp", "strategy.nproc=2")
    assert [made.compose().cfg.strategy.nproc for made in points(tmp_path, *given)] == [2, 2]
    one, other = (identity(read_space((*given, more), project=BARE), Composer(BARE))[0] for more in ("seed=0,1", "clip_norm=1"))
    assert one.startswith("resnet18_digits-")
    assert one != other
    with pytest.raises(ConfigError, match=r"strategy\.nprok: no such key"):
        identity(read_space((*given[:3], "strategy.nprok=2"), project=BARE), Composer(BARE))


def test_all_problems_of_all_points_are_reported_before_any_starts(tmp_path: Path) -> None:
    found = points(tmp_path, "experiment=resnet18_digits", "optimizer.lr=0.1,-1,fast", "batch_size=64,0", "+model.depth=1,2")
    with pytest.raises(ConfigError) as caught:
        require_sound(found, BARE)
    told = {problem.path: problem for problem in caught.value.problems}
    assert set(told) == {"optimizer.lr", "batch_size", "model.depth"}
    assert "6 of 12 points, first lr=0.1 batch_size=0" in told["batch_size"].message
    assert "every point" in told["model.depth"].message


def test_unsuitable_processes_and_a_missing_device_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tiny = ("experiment=resnet18_digits", "debug=tiny", f"run_root={tmp_path}")
    with pytest.raises(ConfigError, match=r"4 processes cannot share 2 replicas \(in 2 of 4 points, first replicas=2 seed=0\)"):
        require_sound(points(tmp_path, *tiny, "strategy=elastic", "strategy.nproc=4", "replicas=2,4", "seed=0,1"), BARE)
    with pytest.raises(ConfigError, match=r"torch finds no CUDA device \(in every point\)"):
        require_sound(points(tmp_path, *tiny, "device=cuda", "seed=0,1"), BARE)
