"""What a checkpoint contains, which ones are kept, shards, and the errors if one cannot be written or read."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from samewise_runner_keeping import keeper, state, steps_in, write, write_metrics
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from samewise.runner.errors import CheckpointError, DamagedCheckpoint, TrainingError
from samewise.runner.records import checkpoint, checkpoint_writer, kept_checkpoints, shards
from samewise.runner.records.checkpoint_writer import copy_to_cpu
from samewise.runner.records.digest import combine, state_sha256, tensor_digests
from samewise.runner.records.files import sha256
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import checkpoint_of, chosen_checkpoint


def best(folder: Path) -> str:
    return (folder / "best").resolve().name


@pytest.mark.parametrize(("mode", "first"), [("min", 2), ("max", 4)])
def test_the_best_is_chosen_by_the_monitored_metric_and_the_first_wins_a_tie(tmp_path: Path, mode: str, first: int) -> None:
    write(tmp_path, range(1, 7), [0.5, 0.1, 0.1, 0.9, 0.9, 0.4], mode=mode, keep_last=1, keep_best=2)
    assert best(tmp_path) == f"step-{first:08d}"
    assert steps_in(tmp_path) == [first, first + 1, 6]


def test_the_best_of_each_metric_is_kept_and_found_by_the_name_of_the_metric(tmp_path: Path) -> None:
    came = enumerate([(0.5, 0.1), (0.2, 0.3), (0.4, 0.8), (0.3, 0.7), (0.6, 0.2)], start=1)
    metrics = {step: {"valid/loss": loss, "valid/accuracy": accuracy, "ema/valid/loss": -loss} for step, (loss, accuracy) in came}
    write_metrics(tmp_path, metrics, keep_last=1, also={"valid/accuracy": "max", "ema/valid/loss": "min"})
    assert steps_in(tmp_path) == [2, 3, 5]
    named = {"best": 2, "valid/accuracy": 3, "ema/valid/loss": 5, "last": 5, "3": 3}
    assert {which: kept_checkpoints.choose_checkpoint(tmp_path, which).step for which in named} == named
    with pytest.raises(CheckpointError, match="did you mean 'valid/accuracy'"):
        kept_checkpoints.choose_checkpoint(tmp_path, "valid/acuracy")


def test_best_points_to_an_existing_checkpoint_if_none_is_kept_for_being_best(tmp_path: Path) -> None:
    kept = keeper(tmp_path, keep_last=1, keep_best=0)
    for step, loss in enumerate([0.5, 0.1, 0.3], start=1):
        kept.save(step, state(step), {"valid/loss": loss})
        assert best(tmp_path) == f"step-{step:08d}"
        assert (tmp_path / "best" / "state.pt").is_file()
    write(tmp_path, [4], [0.4], keep_best=0)
    assert best(tmp_path) == "step-00000003"


def test_without_its_links_a_copy_has_the_same_best_and_a_folder_in_the_place_of_one_is_moved_aside(tmp_path: Path, capsys) -> None:
    copied = RunFolder(tmp_path / "copied")
    copied.path.mkdir()
    copied.config.write_text("evaluate:\n  limit: null\n  monitor: valid/loss\n  mode: min\n  also:\n    valid/accuracy: max\n")
    came = enumerate([(0.5, 0.1), (0.1, 0.2), (0.3, 0.9), (0.2, 0.3)], start=1)
    metrics = {step: {"valid/loss": loss, "valid/accuracy": accuracy} for step, (loss, accuracy) in came}
    (tmp_path / "run").mkdir()
    write_metrics(tmp_path / "run", metrics, keep_last=9, also={"valid/accuracy": "max"})
    shutil.copytree(tmp_path / "run", copied.checkpoints)  # follows links
    expected = {"best": 2, "valid/accuracy": 3, "last": 4}
    for _ in ("folders", "nothing"):
        assert {which: kept_checkpoints.choose_checkpoint(copied.checkpoints, which).step for which in expected} == expected
        assert [chosen_checkpoint(copied, which).name for which in ("best", "last")] == ["step-00000002", "step-00000004"]
        assert checkpoint_of(f"{copied.path}/last", run_root=tmp_path) == copied.checkpoints / "step-00000004"
        shutil.rmtree(copied.checkpoints / "best", ignore_errors=True)
        shutil.rmtree(copied.checkpoints / "best-valid-accuracy", ignore_errors=True)
    write_metrics(copied.checkpoints, {5: {"valid/loss": 0.01}}, keep_last=9)
    assert "latest: is a folder, not a link; moved to replaced-latest" in capsys.readouterr().err
    assert (copied.checkpoints / "replaced-latest/state.pt").is_file()
    assert best(copied.checkpoints) == (copied.checkpoints / "latest").resolve().name == "step-00000005"


def test_the_manifest_has_the_step_and_metrics_and_digests_of_file_and_weights(tmp_path: Path) -> None:
    keeper(tmp_path).save(7, state(7), {"valid/loss": 0.5})
    folder = tmp_path / "step-00000007"
    written = json.loads((folder / "manifest.json").read_text())
    assert written == {
        "format": 1,
        "step": 7,
        "sha256": sha256(folder / "state.pt"),
        "content": state_sha256(state(7)),
        "weights": f"{combine(tensor_digests(state(7)['model'])):016x}",
        "metrics": {"valid/loss": 0.5},
    }


def test_a_copy_is_deep_and_keeps_types() -> None:
    weight, numbers = torch.ones(3), [1]
    held = {"a": [weight, (weight, 2)], "b": {"c": weight}, "d": numbers, "e": None}
    copied = copy_to_cpu(held)
    weight.zero_()
    numbers.append(2)
    assert [type(copied["a"]), type(copied["a"][1])] == [list, tuple]
    for one in (copied["a"][0], copied["a"][1][0], copied["b"]["c"]):
        assert one.tolist() == [1, 1, 1]
    assert (copied["d"], copied["e"], copied["a"][1][1]) == ([1], None, 2)


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_write_is_reported_in_the_words_of_the_system(tmp_path: Path, background: bool) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    with pytest.raises(TrainingError) as caught:
        write(tmp_path / "checkpoints", [1], background=background)
    assert [problem.message for problem in caught.value.problems] == ["the checkpoint cannot be written: File exists"]


def test_a_limit_on_the_size_of_files_is_named_and_a_failure_in_the_background_is_raised_as_soon_as_it_is_known(tmp_path: Path) -> None:
    kept, limits = keeper(tmp_path, background=True), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        kept.save(1, {"model": {"weight": torch.ones(1 << 20)}}, {})
        while not kept._written.done():
            time.sleep(0.001)
        with pytest.raises(TrainingError, match=r"cannot be written: File too large(.|\n)*ulimit -f"):
            kept.raise_failure()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    kept.raise_failure()


@contextlib.contextmanager
def disk(folder: Path, limit: str) -> Iterator[Path]:
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "tmpfs", str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root, and a sandbox that lets it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # an error may still hold an open file on it


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("limit", "remedy"), [("size=1m", "free some space"), ("size=100m,nr_inodes=6", "no inodes are left")])
def test_a_full_disk_is_reported_and_existing_checkpoints_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, remedy: str, background: bool
) -> None:
    monkeypatch.setattr(checkpoint_writer, "_PAUSE_S", 0.0)
    with disk(tmp_path / "disk", limit) as folder:
        kept = keeper(folder, background=background)
        kept.save(1, state(1), {})
        large = {"model": {"weight": torch.ones(1 << 20)}}
        if background:
            kept.save(2, large, {})
        with pytest.raises(TrainingError, match=f"cannot be written: No space left on device; hint: .*{remedy}"):
            kept.wait() if background else kept.save(2, large, {})
        assert steps_in(folder) == [1]
        assert not list(folder.glob(".step*"))
        assert checkpoint.load(folder / "step-00000001")["step"] == 1


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[Callable[[Path], Tensor]]:
    """Writes a sharded checkpoint of one process; returns the tensor."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def write(folder: Path) -> Tensor:
        kept = keeper(folder)
        weight = torch.arange(12.0).reshape(4, 3)
        mesh = init_device_mesh("cpu", (1,))
        left, tensors = shards.split({**state(3), "model": {"weight": distribute_tensor(weight, mesh, [Shard(0)])}})
        (kept.shards_folder(3) / "leftover").write_text("of a write that was cut off")
        place = kept.shards_folder(3)
        assert list(place.iterdir()) == []
        shards.save(tensors, place)
        kept.save(3, {**left, "shards": shards.digests(place, 0)}, {})
        return weight

    yield write
    dist.destroy_process_group()


