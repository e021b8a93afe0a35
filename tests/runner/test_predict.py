"""`samewise predict` applies a run's model to files: without its data, the same each time, and saying which file is at fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import soundfile
import torch
from PIL import Image

from samewise.recipes.classification import Classification
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Recipe

SMALL = [
    "debug=tiny",
    "tracking=none",
    "evaluate.pictures=false",
    "max_steps=2",
    "reproducibility.threads=1",
    "evaluate.every_epochs=null",
    "dataset.samples=16",
]
EXPERIMENTS = {
    "classification": ["experiment=resnet18_digits", "model.width=8", "callbacks=[ema]", "callbacks.ema.every_steps=1"],
    "detection": ["experiment=retinanet_bccd", "batch_size=4", "dataset.valid_samples=4", "model.channels=32", "model.score_thresh=0", "callbacks=[ema]"],
    "speech_recognition": ["experiment=wav2letter_spoken_digits", "model.width=16", "model.top_width=32", "callbacks=none"],
    "separation": ["recipe=separation", "model=conv_tasnet_small", "transforms=none", "optimizer=adam", "callbacks=none", "dataset.valid_samples=4"],
    "vocoder": [
        "recipe=vocoder",
        "model=wavernn_small",
        "transforms=mel_vocoder",
        "optimizer=adam",
        "callbacks=none",
        "dataset.clips=16",
        "dataset.valid_clips=4",
    ],
}
DRAWN = {
    "classification": {"confusion_matrix.png", "predictions.png", "class_accuracy.csv"},
    "detection": {"detections.png", "precision_recall.png", "class_precision.csv"},
    "speech_recognition": {"transcripts.csv", "transcripts.html", "spectrograms.png"},
    "separation": {"mixtures.csv", "spectrograms.png"},
    "vocoder": {"clip_0_true.wav", "clip_0_resynthesised.wav", "spectrograms.png"},
}
"""What an evaluation leaves to look at or listen to."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A trained run of each recipe."""
    from samewise.runner.cli import main

    made = {}
    for recipe, overrides in EXPERIMENTS.items():
        root = tmp_path_factory.mktemp(recipe)
        given = [one for one in [*SMALL, *overrides] if recipe != "vocoder" or one != "dataset.samples=16"]  # a clip's length, there
        assert main(["train", *given, f"run_root={root}"]) == 0
        (made[recipe],) = root.glob("*/*/")
    return made


def recording(path: Path, frames: int = 900) -> Path:
    soundfile.write(path, (0.1 * torch.randn(frames, generator=torch.Generator().manual_seed(0))).numpy(), 8000)
    return path


