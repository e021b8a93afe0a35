"""Sample transforms around a data set."""

import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from samewise.runner.data.dataset import WithTransform
from samewise.runner.errors import ConfigError


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