def test_shards_load_as_a_whole_and_the_manifest_has_no_digest_of_the_weights(tmp_path: Path, sharded: Callable[[Path], Tensor]) -> None:
    weight = sharded(tmp_path / "checkpoints")
    folder = tmp_path / "checkpoints" / "step-00000003"
    assert torch.equal(checkpoint.load(folder)["model"]["weight"], weight)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "shards", "state.pt"]
    assert json.loads((folder / "manifest.json").read_text())["weights"] is None
    assert not list((tmp_path / "checkpoints").glob(".step*"))
    assert "shards" in checkpoint.read(folder)
    made: list[list[int]] = []

    def empty(shape: list[int], dtype: torch.dtype) -> Tensor:
        made.append(shape)
        return torch.zeros(shape, dtype=dtype)

    assert torch.equal(checkpoint.load_sharded(checkpoint.read(folder), folder, empty)["model"]["weight"], weight)
    assert made == [[4, 3]]


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_or_missing_shard_is_named_with_its_digest(tmp_path: Path, sharded: Callable[[Path], Tensor], missing: bool) -> None:
    sharded(tmp_path)
    (shard,) = tmp_path.glob("step-00000003/shards/*.distcp")
    digest = sha256(shard)
    shard.unlink()
    if not missing:
        shard.write_bytes(b"other")
    with pytest.raises(DamagedCheckpoint) as caught:
        checkpoint.load(tmp_path / "step-00000003")
    (problem,) = caught.value.problems
    assert (problem.path, problem.expected) == (str(shard), f"sha256 {digest[:16]}...")