def predicted(samewise, run: Path, *arguments: object) -> list[dict]:
    done = samewise("predict", run, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("recipe", EXPERIMENTS)
def test_each_recipe_is_evaluated_again_to_the_same_values_with_its_pictures(samewise, runs, recipe, tmp_path):
    done = samewise("eval", runs[recipe], "--checkpoint", "last", "--json", "--pictures", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    trained = json.loads((runs[recipe] / "summary.json").read_text())["metrics"]["final"]
    assert found["metrics"] == trained
    assert {path.name for path in tmp_path.iterdir()} >= DRAWN[recipe]


def test_an_image_is_classified_by_the_names_of_the_data_set(samewise, runs, tmp_path):
    Image.new("RGB", (40, 40), (200, 90, 10)).save(tmp_path / "a.png")
    (found,) = predicted(samewise, runs["classification"], tmp_path / "a.png")
    shares = list(found["probabilities"].values())
    assert found["class"] == f"pattern {found['label']}" == next(iter(found["probabilities"]))
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1.00001
    assert found["files"] == []


def test_without_names_a_class_is_its_number(samewise, runs, tmp_path):
    run = Path(shutil.copytree(runs["classification"], tmp_path / "run", symlinks=True))
    facts = json.loads((run / "environment.json").read_text())
    del facts["data"]["train"]["classes"]
    (run / "environment.json").write_text(json.dumps(facts))
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    (found,) = predicted(samewise, run, tmp_path / "a.png")
    assert "class" not in found
    assert str(found["label"]) == next(iter(found["probabilities"]))


def test_boxes_are_found_in_an_image_and_drawn(samewise, runs, tmp_path):
    Image.effect_noise((80, 64), 60).convert("RGB").save(tmp_path / "street.jpg")
    (found,) = predicted(samewise, runs["detection"], tmp_path / "street.jpg", "--output", tmp_path)
    assert (found["width"], found["height"]) == (80, 64)
    assert len(found["detections"]) > 10
    scores = [one["score"] for one in found["detections"]]
    assert scores == sorted(scores, reverse=True)
    for one in found["detections"]:
        x1, y1, x2, y2 = one["box"]
        assert 0 <= x1 <= x2 <= 80
        assert 0 <= y1 <= y2 <= 64
        assert one["class"] == ["background", *"0123456789"][one["label"]]
    (picture,) = found["files"]
    assert Path(picture).name == "street_detections.png"
    with Image.open(picture) as drawn:
        assert drawn.size == (480, 384)
    done = samewise("predict", runs["detection"], tmp_path / "street.jpg", "--output", tmp_path)
    assert done.stdout.count("  detections ") == 11
    assert f"and {len(scores) - 10} more, with --json" in done.stdout


@pytest.mark.parametrize("recipe", ["classification", "detection"])
def test_the_moving_average_of_the_weights_predicts_and_is_evaluated(samewise, runs, recipe, tmp_path):
    Image.effect_noise((80, 64), 60).convert("RGB").save(tmp_path / "a.png")
    one, other = (predicted(samewise, runs[recipe], tmp_path / "a.png", *weights)[0] for weights in ([], ["--weights", "ema"]))
    assert one["files"] == other["files"]
    assert one != other
    done = samewise("eval", runs[recipe], "--weights", "ema", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    trained = json.loads((runs[recipe] / "summary.json").read_text())["metrics"]["final"]
    assert found["metrics"] == {name: value for name, value in trained.items() if name.startswith("ema/")}
    assert Path(found["pictures"]).name == "valid-00000002-ema"
    assert {path.name for path in Path(found["pictures"]).iterdir()} >= DRAWN[recipe]


@pytest.mark.parametrize("command", ["predict", "eval"])
def test_weights_that_the_run_does_not_keep_are_named(samewise, runs, command, tmp_path):
    file = [recording(tmp_path / "a.wav")] if command == "predict" else []
    done = samewise(command, runs["separation"], *file, "--weights", "ema")
    assert done.returncode == 2
    assert "--weights: the run does not have these weights" in done.stderr
    assert "no callback of the run keeps others" in done.stderr


def test_weights_that_do_not_fit_a_changed_model_are_named(samewise, runs):
    done = samewise("eval", runs["classification"], "model.width=4")
    assert done.returncode == 2
    assert "model: is not the one that the checkpoint was taken from: size mismatch for conv1.weight" in done.stderr


def test_a_recording_is_written_down(samewise, runs, tmp_path):
    (found,) = predicted(samewise, runs["speech_recognition"], recording(tmp_path / "said.wav", 4000), "--output", tmp_path)
    assert [Path(path).name for path in found["files"]] == ["said.txt", "said.png"]
    assert (tmp_path / "said.txt").read_text() == found["text"] + "\n"


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


def test_a_file_for_another_model_is_called_what_it_is_and_nothing_is_advised_against_it(samewise, runs, tmp_path):
    sound = recording(tmp_path / "x.wav")
    done = samewise("predict", runs["classification"], sound)
    assert done.returncode == 2
    assert "x.wav: is a WAV recording, not an image\n" in done.stderr
    assert "expected: an image: a JPEG, PNG" in done.stderr
    assert "remove" not in done.stderr
    assert "hint" not in done.stderr
    assert sound.exists()


def test_predicting_needs_no_data_set(samewise, runs, tmp_path):
    run = Path(shutil.copytree(runs["separation"], tmp_path / "run", symlinks=True))
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("samewise.datasets.generated_mixtures.GeneratedMixtures", "samewise.datasets.librimix.LibriMix"))
    assert predicted(samewise, run, recording(tmp_path / "a.wav"), "--trust")


def test_what_cannot_be_is_said(samewise, runs, tmp_path):
    sound = recording(tmp_path / "a.wav")
    done = samewise("predict", runs["separation"], sound, "--checkpoint", "77")
    assert done.returncode == 2
    assert "no such checkpoint" in done.stderr
    done = samewise("predict", runs["separation"], "seed=1")
    assert done.returncode == 2
    assert "no files to predict from" in done.stderr
    done = samewise("predict", runs["separation"], sound, "sede=1")
    assert done.returncode == 2
    assert "did you mean 'seed'" in done.stderr


def test_a_recipe_that_reads_files_and_does_not_say_what_it_predicts_is_named() -> None:
    with pytest.raises(ConfigError, match="Classification reads files, but has no `predict`"):
        Recipe.predict(Classification(), torch.nn.Identity(), {})
