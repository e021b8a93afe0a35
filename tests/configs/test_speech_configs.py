"""The choices for speech recognition: composed and built as in an experiment, and train for a few steps on data in each layout."""

import json
from pathlib import Path

import pytest
import soundfile
import torch

PUBLISHED = ["experiment=wav2letter_librispeech", "tracking=none", "evaluate.pictures=false", "callbacks=none", "loader.num_workers=0"]
# As published except for the size: the same layers, but narrower.
NARROW = ["model=wav2letter_small", "model.norm=none", "model.width=8", "model.top_width=16", "batch_size=2", "max_steps=2"]


@pytest.fixture
def train(samewise, tmp_path):
    """Trains to the end and returns the run's summary."""

    def train_to_end(*overrides: str) -> dict:
        done = samewise("train", f"run_root={tmp_path}/runs", "tracking=none", "evaluate.pictures=false", "callbacks=none", *overrides, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return train_to_end


def record(path: Path, seconds: float, rate: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, (0.3 * torch.sin(torch.arange(round(seconds * rate)) * 0.3)).numpy(), rate)


@pytest.fixture
def librispeech(tmp_path: Path) -> Path:
    for number, subset in enumerate(("train-clean-100", "train-clean-360", "train-other-500", "dev-clean", "test-clean")):
        folder = tmp_path / "LibriSpeech" / subset / str(number) / "7"
        for utterance in range(2):
            record(folder / f"{number}-7-{utterance:04d}.flac", 0.4 + 0.1 * utterance, 16000)
        (folder / f"{number}-7.trans.txt").write_text(f"{number}-7-0000 A BALL\n{number}-7-0001 IT'S\n")
    return tmp_path


def test_the_published_recipe_is_composed_as_published(samewise, librispeech):
    shown = samewise("show", *PUBLISHED, f"dataset.root={librispeech}", "--json")
    assert shown.returncode == 0, shown.stderr
    config = json.loads(shown.stdout)
    config = config.get("config", config)
    assert config["model"] == {"_target_": "torchaudio.models.Wav2Letter", "num_classes": 29, "input_type": "mfcc", "num_features": 13}
    assert {name: config["optimizer"][name] for name in ("lr", "rho", "eps", "weight_decay")} == {"lr": 0.6, "rho": 0.95, "eps": 1e-8, "weight_decay": 1e-5}
    assert (config["batch_size"], config["max_epochs"], config["scheduler"]["patience"], config["scheduler"]["threshold"]) == (128, 40, 10, 1e-3)
    assert config["dataset"]["train"]["subsets"] == ["train-clean-100", "train-clean-360", "train-other-500"]
    front = config["transforms"]["train"]["batch"]
    assert [(part["n_mfcc"], part["n_mels"], part["n_fft"], part["hop_length"], part["sample_rate"]) for part in front] == [(13, 13, 400, 160, 16000)]


@pytest.mark.slow
def test_the_published_recipe_passes_the_check(samewise, librispeech):
    checked = samewise("check", *PUBLISHED, f"dataset.root={librispeech}", "batch_size=6")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("transforms", ["mfcc_augmented", "waveform"])
def test_a_few_steps_train_on_data_in_librispeechs_layout(train, librispeech, transforms):
    summary = train(*PUBLISHED, *NARROW, f"transforms={transforms}", f"dataset.root={librispeech}")
    assert summary["steps"] == 2
