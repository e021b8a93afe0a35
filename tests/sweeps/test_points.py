"""The points of a sweep: composed as `train` composes them, all checked before any starts, and named so that they can be distinguished."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samewise.runner.config import header
from samewise.runner.config.check import components
from samewise.runner.config.compose import compose, dump, dump_plain, parse
from samewise.runner.config.loader import Loader
from samewise.runner.config.project import Project
from samewise.runner.config.tree import plain
from samewise.runner.errors import ConfigError
from samewise.runner.records.sweep_folder import SweepFolder, label
from samewise.runner.sweepers.grid import Grid
from samewise.runner.sweepers.space import read_space
from samewise.runner.sweeps.points import Composer, compose_points, identity, write_configs
from samewise.runner.sweeps.shared_runs import notes, require_same_data, require_separate
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


def test_runs_are_named_by_what_varies(tmp_path: Path) -> None:
    first, *_ = points(tmp_path, "experiment=resnet18_digits", "optimizer.lr=0.1,0.2", "seed=3,4")
    assert first.point.label == "lr=0.1 seed=3"
    assert first.whole["tracking"]["run_name"] == "lr=0.1 seed=3 (resnet18_digits)"
    assert first.whole["tracking"]["tags"] == {"sweep": "digits-1", "sweep.point": "0", "sweep.setting": "0"}
    folder = SweepFolder(tmp_path / "sweep")
    folder.write_facts({})
    write_configs(points(tmp_path, "experiment=resnet18_digits", "debug=tiny", "optimizer.lr=0.1,0.2"), folder)
    assert header.read(folder.config(0).read_text())[1] == "debug=tiny lr=0.1"  # `samewise runs` shows all that was overridden
    assert label({"optimizer.lr": "1", "scheduler.lr": "2"}) == "optimizer.lr=1 scheduler.lr=2"
    assert label({"model.name": "resnet50", "evaluate.batch_size": "4", "batch_size": "8"}) == "model.name=resnet50 evaluate.batch_size=4 batch_size=8"
    assert label({}) == "as it is"
    assert (
        label({"lr": "0.00020810930525488", "eps": "1.2345678901e-08", "depth": "18", "seed": "12345678"})
        == "lr=0.0002081 eps=1.235e-08 depth=18 seed=12345678"
    )


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


def test_a_truncated_point_is_rewritten_and_a_damaged_one_is_reported(tmp_path: Path) -> None:
    made = [one.point for one in points(tmp_path, "experiment=resnet18_digits", "optimizer.lr=0.1,0.2,0.3")]
    folder = SweepFolder(tmp_path / "sweep")
    folder.write_facts({})
    folder.add_points(made[:2])
    with open(folder.path / "points.jsonl", "ab") as file:
        file.write(b'{"number": 2, "sett')
    assert folder.points() == made[:2]
    folder.add_points(made[2:])
    assert folder.points() == made
    lines = (folder.path / "points.jsonl").read_bytes().splitlines(keepends=True)
    (folder.path / "points.jsonl").write_bytes(b"".join([lines[0], b"\xff" + lines[1], *lines[2:]]))
    with pytest.raises(ConfigError, match="the line of point 1 is damaged"):
        folder.points()


@pytest.mark.slow
@pytest.mark.long
def test_what_a_thousand_points_share_is_read_and_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter[str]()
    for module, name in ((Loader, "compose"), (components, "problems_in")):
        monkeypatch.setattr(module, name, _count_calls(counts, name, getattr(module, name)))
    found = points(tmp_path, "experiment=resnet18_digits", "optimizer.lr=range(0.01,0.11,0.01)", "optimizer.momentum=range(0,1,0.1)", "seed=range(10)")
    require_sound(found, BARE)
    assert len(found) == 1000
    assert counts["compose"] == 1
    parts = {(key, json.dumps(part, sort_keys=True, default=str)) for one in found for key, part in one.whole.items()}
    assert counts["problems_in"] == len(parts) < 1300  # 100 optimizers, ten seeds, the tags of each point, and what they share


def _count_calls(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*given: Any, **more: Any) -> Any:
        counts[name] += 1
        return function(*given, **more)

    return counted


def shared(found):
    return require_separate([one.point for one in found], lambda point: found[point.number].composed)


def test_points_that_differ_only_in_where_their_data_are_are_refused(tmp_path: Path) -> None:
    images = ("recipe=classification", "model=resnet18_small", "dataset=image_folder")
    points_and_hint = r"^dataset\.root: .* points 1 \(root=a lr=0.1\) and 3 \(root=b lr=0.1\), and 1 more .*'name=NAME-\$\{dataset\.root\}'"
    with pytest.raises(ConfigError, match=points_and_hint):
        shared(points(tmp_path, *images, "dataset.root=a,b", "optimizer.lr=0.1,0.2"))
    with pytest.raises(ConfigError, match=r"^device: is not part of the fingerprint"):
        shared(points(tmp_path, *images, "device=cpu,cuda"))
    separate = points(tmp_path, *images, "dataset.root=a,b", "name=NAME-${dataset.root}")  # as the hint says
    assert shared(separate) == {}
    assert len({one.point.folder for one in separate}) == 2


def test_points_that_differ_in_nothing_that_changes_a_result_are_said_once_to_be_one_run(tmp_path: Path) -> None:
    found = shared(points(tmp_path, "experiment=resnet18_digits", "loader.num_workers=0,2", "optimizer.lr=0.1,0.2"))
    told = set[tuple[str, ...]]()
    (said,) = notes(found, told)
    assert said == "2 points are the same runs as earlier ones (3 as 1, 4 as 2): they differ only in loader.num_workers, which does not change the result"
    assert notes(found, told) == []


def test_a_sweep_is_not_resumed_with_data_elsewhere(tmp_path: Path) -> None:
    images = ("recipe=classification", "model=resnet18_small", "dataset=image_folder", "optimizer.lr=0.1,0.2")
    folder = SweepFolder(tmp_path / "digits-1")
    folder.write_facts({})
    made = points(tmp_path, *images, "dataset.root=a")
    write_configs(made, folder)
    folder.add_points([one.point for one in made])
    require_same_data(folder, read_space((*images, "dataset.root=a"), project=BARE), Composer(BARE))
    with pytest.raises(ConfigError, match=r"made with dataset\.root=a \(now b\); hint: .*name="):
        require_same_data(folder, read_space((*images, "dataset.root=b"), project=BARE), Composer(BARE))
