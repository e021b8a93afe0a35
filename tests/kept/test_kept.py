"""A change of the code's structure changes no config and no bit; and under `debug=tiny` every experiment trains without diverging."""

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samewise_kept_kept as kept

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project

QUICK = ("resnet_cifar10", "wavernn_spoken_digits")
OF_OTHER_RECIPES = ("conv_tasnet_spoken_digits", "retinanet_bccd", "wav2letter_spoken_digits")
"""Which run with the oldest and the newest packages, too."""
LONG = (
    *("conv_tasnet_libri2mix", "conv_tasnet_wsj0_2mix", "bert_sst2", "gpt_shakespeare", "resnet50_fine_tuned", "resnet50_imagenet", "resnet_cifar10_paper"),
    *("deeplabv3_coco", "maskrcnn_coco", "retinanet_coco", "wav2letter_librispeech", "wavernn_libritts", "wavernn_ljspeech"),
)
"""Very similar to another experiment of the same recipe that is tested."""


def marked(experiment: str) -> Any:
    """With the marks of the suite that tests it."""
    marks = [] if experiment in QUICK else [pytest.mark.slow, *([pytest.mark.long] if experiment in LONG else [])]
    marks += [pytest.mark.oldest] if experiment in OF_OTHER_RECIPES else []
    return pytest.param(experiment, marks=marks)


KEPT = json.loads(kept.FILE.read_text())


@pytest.mark.parametrize("experiment", kept.EXPERIMENTS)
def test_show_prints_the_same_as_before(experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert kept.shown(experiment) == KEPT["show"][experiment]


@pytest.mark.parametrize("experiment", kept.EXPERIMENTS)
def test_a_reduced_experiment_has_the_same_fingerprint_as_before(experiment: str, tmp_path: Path) -> None:
    _, *overrides = kept.command(experiment, tmp_path)
    assert compose(overrides, project=Project(tmp_path)).fingerprint == KEPT["fingerprints"][experiment]


@pytest.mark.parametrize("experiment", [marked(name) for name in kept.EXPERIMENTS])
def test_a_reduced_experiment_does_not_diverge_and_keeps_its_bits(experiment: str, samewise: Callable[..., Any], tmp_path: Path) -> None:
    samewise(*kept.command(experiment, tmp_path), code=0)
    (journal,) = tmp_path.glob("*/*/metrics.jsonl")
    logged = [json.loads(line).get("metrics", {}) for line in journal.read_text().splitlines()]
    names = {name for metrics in logged for name in metrics if name.startswith("train/") and name.endswith("loss")}
    assert names
    (steps,) = [int(x.removeprefix("max_steps=")) for x in kept.SMALLER.get(experiment, ()) if x.startswith("max_steps=")] or [20]
    for name in names:
        losses = [metrics[name] for metrics in logged if name in metrics]
        assert len(losses) == steps
        assert statistics.mean(losses[-5:]) < statistics.mean(losses[:5]) + 0.5, losses
        assert max(losses) < max(losses[:3]) + 3.0, losses
    final = [metrics["valid/loss"] for metrics in logged if "valid/loss" in metrics][-1:]
    # A sum over an image's pixels begins above ten
    assert all(loss < max(10.0, *losses) for loss in final), final

    fingerprint, came_to = kept.reduced(tmp_path)
    assert fingerprint == KEPT["fingerprints"][experiment]
    if (before := (kept.trained_here(KEPT, tmp_path) or {}).get(experiment)) is None:
        pytest.skip("kept.json has no bits of a machine such as this one")
    assert came_to == before


SETTINGS = [
    *("experiment=resnet_cifar10", "debug=tiny", "model.width=2", "callbacks=[default,ema]", "tracking=none", "evaluate.pictures=false"),
    *("checkpoint.keep_last=2", "checkpoint.keep_best=0"),
]
"""The settings of the run in `run/`."""


@pytest.fixture
def old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that an older version trained, with checkpoints at steps 16 and 20, in the place where the command that trained it finds it."""
    folder = tmp_path / "runs" / "kept" / "727bd557308e"
    shutil.copytree(kept.FILE.parent / "run", folder, symlinks=True)
    monkeypatch.chdir(tmp_path)
    return folder


def test_an_old_run_counts_as_finished_and_evaluates_as_before(old_run: Path, samewise: Callable[..., Any]) -> None:
    done = samewise("train", *SETTINGS, "name=kept", code=0)
    assert "nothing to train" in done.stdout
    done = samewise("eval", old_run, "--json", "--trust", code=0)
    before = json.loads((old_run / "summary.json").read_text())["metrics"]["final"]
    assert json.loads(done.stdout)["metrics"]["valid/loss"] == pytest.approx(before["valid/loss"], rel=1e-3)


def test_an_old_run_trains_again_to_the_same_bits(old_run: Path, samewise: Callable[..., Any]) -> None:
    done = samewise("verify", old_run, "--trust")
    if "not comparable" in done.stdout + done.stderr:
        pytest.skip("this machine's bits are others than those of the one that trained the run")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_old_run_can_be_resumed(old_run: Path, samewise: Callable[..., Any]) -> None:
    before = json.loads((old_run / "summary.json").read_text())
    (old_run / "summary.json").unlink()
    shutil.rmtree(old_run / "checkpoints" / "step-00000020")
    samewise("train", *SETTINGS, "name=kept", "reproducibility.other_environment=record", code=0)
    after = json.loads((old_run / "summary.json").read_text())
    assert after["steps"] == 20
    if after["level"] != before["level"]:
        pytest.skip("this machine's bits are others than those of the one that trained the run")
    assert after["weights_sha256"] == before["weights_sha256"]


SWEEP = [
    *("model=resnet20_cifar", "model.depth=8", "model.width=1", "dataset=digits", "transforms=images", "debug=tiny", "tracking=none"),
    *("evaluate.pictures=false", "callbacks=none", "max_steps=2", "name=kept", "optimizer.lr=0.1,0.2", "dataset.image_size=32"),
]
"""The overrides of the sweep in `sweep/`, when debug=tiny set the size of every data set."""


def test_an_old_sweep_is_shown_and_reported_and_nothing_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samewise: Callable[..., Any]) -> None:
    shutil.copytree(kept.FILE.parent / "sweep", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    done = samewise("sweep", "kept-516bb63f", "--status", "--trust", code=0)
    assert "kept-516bb63f: 2 finished" in done.stdout
    done = samewise("report", "kept-516bb63f", "--json", code=0)
    assert "0.2" in done.stdout
    done = samewise("sweep", *SWEEP, "--trust", code=0)
    assert "kept-516bb63f: 2 points, 0 to run" in done.stderr


def test_an_old_bundle_is_checked_and_described(samewise: Callable[..., Any]) -> None:
    done = samewise("reproduce", kept.FILE.parent / "result.bundle", code=4)  # without samewise's own code, to be small
    assert "parts match the manifest; identity f94ccf1ded74ee51" in done.stderr
    assert "is intact" in done.stderr
    assert "2 steps, level R2" in done.stderr
