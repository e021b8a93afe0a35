"""A checkpoint is whole or it is not there; a damaged one is named and the one before it is used."""

from __future__ import annotations

import pytest
import torch

from samewise.runner import checkpoint
from samewise.runner.checkpoint import Checkpoints
from samewise.runner.errors import CheckpointError, TrainingError


def keeper(folder, **settings):
    return Checkpoints(
        folder, **{"keep_last": 2, "keep_best": 1, "keep_every_steps": None, "monitor": "valid/loss", "mode": "min", "background": True} | settings
    )


def state(step: int) -> dict:
    return {"step": step, "model": {"weight": torch.full((100,), float(step))}, "best": {"valid/loss": 0.5}}


def write(folder, steps, losses=None, **settings):
    kept = keeper(folder, **settings)
    for number, step in enumerate(steps):
        kept.save(step, state(step), {"valid/loss": losses[number]} if losses else {})
    kept.wait()
    return kept


def steps_in(folder):
    return [one.step for one in checkpoint.found(folder)]


def test_what_is_saved_comes_back(tmp_path):
    write(tmp_path, [10])
    one, found, problems = checkpoint.newest_sound(tmp_path)
    assert one.step == 10
    assert torch.equal(found["model"]["weight"], torch.full((100,), 10.0))
    assert found["best"] == {"valid/loss": 0.5}
    assert problems == []


def test_training_may_go_on_while_it_is_written(tmp_path):
    kept, weights = keeper(tmp_path), torch.ones(1_000_000)
    kept.save(1, {"model": {"weight": weights}}, {})
    weights.zero_()
    kept.wait()
    assert checkpoint.load(tmp_path / "step-00000001")["model"]["weight"].min() == 1


def test_the_newest_and_the_best_are_kept(tmp_path):
    write(tmp_path, [1, 2, 3, 4, 5], [0.9, 0.1, 0.5, 0.4, 0.3])
    assert steps_in(tmp_path) == [2, 4, 5]
    assert (tmp_path / "best").resolve().name == "step-00000002"
    assert (tmp_path / "latest").resolve().name == "step-00000005"


def test_more_is_better_when_the_mode_says_so(tmp_path):
    write(tmp_path, [1, 2, 3], [0.9, 0.1, 0.5], mode="max", keep_last=1)
    assert steps_in(tmp_path) == [1, 3]


def test_every_nth_is_kept_for_good(tmp_path):
    write(tmp_path, list(range(1, 10)), keep_every_steps=4, keep_last=1, keep_best=0)
    assert steps_in(tmp_path) == [4, 8, 9]


@pytest.mark.parametrize("damage", ["cut short", "a bit flipped", "state missing", "manifest missing", "manifest garbled"])
def test_a_damaged_one_is_named_and_the_one_before_it_is_used(tmp_path, damage):
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
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "step-00000002")


def test_a_pickled_object_is_not_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    write(tmp_path, [1])
    folder = tmp_path / "step-00000001"
    torch.save({"format": 1, "model": Evil()}, folder / "state.pt")
    import hashlib
    import json

    digest = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "step": 1, "sha256": digest}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(folder)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    kept = keeper(tmp_path / "checkpoints")
    kept.save(1, state(1), {})
    with pytest.raises(TrainingError, match="cannot be written"):
        kept.wait()


def test_leftovers_of_an_interrupted_write_are_no_checkpoint_and_are_removed(tmp_path):
    kept = write(tmp_path, [1])
    (tmp_path / ".step-00000002.123.tmp").mkdir()
    assert steps_in(tmp_path) == [1]
    kept.discard_after(1)
    assert not list(tmp_path.glob(".step*"))
