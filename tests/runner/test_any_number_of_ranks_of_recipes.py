"""The promise of strategy=elastic for recipes at reduced size: the same bits on 1, 2 and 4 processes, killed or not."""

import json
import signal

import pytest
from samewise_runner_jobs import Job, assert_same, run
from samewise_tiny import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMON = [*QUIET, "replicas=4", "max_steps=12", "reproducibility.threads=1", "strategy=elastic", "strategy.bucket_mb=0.1"]
LOSS_FALLS_NEVER = [
    *("scheduler=plateau", "~scheduler.pct_start", "~scheduler.cycle_momentum", "scheduler.metric=valid/loss", "scheduler.mode=min", "scheduler.patience=0"),
    *("scheduler.threshold=1", "scheduler.factor=0.5"),
]
PARTIAL = "loader.drop_last=false"
EMA = ["callbacks=ema", "callbacks.ema.every_steps=2"]
SMALL = {
    # batch norm, bf16, an average of weights; an epoch's last batch of 2 samples leaves replicas without any
    "classification": ["experiment=resnet18_digits", "model.width=8", "dataset.samples=34", "precision=bf16", "evaluate.every_epochs=4", *EMA, PARTIAL],
    # zero to three targets per image, batch norm, clipping, micro-batches; the last batch of 5 images is cut unevenly
    "detection": [
        *("experiment=retinanet_coco", "transforms=detection_flips", "model.channels=16", "dataset.samples=37", "batch_size=8", "accumulate=2"),
        *("clip_norm=1.0", "memory_format=channels_last", "evaluate.every_epochs=2", PARTIAL),
    ],
    # utterances and transcripts of many lengths, clipping, micro-batches, plateau; the last batch leaves micro-batches without samples
    "speech_recognition": [
        *("experiment=wav2letter_spoken_digits", "model.width=16", "model.top_width=32", "dataset.samples=53", "accumulate=2", "clip_norm=0.5"),
        *(*LOSS_FALLS_NEVER, PARTIAL),
    ],
    # recurrent layers, batch norm, bf16, plateau
    "vocoder": ["experiment=wavernn_spoken_digits", "dataset.samples=100", "dataset.valid_samples=200", "precision=bf16", *LOSS_FALLS_NEVER],
    # dropout, columns that each rank standardises, a partial batch
    "regression": ["experiment=linear_diabetes", "model.widths=[8]", "model.dropout=0.2", "loss=l1", "dataset.samples=53", "batch_size=16", PARTIAL],
    # texts of many lengths, dropout, a partial batch
    "text_classification": ["experiment=transformer_unicode_categories", "model.dropout=0.1", "dataset.samples=53", "accumulate=2", PARTIAL],
    # masks and dropout drawn, clipping, micro-batches, a partial batch
    "language_modelling": ["experiment=gpt_unicode_names", "recipe.objective=masked", "model.dropout=0.1", "dataset.samples=53", "accumulate=2", PARTIAL],
    # noise in the model, a partial batch
    "autoencoder": ["experiment=vae_mnist", "dataset.samples=53", "batch_size=16", PARTIAL],
    # the permutation found for each mixture, clipping, an average of weights, a partial batch
    "separation": ["experiment=conv_tasnet_spoken_digits", "dataset.samples=54", "clip_norm=0.5", *EMA, PARTIAL],
}

KILLED_OFTEN = ("classification",)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("recipe", [pytest.param(one, marks=pytest.mark.long if one in KILLED_OFTEN else ()) for one in SMALL])
def test_every_recipe_gives_the_same_bits_on_any_number_of_ranks(recipe, ranks, tmp_path):
    """The others are killed on 4 and on 2 ranks, and finish on 1, below."""
    require_same(tmp_path, recipe, (ranks,))


@pytest.mark.parametrize("recipe", [pytest.param(one, marks=() if one in KILLED_OFTEN else pytest.mark.long) for one in SMALL])
def test_every_recipe_killed_on_4_ranks_and_on_2_finishes_on_1_with_the_same_bits(recipe, tmp_path):
    experiment = [*COMMON, *SMALL[recipe], "max_steps=14", "checkpoint.every_steps=2", "checkpoint.keep_last=3"]
    for ranks, victim, step in ((4, 2, 5), (2, 0, 9)):
        job = Job(tmp_path / "killed", ranks, experiment=experiment)
        job.wait_for_step(step)
        job.ranks[victim].kill()
        assert job.wait()[victim] == -signal.SIGKILL
        assert f"lost rank {victim}, whose process is gone, while" in job.errors
    resumed = run(tmp_path / "killed", 1, experiment=experiment)
    assert_same(resumed, run(tmp_path / "alone", 1, experiment=experiment))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", SMALL)
def test_processes_that_share_a_gpu_give_the_bits_of_one_process(recipe, precision, tmp_path):
    require_same(tmp_path, recipe, (2, 4), "device=cuda", f"precision={precision}", "strategy.backend=gloo", "strategy.share_devices=true")


def require_same(tmp_path, recipe, several, *overrides):
    experiment = [*COMMON, *SMALL[recipe], *overrides]
    alone = run(tmp_path / "1", 1, experiment=experiment)
    summary = json.loads((alone / "summary.json").read_text())
    assert summary["level"] == "R2"
    assert any(name.startswith("valid/") for name in summary["metrics"]["final"])
    assert (alone / "trace.jsonl").read_bytes().count(b"\n") == 13
    for ranks in several:
        assert_same(run(tmp_path / str(ranks), ranks, experiment=experiment), alone)
