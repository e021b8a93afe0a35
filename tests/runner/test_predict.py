"""`samewise predict` applies a run's model to files: without its data, the same each time, and naming files that cannot be read."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from PIL import Image

SMALL = ["debug=tiny", "evaluate.pictures=false", "max_steps=2", "reproducibility.threads=1", "evaluate.every_epochs=null", "dataset.samples=16"]
EXPERIMENTS = {
    "classification": ["experiment=resnet18_digits", "model.width=8", "callbacks=[ema]", "callbacks.ema.every_steps=1"],
    "detection": ["experiment=retinanet_bccd", "batch_size=4", "dataset.valid_samples=4", "model.channels=32", "model.score_thresh=0", "callbacks=[ema]"],
    "instance_segmentation": ["experiment=maskrcnn_digit_masks", "batch_size=2", "dataset.valid_samples=2", "+model.box_score_thresh=0.0"],
    "segmentation": ["experiment=fcn_digit_masks", "dataset.valid_samples=4"],
    "speech_recognition": ["experiment=wav2letter_spoken_digits", "model.width=16", "model.top_width=32", "callbacks=none"],
    "audio_classification": ["experiment=audio_classification_spoken_digits", "model.width=4"],
    "autoencoder": ["experiment=autoencoder_digits", "model.widths=[4]", "model.variational=true"],
    "regression": ["experiment=linear_diabetes", "model.widths=[8]", "recipe.loss.delta=0.5", "loss=huber"],
    "text_classification": ["experiment=transformer_unicode_categories"],
    "language_modelling": ["experiment=gpt_unicode_names"],
    "separation": ["recipe=separation", "model=conv_tasnet_small", "transforms=none", "optimizer=adam", "callbacks=none", "dataset.valid_samples=4"],
    "vocoder": [
        *("recipe=vocoder", "model=wavernn_small", "transforms=mel_vocoder", "optimizer=adam", "callbacks=none", "dataset.clips=16", "dataset.valid_clips=4")
    ],
}


def overrides_of(recipe: str) -> list[str]:
    """The arguments for `samewise train`; for the vocoder's data `samples` is the length of a clip."""
    return [one for one in [*SMALL, *EXPERIMENTS[recipe]] if recipe != "vocoder" or one != "dataset.samples=16"]


DRAWN = {
    "classification": {"confusion_matrix.png", "predictions.png", "class_accuracy.csv"},
    "detection": {"detections.png", "precision_recall.png", "class_precision.csv"},
    "instance_segmentation": {"detections.png", "precision_recall.png", "class_precision.csv"},
    "segmentation": {"segmentations.png", "confusion_matrix.png", "class_iou.csv"},
    "speech_recognition": {"transcripts.csv", "spectrograms.png"},
    "audio_classification": {"confusion_matrix.png", "predictions.png", "class_accuracy.csv"},
    "autoencoder": {"reconstructions.png"},
    "regression": {"predictions.png"},
    "language_modelling": {"tokens.csv"},
    "text_classification": {"confusion_matrix.png", "predictions.csv", "class_accuracy.csv"},
    "separation": {"mixtures.csv", "spectrograms.png"},
    "vocoder": {"clip_0_true.wav", "clip_0_resynthesised.wav", "spectrograms.png"},
}
"""The files that an evaluation leaves to look at or listen to."""


