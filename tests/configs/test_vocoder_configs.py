"""The choices for vocoders: composed as published, and trained for a few steps on data in each layout."""

import json
from pathlib import Path

import pytest
import soundfile
import torch

EXPERIMENTS = ["wavernn_ljspeech", "wavernn_libritts", "wavernn_spoken_digits"]
SOME = [EXPERIMENTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS[1:])]
SMALL = ["tracking=none", "evaluate.pictures=false", "loader.num_workers=0", "reproducibility.threads=1"]
NARROW = ["model.n_res_block=1", "model.n_rnn=16", "model.n_fc=16", "model.n_hidden=8", "model.n_output=8"]
FEW = ["batch_size=2", "max_steps=2", "evaluate.batch_size=2", "recipe.resynthesise=0"]


def record(path: Path, rate: int, frames: int = 4000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, (0.1 * torch.randn(frames)).numpy(), rate)


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """LJSpeech, LibriTTS and spoken digits below one folder."""
    names = [f"LJ001-{number:04d}" for number in range(1, 11)]
    for name in names:
        record(tmp_path / "LJSpeech-1.1" / "wavs" / f"{name}.wav", 22050)
    (tmp_path / "LJSpeech-1.1" / "metadata.csv").write_text("".join(f"{name}|Text|Text\n" for name in names))
    for subset in ("train-clean-100", "dev-clean", "test-clean"):
        for number in range(3):
            record(tmp_path / "LibriTTS" / subset / "1" / "2" / f"{number}.wav", 24000)
    for take in (0, 1, 5, 6, 17):
        record(tmp_path / f"3_jackson_{take}.wav", 8000)
        record(tmp_path / f"3_theo_{take}.wav", 8000)
    return tmp_path


def test_the_published_recipes_are_composed_as_published(samewise, recordings):
    for experiment in EXPERIMENTS[:2]:
        done = samewise("show", f"experiment={experiment}", f"dataset.root={recordings}", "--json")
        assert done.returncode == 0, done.stderr
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
def test_each_experiment_trains_on_data_in_its_layout(samewise, recordings, tmp_path, experiment, output):
    root = f"dataset.root={recordings}"
    done = samewise("train", f"experiment={experiment}", root, f"run_root={tmp_path}/runs", *SMALL, *NARROW, *FEW, *output, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
