"""The choices for separation: composed and built as in an experiment, and trained for a few steps on data in each layout."""

import json
from pathlib import Path

import pytest
import soundfile
import torch


def record(path: Path, waveform: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, waveform.numpy(), 8000)


@pytest.fixture
def mixtures(tmp_path: Path) -> Path:
    """Both layouts of generated mixtures below one folder."""
    splits = {"Libri2Mix/wav8k/min": ("mix_clean", ("train-360", "dev", "test")), "2speakers/wav8k/min": ("mix", ("tr", "cv", "tt"))}
    for top, (mixture, subsets) in splits.items():
        for subset in subsets:
            for number in range(4):
                one, other = 0.1 * torch.randn(2, 2000 + 100 * number)
                for part, waveform in ((mixture, one + other), ("s1", one), ("s2", other)):
                    record(tmp_path / top / subset / part / f"{number}.wav", waveform)
    return tmp_path


def show(samewise, *overrides: str) -> dict:
    done = samewise("show", *overrides, "--json")
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    return config.get("config", config)


def test_the_published_recipes_are_composed_as_published(samewise, mixtures):
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