class Runs(dict[str, Path]):
    """A trained run of each recipe that is asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __missing__(self, recipe: str) -> Path:
        from samewise.runner.cli import main

        root = self._factory.mktemp(recipe)
        assert main(["train", *overrides_of(recipe), "tracking=none", f"run_root={root}"]) == 0
        (self[recipe],) = root.glob("*/*/")
        return self[recipe]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def recording(path: Path, frames: int = 900) -> Path:
    soundfile.write(path, (0.1 * torch.randn(frames, generator=torch.Generator().manual_seed(0))).numpy(), 8000)
    return path


def predict(samewise, run: Path, *arguments: object) -> list[dict]:
    done = samewise("predict", run, *arguments, "--json", code=0)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("recipe", EXPERIMENTS)
def test_each_recipe_evaluates_again_to_the_same_values_with_its_pictures(samewise, runs, recipe, tmp_path):
    done = samewise("eval", runs[recipe], "--checkpoint", "last", "--json", "--pictures", tmp_path, code=0)
    found = json.loads(done.stdout)
    trained = json.loads((runs[recipe] / "summary.json").read_text())["metrics"]["final"]
    assert found["metrics"] == trained
    assert {path.name for path in tmp_path.iterdir()} >= DRAWN[recipe]


def test_an_image_is_classified_with_the_class_names_of_the_data_set(samewise, runs, tmp_path):
    Image.new("RGB", (40, 40), (200, 90, 10)).save(tmp_path / "a.png")
    (found,) = predict(samewise, runs["classification"], tmp_path / "a.png")
    shares = list(found["probabilities"].values())
    assert found["class"] == f"pattern {found['label']}" == next(iter(found["probabilities"]))
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1.00001
    (picture,) = found["files"]
    assert Path(picture).name == "a_class.png"
    with Image.open(picture) as drawn:
        assert drawn.size == (320, 320)
        assert drawn.convert("RGB").getpixel((319, 0)) == (200, 90, 10)


@pytest.mark.slow
def test_boxes_are_found_in_an_image_and_drawn(samewise, runs, tmp_path):
    Image.effect_noise((80, 64), 60).convert("RGB").save(tmp_path / "street.jpg")
    (found,) = predict(samewise, runs["detection"], tmp_path / "street.jpg", "--output", tmp_path)
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


@pytest.mark.parametrize("recipe", ["classification", pytest.param("detection", marks=pytest.mark.slow)])
def test_the_moving_average_of_the_weights_predicts_and_is_evaluated(samewise, runs, recipe, tmp_path):
    Image.effect_noise((80, 64), 60).convert("RGB").save(tmp_path / "a.png")
    one, other = (predict(samewise, runs[recipe], tmp_path / "a.png", *weights)[0] for weights in ([], ["--weights", "ema"]))
    assert one["files"] == other["files"]
    assert one != other
    done = samewise("eval", runs[recipe], "--weights", "ema", "--json", code=0)
    found = json.loads(done.stdout)
    trained = json.loads((runs[recipe] / "summary.json").read_text())["metrics"]["final"]
    assert found["metrics"] == {name: value for name, value in trained.items() if name.startswith("ema/")}
    assert Path(found["pictures"]).name == "valid-00000002-ema"
    assert {path.name for path in Path(found["pictures"]).iterdir()} >= DRAWN[recipe]


@pytest.mark.parametrize("command", ["predict", "eval"])
def test_weights_that_the_run_does_not_keep_are_refused(samewise, runs, command, tmp_path):
    file = [recording(tmp_path / "a.wav")] if command == "predict" else []
    done = samewise(command, runs["separation"], *file, "--weights", "ema", code=2)
    assert "--weights: the run does not have these weights" in done.stderr
    assert "no callback of the run keeps others" in done.stderr


def test_an_image_is_reconstructed_and_its_code_is_a_row(samewise, runs, tmp_path):
    Image.new("L", (8, 8), 200).save(tmp_path / "a.png")
    (found,) = predict(samewise, runs["autoencoder"], tmp_path / "a.png", "--output", tmp_path, "--out", tmp_path / "codes.csv")
    assert [Path(path).name for path in found["files"]] == ["a_reconstruction.png"]
    with open(tmp_path / "codes.csv") as table:
        (row,) = csv.DictReader(table)
    assert [float(row[f"code_{number}"]) for number in range(8)] == pytest.approx(found["code"])


def test_a_recording_is_transcribed(samewise, runs, tmp_path):
    (found,) = predict(samewise, runs["speech_recognition"], recording(tmp_path / "said.wav", 4000), "--output", tmp_path)
    assert [Path(path).name for path in found["files"]] == ["said.txt", "said.png"]
    assert (tmp_path / "said.txt").read_text() == found["text"] + "\n"


def test_a_recording_is_classified_with_the_class_names_of_the_data_set(samewise, runs, tmp_path):
    long, short = recording(tmp_path / "a.wav", 4000), recording(tmp_path / "b.wav", 300)
    for found in predict(samewise, runs["audio_classification"], long, short):
        assert found["class"] == f"tone {found['label']}" == next(iter(found["probabilities"]))
        assert found["files"] == []


def test_a_text_is_classified_the_same_beside_a_longer_one(samewise, runs, tmp_path):
    for name, text in {"a": "a river knows the dog", "b": "a house follows the teacher in the morning."}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    together = predict(samewise, runs["text_classification"], tmp_path, "--batch", 2)
    (alone,) = predict(samewise, runs["text_classification"], tmp_path / "a.txt")
    assert alone["class"] in ("cat", "dog", "bird", "child", "farmer", "teacher", "river", "mountain", "house", "tree")
    assert together[0]["probabilities"] == pytest.approx(alone["probabilities"], rel=1e-5)


def test_each_row_of_a_table_is_classified_as_the_same_text_in_a_file(samewise, runs, tmp_path):
    texts = ["a river knows the dog", "a house follows, and the teacher sings", "tree"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "a.csv").write_text("sentence\n" + "".join(f'"{text}"\n' for text in texts))
    (tmp_path / "b.jsonl").write_text(json.dumps({"sentence": texts[2]}) + "\n")
    alone = predict(samewise, runs["text_classification"], tmp_path)
    given = [tmp_path / "a.csv", tmp_path / "0.txt", tmp_path / "b.jsonl", "recipe.reads.text=sentence", "--batch", 3, "--output", tmp_path / "out.csv"]
    together = predict(samewise, runs["text_classification"], *given)
    with open(tmp_path / "out.csv", newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(Path(row["file"]).name, row["row"]) for row in rows] == [("a.csv", "1"), ("a.csv", "2"), ("a.csv", "3"), ("0.txt", ""), ("b.jsonl", "1")]
    assert [row["class"] for row in rows] == [alone[number]["class"] for number in (0, 1, 2, 0, 2)]
    assert [float(row["probability"]) for row in rows] == [max(alone[number]["probabilities"].values()) for number in (0, 1, 2, 0, 2)]
    assert [row["row"] for row in together[0]["rows"]] == [1, 2, 3]
    done = samewise("predict", runs["text_classification"], tmp_path / "a.csv", "a river " * 40, code=2)
    assert "a.csv:2: has no column 'text', only sentence" in done.stderr
    assert "cannot be read: File name too long; hint: predict takes the names of files: texts" in done.stderr


def test_a_text_is_continued_the_same_beside_others(samewise, runs, tmp_path):
    for name, text in {"a": "LATIN SMALL LETTER", "b": "GREEK SMALL LETTER\n"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    together = predict(samewise, runs["language_modelling"], tmp_path, "--batch", 2, "recipe.continuation=6")
    (alone,) = predict(samewise, runs["language_modelling"], tmp_path / "a.txt", "--output", tmp_path / "out", "recipe.continuation=6")
    assert together[0]["text"] == alone["text"] != ""
    assert (tmp_path / "out" / "a.txt").read_text() == alone["text"] + "\n"
    (tmp_path / "a.txt").write_text("LATIN [MASK]MALL LETTE[MASK]")
    (filled,) = predict(samewise, runs["language_modelling"], tmp_path / "a.txt", "recipe.objective=masked")
    assert [len(mask) for mask in filled["masks"]] == [5, 5]
    assert filled["text"] == "LATIN {}MALL LETTE{}".format(*(mask[0]["text"] for mask in filled["masks"]))


def test_a_recording_is_split_into_its_speakers(samewise, runs, tmp_path):
    (found,) = predict(samewise, runs["separation"], recording(tmp_path / "both.wav"), "--output", tmp_path / "out")
    assert (found["speakers"], found["seconds"]) == (2, 0.113)
    assert [Path(path).name for path in found["files"]] == ["both_speaker_1.wav", "both_speaker_2.wav", "both_spectrograms.png"]
    assert all(len(soundfile.read(path)[0]) == 900 for path in found["files"][:2])


@pytest.mark.slow
def test_a_recording_is_resynthesised_the_same_whatever_other_files_are_given(samewise, runs, tmp_path):
    one, other = recording(tmp_path / "a.wav"), recording(tmp_path / "b.wav", 500)
    (alone,) = predict(samewise, runs["vocoder"], one)
    alone_samples = soundfile.read(alone["files"][0])[0]
    assert len(alone_samples) == 900
    assert Path(alone["files"][0]).parent == runs["vocoder"] / "predictions"
    together = predict(samewise, runs["vocoder"], other, one)
    assert [Path(found["file"]).name for found in together] == ["b.wav", "a.wav"]
    assert (soundfile.read(together[1]["files"][0])[0] == alone_samples).all()


def test_an_unreadable_file_is_named_and_the_others_are_predicted(samewise, runs, tmp_path):
    (tmp_path / "no.wav").write_bytes(b"no sound, only words" * 20)
    sound = recording(tmp_path / "yes.wav")
    done = samewise("predict", runs["separation"], tmp_path / "no.wav", tmp_path / "missing.wav", sound, "--json", code=2)
    assert "no.wav: is a text file, not a recording" in done.stderr
    assert "missing.wav: cannot be read" in done.stderr
    assert [json.loads(line)["file"] for line in done.stdout.splitlines()] == [str(sound)]


@pytest.mark.parametrize("recipe", ["separation", "speech_recognition", "audio_classification"])
def test_an_output_that_is_not_a_number_is_no_prediction(samewise, runs, tmp_path, recipe):
    diverged, sound = tmp_path / "run", recording(tmp_path / "a.wav", 4000)
    shutil.copytree(runs[recipe], diverged)
    for path in diverged.glob("checkpoints/*/state.pt"):
        spoil(path)
    done = samewise("predict", diverged, sound, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{sound}: the model's output is not a number (NaN)" in done.stderr


def spoil(path: Path) -> None:
    """Make all weights of a checkpoint NaN, with the right digest."""
    state = torch.load(path, weights_only=True)
    for values in state["model"].values():
        if values.is_floating_point():
            values.fill_(torch.nan)
    torch.save(state, path)
    manifest = path.with_name("manifest.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}))


@pytest.fixture
def photographs(tmp_path) -> Path:
    """b.png, 7.png and below/a.JPG, a note, a hidden file."""
    folder = tmp_path / "photographs"
    (folder / "below").mkdir(parents=True)
    for number, name in enumerate(("b.png", "7.png", "below/a.JPG", ".hidden.png")):
        Image.effect_noise((60, 50 + number), 60).convert("RGB").save(folder / name)
    (folder / "notes.txt").write_text("of the street")
    return folder


def test_all_predictions_can_be_written_to_one_file_as_json_csv_or_coco(samewise, runs, photographs, tmp_path):
    run = runs["detection"]
    (run / "predictions").mkdir(exist_ok=True)
    before = sorted((run / "predictions").iterdir())
    found = predict(samewise, run, photographs, "--out", tmp_path / "all.json", "--out", tmp_path / "all.csv", "--threshold", "0.005")
    assert json.loads((tmp_path / "all.json").read_text()) == found
    assert sorted((run / "predictions").iterdir()) == before, "pictures are for --output FOLDER"
    boxes = [(one["file"], box) for one in found for box in one["detections"]]
    assert boxes
    with open(tmp_path / "all.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    columns = ("x1", "y1", "x2", "y2")
    assert tuple(rows[0]) == ("file", "label", "class", "score", *columns)
    assert [(row["file"], row["class"], [float(row[edge]) for edge in columns]) for row in rows] == [(file, box["class"], box["box"]) for file, box in boxes]
    done = samewise("predict", run, photographs, "--out", tmp_path / "coco.json", "--format", "coco", "--threshold", "0.005")
    assert done.stdout == f"{tmp_path / 'coco.json'}: 3 of 3 files\n"
    results = json.loads((tmp_path / "coco.json").read_text())
    assert [one["image_id"] for one in results] == [7 if Path(file).stem == "7" else Path(file).stem for file, _ in boxes]
    for one, (_, box) in zip(results, boxes, strict=True):
        assert set(one) == {"image_id", "category_id", "bbox", "score"}
        x, y, width, height = one["bbox"]
        assert (one["category_id"], one["score"]) == (box["label"], box["score"])
        assert [x, y, x + width, y + height] == pytest.approx(box["box"])


@pytest.mark.parametrize("recipe", ["classification", "detection"])
def test_a_batch_predicts_the_same_and_a_bad_file_spoils_no_other(samewise, runs, photographs, recipe):
    alone = predict(samewise, runs[recipe], photographs)
    done = samewise("predict", runs[recipe], photographs, photographs / "notes.txt", "--batch", "3", "--json")
    assert "notes.txt: is a text file, not an image" in done.stderr
    together = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["file"] for one in together] == [one["file"] for one in alone]
    for one, other in zip(together, alone, strict=True):
        if recipe == "classification":
            assert one["probabilities"] == pytest.approx(other["probabilities"])
        else:
            assert [box["score"] for box in one["detections"][:3]] == pytest.approx([box["score"] for box in other["detections"][:3]], rel=1e-4)


def file_for(recipe: str, folder: Path) -> Path:
    draw = torch.Generator().manual_seed(3)
    if recipe == "regression":
        (folder / "seen.csv").write_text("a,b,c,d\n1,2,3,4\n5,6,7,8\n")
        return folder / "seen.csv"
    if recipe in ("classification", "detection", "autoencoder"):
        size = (64, 48, 3) if recipe == "detection" else (8, 8)
        Image.fromarray(torch.randint(256, size, dtype=torch.uint8, generator=draw).numpy()).save(folder / "seen.png")
        return folder / "seen.png"
    soundfile.write(folder / "heard.wav", (0.1 * torch.randn(900, generator=draw)).numpy(), 8000)
    return folder / "heard.wav"


class Server:
    """`mlflow models serve` of a model, as a person starts it in an activated environment."""

    def __init__(self, model: str, store: str, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        tools = Path(sys.executable).parent
        environment = {**os.environ, "MLFLOW_TRACKING_URI": store, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = [str(tools / "mlflow"), "models", "serve", "-m", model, "--env-manager", "local", "--port", str(port)]
        self.said = home / "served.log"
        with open(self.said, "w") as said:
            self._process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/ping", timeout=2):
                    return self
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise AssertionError(self.said.read_text()[-3000:])

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(30)

    def ask(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.address}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["predictions"]
        except urllib.error.HTTPError as error:
            return json.load(error)


SERVED_OFTEN = ("classification", "detection", "vocoder")
"""One array, several arrays, and several models: the others are served by the long tests."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param(one, marks=() if one in SERVED_OFTEN else pytest.mark.long) for one in EXPERIMENTS])
def test_a_logged_model_of_each_recipe_answers_like_samewise_predict(samewise, recipe: str, tmp_path: Path) -> None:
    given = overrides_of(recipe)
    samewise("train", *given, "tracking.log_model=true", "tracking.register_model=tried", "tracking.flush_timeout_s=120", f"run_root={tmp_path}", code=0)
    (run,) = (file.parent for file in tmp_path.glob("*/*/summary.json"))
    known = json.loads((run / "tracking.json").read_text())
    assert known["registered"] == {"tried": "1"}, (run / "sender.log").read_text()
    (model,) = tmp_path.glob("mlartifacts/models/*/artifacts")
    assert not [file.name for file in model.rglob("*") if file.suffix in (".pkl", ".py")]

    file = file_for(recipe, tmp_path)
    said = samewise("predict", run, file, "--json", "--output", tmp_path / "out")
    expected = json.loads(said.stdout)
    written = [Path(one) for one in expected.pop("files")]
    del expected["file"]
    row = {"file": base64.b64encode(file.read_bytes()).decode(), "name": file.name}
    with Server("models:/tried/1", f"sqlite:///{tmp_path}/mlflow.db", tmp_path) as server:
        assert server.ask({"dataframe_records": [row]}) == [expected]
        both = server.ask({"dataframe_records": [row, {"file": row["file"]}], "params": {"files": True}})
        sounds = {one.name.replace(file.stem, "file"): one.read_bytes() for one in written if one.suffix == ".wav"}
        for answer in both:
            files = {name: base64.b64decode(content) for name, content in answer.pop("files").items()}
            assert len(files) == len(written)
            assert sounds.items() <= files.items()
            assert answer == expected
        refused = server.ask({"dataframe_records": [{"file": "AAAA", "name": "../../broken.x"}]})
        assert refused["error_code"] == "INVALID_PARAMETER_VALUE"
        assert "broken.x: " in refused["message"]
        if recipe == "regression":
            return  # samewise knows no column of a table to give as an example
        example = json.loads((model / "serving_input_example.json").read_text())
        answer = server.ask(example)
        assert isinstance(answer, list) or "silence.wav" in answer["message"], answer
