"""Sample transforms around a data set."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from samewise.runner.data.dataset import WithTransform, fingerprint
from samewise.runner.errors import ConfigError, DataError


@pytest.mark.parametrize("image", [torch.zeros(3, 8, 12, dtype=torch.uint8), Image.new("RGB", (12, 8))])
def test_a_transform_of_samples_that_would_leave_a_mask_behind_is_refused(image):
    mask, flips = torch.zeros(8, 12), [v2.RandomHorizontalFlip(1.0)]
    with pytest.raises(ConfigError, match="RandomHorizontalFlip would move the image but not mask, of the same size"):
        WithTransform([{"image": image, "mask": mask, "label": 1}], flips)[0]
    assert WithTransform([{"image": image, "mask": torch.zeros(4, 6), "label": 1}], flips)[0]["label"] == 1
    assert WithTransform([{"image": image, "mask": mask, "label": 1}], [v2.ToImage()])[0]["mask"] is mask
    mask[:, 0] = 1
    moved = WithTransform([{"image": tv_tensors.Image(torch.zeros(3, 8, 12)), "mask": tv_tensors.Mask(mask)}], flips)[0]
    assert torch.equal(moved["mask"], mask.flip(1))


@pytest.mark.parametrize(
    ("where", "raised", "words"),
    [
        ("sample", KeyError("missing"), "dataset.valid: Own fails at sample 23: KeyError: 'missing'; hint: raised at "),
        ("sample", SystemExit(3), "dataset.valid: Own ends the process: sys.exit(3); hint: raised at "),
        ("whole", ValueError("no files"), "dataset.valid: Own fails in fingerprint(): ValueError: no files; hint: raised at "),
    ],
)
def test_an_error_of_a_data_set_that_is_fingerprinted_names_it_the_sample_and_the_line(where, raised, words):
    class Own:
        def __len__(self):
            return 32

        def __getitem__(self, index):
            if index == 23:
                raise raised
            return {"image": torch.zeros(1, 4, 4), "label": 0}

    class OwnFingerprint(Own):
        def fingerprint(self):
            raise raised

    OwnFingerprint.__name__ = "Own"
    with pytest.raises(DataError) as caught:
        fingerprint((Own if where == "sample" else OwnFingerprint)(), "dataset.valid")
    said = str(caught.value)
    assert said.startswith(f"{words}{__file__}:")
    assert said.endswith(": raise raised")
