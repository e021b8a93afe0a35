"""The choices for speech recognition, separation and vocoders: composed as published, and trained for a few steps on data in each layout."""

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
        done = samewise("train", f"run_root={tmp_path}/runs", "tracking=none", "evaluate.pictures=false", "callbacks=none", *overrides, "--json", code=0)
        return json.loads(done.stdout.splitlines()[-1])

    return train_to_end


def record(path: Path, waveform: torch.Tensor, rate: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, waveform.numpy(), rate)


@pytest.fixture
def librispeech(tmp_path: Path) -> Path:
    for number, subset in enumerate(("train-clean-100", "train-clean-360", "train-other-500", "dev-clean", "test-clean")):
        folder = tmp_path / "LibriSpeech" / subset / str(number) / "7"
        for utterance in range(2):
            record(folder / f"{number}-7-{utterance:04d}.flac", 0.3 * torch.sin(torch.arange(6400 + 1600 * utterance) * 0.3), 16000)
        (folder / f"{number}-7.trans.txt").write_text(f"{number}-7-0000 A BALL\n{number}-7-0001 IT'S\n")
    return tmp_path


def test_the_published_recipe_is_composed_as_published(samewise, librispeech):
    shown = samewise("show", *PUBLISHED, f"dataset.root={librispeech}", "--json", code=0)
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
    samewise("check", *PUBLISHED, f"dataset.root={librispeech}", "batch_size=6", code=0)


@pytest.mark.parametrize("transforms", ["mfcc_augmented", "waveform"])
def test_a_few_steps_train_on_data_in_librispeechs_layout(train, librispeech, transforms):
    summary = train(*PUBLISHED, *NARROW, f"transforms={transforms}", f"dataset.root={librispeech}")
    assert summary["steps"] == 2


@pytest.fixture
def mixtures(tmp_path: Path) -> Path:
    """Both layouts of generated mixtures below one folder."""
    splits = {"Libri2Mix/wav8k/min": ("mix_clean", ("train-360", "dev", "test")), "2speakers/wav8k/min": ("mix", ("tr", "cv", "tt"))}
    for top, (mixture, subsets) in splits.items():
        for subset in subsets:
            for number in range(4):
                one, other = 0.1 * torch.randn(2, 2000 + 100 * number)
                for part, waveform in ((mixture, one + other), ("s1", one), ("s2", other)):
                    record(tmp_path / top / subset / part / f"{number}.wav", waveform, 8000)
    return tmp_path


def show(samewise, *overrides: str) -> dict:
    done = samewise("show", *overrides, "--json", code=0)
    config = json.loads(done.stdout)
    return config.get("config", config)


def test_separation_is_composed_as_published(samewise, mixtures):
    network = {"enc_kernel_size": 16, "enc_num_feats": 512, "msk_kernel_size": 3, "msk_num_feats": 128, "msk_num_hidden_feats": 512}
    for experiment, batch_size, epochs, seconds, patience, activation in (
        ("conv_tasnet_libri2mix", 12, 200, 3.0, 5, "relu"),
        ("conv_tasnet_wsj0_2mix", 16, 100, 4.0, 3, "sigmoid"),
    ):
        config = show(samewise, f"experiment={experiment}", f"dataset.root={mixtures}")
        assert config["model"].items() >= {**network, "num_sources": 2, "msk_num_layers": 8, "msk_num_stacks": 3, "msk_activate": activation}.items()
        assert (config["batch_size"], config["max_epochs"], config["clip_norm"], config["optimizer"]["lr"]) == (batch_size, epochs, 5.0, 1e-3)
        assert (config["scheduler"]["factor"], config["scheduler"]["patience"]) == (0.5, patience)
        assert (config["dataset"]["train"]["seconds"], config["dataset"]["valid"].get("seconds")) == (seconds, None)
        stopping = config["callbacks"].get("early_stopping")
        assert (stopping and stopping["patience"]) == (30 if experiment == "conv_tasnet_libri2mix" else None)


EXPERIMENTS = ["wavernn_ljspeech", "wavernn_libritts", "wavernn_spoken_digits"]
SOME = [EXPERIMENTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS[1:])]
SMALL = ["tracking=none", "evaluate.pictures=false", "loader.num_workers=0", "reproducibility.threads=1"]
NARROW_WAVERNN = ["model.n_res_block=1", "model.n_rnn=16", "model.n_fc=16", "model.n_hidden=8", "model.n_output=8"]
FEW = ["batch_size=2", "max_steps=2", "evaluate.batch_size=2", "recipe.resynthesise=0"]


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """LJSpeech, LibriTTS and spoken digits below one folder."""
    noise = 0.1 * torch.randn(4000)
    names = [f"LJ001-{number:04d}" for number in range(1, 11)]
    for name in names:
        record(tmp_path / "LJSpeech-1.1" / "wavs" / f"{name}.wav", noise, 22050)
    (tmp_path / "LJSpeech-1.1" / "metadata.csv").write_text("".join(f"{name}|Text|Text\n" for name in names))
    for subset in ("train-clean-100", "dev-clean", "test-clean"):
        for number in range(3):
            record(tmp_path / "LibriTTS" / subset / "1" / "2" / f"{number}.wav", noise, 24000)
    for take in (0, 1, 5, 6, 17):
        record(tmp_path / f"3_jackson_{take}.wav", noise, 8000)
        record(tmp_path / f"3_theo_{take}.wav", noise, 8000)
    return tmp_path


def test_vocoders_are_composed_as_published(samewise, recordings):
    for experiment in EXPERIMENTS[:2]:
        done = samewise("show", f"experiment={experiment}", f"dataset.root={recordings}", "--json", code=0)
        config = json.loads(done.stdout)
        config = config.get("config", config)
        wanted = {"n_classes": 256, "hop_length": 275, "n_res_block": 10, "n_rnn": 512, "n_fc": 512, "kernel_size": 5, "n_freq": 80}
        assert config["model"].items() >= {**wanted, "upsample_scales": [5, 5, 11], "n_hidden": 128, "n_output": 128}.items()
        (front_end,) = config["transforms"]["train"]["batch"]
        assert front_end.items() >= {"sample_rate": 22050, "n_fft": 2048, "win_length": 1100, "hop_length": 275, "f_min": 40.0, "n_mels": 80}.items()
        assert (config["dataset"]["train"]["samples"], config["batch_size"], config["max_epochs"]) == (1375, 256, 10000)
        assert (config["optimizer"]["lr"], config["clip_norm"], config["optimizer"]["_target_"]) == (1e-4, 4.0, "torch.optim.Adam")


@pytest.mark.slow
@pytest.mark.parametrize("output", [["recipe.output=mu_law"], ["recipe.output=logistics", "recipe.n_classes=30"]])
@pytest.mark.parametrize("experiment", SOME)
def test_each_vocoder_trains_on_data_in_its_layout(samewise, recordings, tmp_path, experiment, output):
    root = f"dataset.root={recordings}"
    done = samewise("train", f"experiment={experiment}", root, f"run_root={tmp_path}/runs", *SMALL, *NARROW_WAVERNN, *FEW, *output, "--json", code=0)
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
