"""The promise, for every recipe at reduced size: the same bits run again, with workers, and killed and resumed.

Among the quick tests, test_resuming.py resumes them after every step, and tests/kept runs them again.
"""

import random

import pytest
import samewise_runner_promise as promise
from samewise_tiny import QUIET

COMMON = [*QUIET, "reproducibility.threads=1", "checkpoint.every_steps=3"]
SMALL = {
    "detection": ["experiment=retinanet_coco", "transforms=detection_ssd", "batch_size=2", "replicas=2", "model.channels=16", "evaluate.every_epochs=5"],
    "autoencoder": ["experiment=autoencoder_digits", "model.variational=true"],
    "regression": ["recipe=regression", "recipe.reads=image", "model=resnet18_regression", "model.model.width=4", "optimizer.lr=0.01"],
    "instance_segmentation": ["experiment=maskrcnn_digit_masks", "batch_size=2", "replicas=2", "evaluate.every_epochs=5"],
    "segmentation": ["experiment=fcn_digit_masks", "transforms=segmentation", "replicas=2"],
    "separation": ["experiment=conv_tasnet_spoken_digits"],
    "vocoder": ["experiment=wavernn_spoken_digits"],
    "audio_classification": ["experiment=audio_classification_spoken_digits", "model.width=4"],
    "text_classification": ["experiment=transformer_unicode_categories", "model.dropout=0.1"],
    "language_modelling": ["experiment=gpt_unicode_names", "recipe.objective=masked", "model.dropout=0.1"],
    "speech_recognition": ["experiment=wav2letter_spoken_digits", "model.width=16", "model.top_width=32"],
}


@pytest.mark.slow  # test_resuming.py stops every recipe, too
@pytest.mark.parametrize("recipe", [pytest.param(one, marks=() if one in ("detection", "speech_recognition") else pytest.mark.long) for one in SMALL])
def test_each_recipe_gives_the_same_bits_with_workers_and_when_killed(recipe, tmp_path):
    experiment = promise.Promise([*SMALL[recipe], *COMMON])
    reference = experiment.run(tmp_path / "reference")
    assert promise.trace(reference).count(b"\n") == 21
    for number_of_workers in (0, 3):
        again = experiment.run(tmp_path / f"again{number_of_workers}", f"loader.num_workers={number_of_workers}")
        assert promise.weights(again) == promise.weights(reference)
        assert promise.trace(again) == promise.trace(reference)
    chance, kills = random.Random(3), 0
    while kills < 3 and experiment.kill_within(tmp_path / "killed", chance, f"loader.num_workers={kills % 2}"):
        kills += 1
    resumed = experiment.run(tmp_path / "killed")
    assert kills >= 2
    assert promise.weights(resumed) == promise.weights(reference)
    assert promise.trace(resumed) == promise.trace(reference)
