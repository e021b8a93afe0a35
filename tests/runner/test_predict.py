"""`samewise predict` applies a run's model to files: without its data, the same each time, and saying which file is at fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import soundfile
import torch
from PIL import Image

SMALL = ["debug=tiny", "tracking=none", "callbacks=none", "max_steps=3", "reproducibility.threads=1"]
EXPERIMENTS = {"classification": ["experiment=resnet18_digits", "model.width=8"], "separation": ["model=conv_tasnet_small"], "vocoder": ["model=wavernn_small"]}
FURTHER = {"separation": ["transforms=none", "optimizer=adam"], "vocoder": ["transforms=mel_vocoder", "optimizer=adam"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A trained run of each recipe."""
    from samewise.runner.cli import main

    made = {}
    for recipe, overrides in EXPERIMENTS.items():
        root = tmp_path_factory.mktemp(recipe)
        choice = [] if recipe == "classification" else [f"recipe={recipe}", *FURTHER[recipe]]
        assert main(["train", *choice, *overrides, *SMALL, f"run_root={root}"]) == 0
        (made[recipe],) = root.glob("*/*/")
    return made


def recording(path: Path, frames: int = 900) -> Path:
    soundfile.write(path, (0.1 * torch.randn(frames, generator=torch.Generator().manual_seed(0))).numpy(), 8000)
    return path


def predicted(samewise, run: Path, *arguments: object) -> list[dict]:
    done = samewise("predict", run, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_image_is_classified(samewise, runs, tmp_path):
    Image.new("RGB", (40, 40), (200, 90, 10)).save(tmp_path / "a.png")
    (found,) = predicted(samewise, runs["classification"], tmp_path / "a.png")
    shares = list(found["probabilities"].values())
    assert str(found["label"]) == next(iter(found["probabilities"]))
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1.00001
    assert found["files"] == []


def test_a_recording_is_split_into_its_speakers(samewise, runs, tmp_path):
    (found,) = predicted(samewise, runs["separation"], recording(tmp_path / "both.wav"), "--output", tmp_path / "out")
    assert (found["speakers"], found["seconds"]) == (2, 0.113)
    assert [Path(path).name for path in found["files"]] == ["both_speaker_1.wav", "both_speaker_2.wav", "both_spectrograms.png"]
    assert all(len(soundfile.read(path)[0]) == 900 for path in found["files"][:2])


def test_a_recording_is_spoken_again_the_same_each_time_whatever_else_is_asked_for(samewise, runs, tmp_path):
    one, other = recording(tmp_path / "a.wav"), recording(tmp_path / "b.wav", 500)
    (alone,) = predicted(samewise, runs["vocoder"], one)
    alone_samples = soundfile.read(alone["files"][0])[0]
    assert len(alone_samples) == 900
    assert Path(alone["files"][0]).parent == runs["vocoder"] / "predictions"
    together = predicted(samewise, runs["vocoder"], other, one)
    assert [Path(found["file"]).name for found in together] == ["b.wav", "a.wav"]
    assert (soundfile.read(together[1]["files"][0])[0] == alone_samples).all()


def test_files_of_one_name_do_not_overwrite_each_other(samewise, runs, tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        recording(tmp_path / folder / "a.wav")
    found = predicted(samewise, runs["separation"], tmp_path / "x" / "a.wav", tmp_path / "y" / "a.wav", "--output", tmp_path)
    assert len({path for one in found for path in one["files"]}) == 6


def test_it_is_said_in_words(samewise, runs, tmp_path):
    done = samewise("predict", runs["separation"], recording(tmp_path / "both.wav"), "--checkpoint", "last", "device=cpu")
    assert done.returncode == 0, done.stderr
    assert "both.wav" in done.stdout
    assert "speakers" in done.stdout
    assert "both_speaker_1.wav" in done.stdout


def test_a_file_at_fault_is_named_and_the_others_are_predicted(samewise, runs, tmp_path):
    (tmp_path / "no.wav").write_bytes(b"no sound, only words" * 20)
    sound = recording(tmp_path / "yes.wav")
    done = samewise("predict", runs["separation"], tmp_path / "no.wav", tmp_path / "missing.wav", sound, "--json")
    assert done.returncode == 2
    assert "no.wav: is not audio" in done.stderr
    assert "missing.wav: cannot be read" in done.stderr
    assert [json.loads(line)["file"] for line in done.stdout.splitlines()] == [str(sound)]


def test_predicting_needs_no_data_set(samewise, runs, tmp_path):
    run = Path(shutil.copytree(runs["separation"], tmp_path / "run", symlinks=True))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("samewise.datasets.generated_mixtures.GeneratedMixtures", "samewise.datasets.librimix.LibriMix"))
    assert predicted(samewise, run, recording(tmp_path / "a.wav"))


def test_what_cannot_be_is_said(samewise, runs, tmp_path):
    sound = recording(tmp_path / "a.wav")
    done = samewise("predict", runs["separation"], sound, "--checkpoint", "77")
    assert done.returncode == 2
    assert "there is no such checkpoint" in done.stderr
    done = samewise("predict", runs["separation"], "seed=1")
    assert done.returncode == 2
    assert "no file to predict from" in done.stderr
    done = samewise("predict", runs["separation"], sound, "sede=1")
    assert done.returncode == 2
    assert "did you mean 'seed'" in done.stderr
