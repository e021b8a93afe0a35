"""A checkpoint is either complete or absent; a damaged one is named and the previous one is used."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from samewise_runner_keeping import keeper, state, steps_in, write

from samewise.runner.errors import CheckpointError, DamagedCheckpoint
from samewise.runner.records import checkpoint, checkpoint_writer, kept_checkpoints


@pytest.mark.parametrize("largest", [1 << 22, (1 << 22) - 1])
def test_training_continues_while_a_checkpoint_is_written_or_if_it_is_large_once_it_is_without_a_copy(tmp_path, monkeypatch, largest):
    kept, weights = keeper(tmp_path, background=True), torch.ones(1 << 20)
    monkeypatch.setattr(checkpoint_writer, "LARGEST_COPY", largest)
    if largest < weights.nbytes:
        monkeypatch.delattr(checkpoint_writer, "copy_to_cpu")
    kept.save(1, {"model": {"weight": weights}}, {})
    weights.zero_()
    kept.wait()
    assert checkpoint.load(tmp_path / "step-00000001")["model"]["weight"].min() == 1


def test_weights_are_read_alone_and_whatever_damages_them_is_found(tmp_path):
    keeper(tmp_path).save(1, {"model": {"weight": torch.full((9,), 3.0)}, "optimizers": {"moment": torch.full((9,), 7.0)}}, {})
    folder = tmp_path / "step-00000001"
    damaged = bytearray((folder / "state.pt").read_bytes())
    for number, refused in ((7.0, checkpoint.load), (3.0, checkpoint.load_weights)):
        assert checkpoint.load_weights(folder)["weight"].tolist() == [3.0] * 9
        damaged[damaged.index(struct.pack("<9f", *[number] * 9)) + 5] ^= 1
        (folder / "state.pt").write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint):
            refused(folder)


def test_the_newest_and_the_best_are_kept(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5], [0.9, 0.1, 0.5, 0.4, 0.3])
    assert steps_in(tmp_path) == [2, 4, 5]
    assert (tmp_path / "best").resolve().name == "step-00000002"
    assert (tmp_path / "latest").resolve().name == "step-00000005"


def test_a_checkpoint_is_chosen_by_its_step_or_as_best_or_last(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5], [0.9, 0.1, 0.5, 0.4, 0.3])
    expected = {"2": 2, "4": 4, "5": 5, "best": 2, "last": 5}
    assert {which: kept_checkpoints.choose_checkpoint(tmp_path, which).step for which in expected} == expected
    with pytest.raises(CheckpointError, match="one of best, last, 2, 4, 5"):
        kept_checkpoints.choose_checkpoint(tmp_path, "3")


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped", "state missing", "manifest missing", "manifest garbled"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(tmp_path, damage):
    write(tmp_path, [1, 2])
    file, manifest = tmp_path / "step-00000002" / "state.pt", tmp_path / "step-00000002" / "manifest.json"
    data = bytearray(file.read_bytes())
    if damage == "cut short":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "a bit flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "state missing":
        file.unlink()
    elif damage == "manifest missing":
        manifest.unlink()
    else:
        manifest.write_text("{")
    one, found, problems = checkpoint.newest_sound(tmp_path)
    assert one.step == 1
    assert found["step"] == 1
    assert "step-00000002" in str(problems[0])
    with pytest.raises(DamagedCheckpoint):
        checkpoint.load(tmp_path / "step-00000002")


def test_a_checkpoint_that_git_lfs_has_not_fetched_is_not_damaged(tmp_path):
    write(tmp_path, [1, 2])
    (tmp_path / "step-00000002" / "state.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(CheckpointError, match=r"state\.pt: is a Git LFS pointer.*; hint: `git lfs pull`") as caught:
        checkpoint.newest_sound(tmp_path)
    assert not isinstance(caught.value, DamagedCheckpoint)


def everything(folder):
    """Each file, link and folder below a folder, with the bytes of those that can be read."""
    return {path: path.read_bytes() if path.is_file() and not path.is_symlink() else None for path in sorted(folder.rglob("*"))}


WITH_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from samewise.runner.errors import CheckpointError
from samewise.runner.records import checkpoint, checkpoint_writer, kept_checkpoints
now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (32 << 20), -1))
try:
    checkpoint.newest_sound(Path(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
@pytest.mark.parametrize(("trouble", "said"), [("/proc/self/mem", "Input/output error"), ("..", "Is a directory")])
def test_an_unreadable_newest_checkpoint_is_refused_not_replaced_by_an_older_one(tmp_path, file, trouble, said):
    write(tmp_path, [1, 2])
    place = tmp_path / "step-00000002" / file
    place.unlink()
    place.symlink_to(trouble)
    before = everything(tmp_path)
    with pytest.raises(CheckpointError, match=said) as raised:
        checkpoint.newest_sound(tmp_path)
    assert not isinstance(raised.value, DamagedCheckpoint)
    assert raised.value.exit_code == 2
    assert "step-00000002" in str(raised.value)
    assert "step-00000001 can be read" in str(raised.value)
    assert everything(tmp_path) == before


@pytest.mark.slow
def test_a_checkpoint_too_large_for_memory_is_refused_and_loads_with_more(tmp_path):
    keeper(tmp_path).save(1, {"model": {"weight": torch.ones(1000)}}, {})
    keeper(tmp_path).save(2, {"model": {"weight": torch.ones(24 << 20)}}, {})
    fresh = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE_MEMORY, tmp_path], capture_output=True, text=True, check=True
    )  # this process may hold freed memory
    assert re.search(r"step-00000002: .*memory", fresh.stdout), fresh
    assert checkpoint.newest_sound(tmp_path)[0].step == 2


def test_a_newer_format_is_refused_as_such(tmp_path):
    write(tmp_path, [1, 2])
    (tmp_path / "step-00000002" / "state.pt").unlink()
    (tmp_path / "step-00000002" / "manifest.json").write_text('{"format": 2, "step": 2, "files": {}}')
    with pytest.raises(CheckpointError, match="a different format") as raised:
        checkpoint.newest_sound(tmp_path)
    assert not isinstance(raised.value, DamagedCheckpoint)
    assert "the version of samewise that wrote it" in str(raised.value)


def test_if_no_checkpoint_is_sound_each_is_named_and_none_is_deleted(tmp_path):
    write(tmp_path, [1, 2])
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}" / "state.pt").write_bytes(b"cut")
    before = everything(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.newest_sound(tmp_path)
    assert "step-00000001: the checkpoint was cut short" in str(raised.value)
    assert "step-00000002: the checkpoint was cut short" in str(raised.value)
    assert "name=" in str(raised.value)
    assert everything(tmp_path) == before


def test_damaged_checkpoints_are_set_aside_whole_and_never_overwritten(tmp_path):
    for content in (b"first", b"second"):
        kept = write(tmp_path, [1, 2])
        (tmp_path / "step-00000002" / "state.pt").write_bytes(content)
        kept.set_aside_after(1)
        assert steps_in(tmp_path) == [1]
    assert (tmp_path / "damaged-step-00000002" / "state.pt").read_bytes() == b"first"
    assert (tmp_path / "damaged-step-00000002-2" / "state.pt").read_bytes() == b"second"
    write(tmp_path, [2, 3, 4, 5])
    assert (tmp_path / "damaged-step-00000002" / "manifest.json").exists()


def test_a_checkpoint_with_unreadable_metrics_is_not_pruned(tmp_path):
    write(tmp_path, [1, 2], [0.1, 0.5], keep_last=1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.rename(tmp_path / "manifest")
    manifest.symlink_to("/proc/self/mem")
    write(tmp_path, [3, 4], [0.6, 0.7], keep_last=1)
    manifest.unlink()
    (tmp_path / "manifest").rename(manifest)
    assert checkpoint.load(tmp_path / "step-00000001")["step"] == 1
    write(tmp_path, [5], [0.8], keep_last=1)
    assert (tmp_path / "best").resolve().name == "step-00000001"


def test_a_checkpoint_is_replaced_only_once_the_new_one_is_in_place(tmp_path, monkeypatch):
    write(tmp_path, [1])

    def die_there(source, target):
        if target.name.startswith("step-"):
            raise KeyboardInterrupt
        os.rename(source, target)

    with monkeypatch.context() as moment:
        moment.setattr(os, "replace", die_there)
        with pytest.raises(KeyboardInterrupt):
            keeper(tmp_path).save(1, {**state(1), "again": True}, {})
    assert "again" not in checkpoint.load(tmp_path / "replaced-step-00000001")
    shutil.rmtree(tmp_path / "replaced-step-00000001")
    write(tmp_path, [1])
    keeper(tmp_path).save(1, {**state(1), "again": True}, {})
    assert checkpoint.load(tmp_path / "step-00000001")["again"] is True
    assert not list(tmp_path.glob("replaced-*"))


def test_a_pickled_object_is_not_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    write(tmp_path, [1])
    folder = tmp_path / "step-00000001"
    torch.save({"format": 1, "model": Evil()}, folder / "state.pt")
    import hashlib

    digest = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": 1, "sha256": digest}))
    with pytest.raises(CheckpointError, match="not loaded"):
        checkpoint.load(folder)


def test_leftovers_of_an_interrupted_write_are_ignored_and_removed(tmp_path):
    kept = write(tmp_path, [1])
    (tmp_path / ".step-00000002.123.tmp").mkdir()
    assert steps_in(tmp_path) == [1]
    kept.set_aside_after(1)
    assert not list(tmp_path.glob(".step*"))
