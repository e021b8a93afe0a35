"""The points of a sweep: composed as `train` composes them, all checked before any starts, and named so that they can be distinguished."""

from pathlib import Path

import pytest

from samewise.runner.config.compose import compose, dump, dump_plain, parse
from samewise.runner.config.project import Project
from samewise.runner.config.tree import plain
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
        assert made.point.folder == str(alone.folder.path)
        assert dump(made.composed) == dump(alone)
        assert made.point.mode == str(alone.cfg.evaluate.mode)
        same = parse(dump_plain({**made.whole, "tracking": plain(alone.cfg.tracking)}, alone))
        assert same.fingerprint == alone.fingerprint
        assert dump(same) == dump(alone)


def test_a_value_may_belong_to_a_choice_that_varies(tmp_path: Path) -> None:
    given = ("experiment=resnet18_digits", "replicas=2", "strategy=elastic,ddp", "strategy.nproc=2")
    assert [made.composed.cfg.strategy.nproc for made in points(tmp_path, *given)] == [2, 2]
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
