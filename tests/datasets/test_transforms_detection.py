"""Transforms of images with boxes: equal to torchvision's, a batch like its samples, images of one size and of several."""

from collections.abc import Callable

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from samewise.datasets.transforms.colour import ColorJitter
from samewise.datasets.transforms.detection import RandomHorizontalFlipWithBoxes, RandomShortestSide, RandomVerticalFlipWithBoxes
from samewise.datasets.transforms.geometry import RandomHorizontalFlip
from samewise.datasets.transforms.numeric import ToFloat
from samewise.datasets.transforms.photometric import RandomPhotometricDistort
from samewise.datasets.transforms.policies import RandAugment
from samewise.runner.data import streams
from samewise.runner.data.dataset import WithTransform
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Batch, BatchTransform

MAKERS: dict[str, Callable[[], BatchTransform]] = {
    "RandomHorizontalFlipWithBoxes": RandomHorizontalFlipWithBoxes,
    "RandomVerticalFlipWithBoxes": RandomVerticalFlipWithBoxes,
    "RandomShortestSide": lambda: RandomShortestSide(shortest=[24, 32, 40], longest=48),
    "RandomPhotometricDistort": lambda: RandomPhotometricDistort(p=0.7),
    "ColorJitter": lambda: ColorJitter(brightness=0.5, contrast=0.5, saturation=0.5),
    "ToFloat": ToFloat,
}


def batch_of(size: int = 12, *, varied: bool) -> Batch:
    drawn = torch.Generator().manual_seed(3)
    shapes = [(32 + 4 * (number % 3) * varied, 44 - 6 * (number % 2) * varied) for number in range(size)]
    images = [torch.randint(0, 256, (3, *shape), generator=drawn, dtype=torch.uint8) for shape in shapes]
    corners = [torch.rand(number % 4, 2, generator=drawn) * 16 for number in range(size)]  # some images have no box
    boxes = [torch.cat([corner, corner + 4 + torch.rand(corner.shape, generator=drawn) * 12], dim=1) for corner in corners]
    labels = [torch.arange(len(one)) + 1 for one in boxes]
    return {"image": images if varied else torch.stack(images), "boxes": boxes, "labels": labels, "image_id": list(range(size))}


def draw_choices(transform: BatchTransform, batch: Batch) -> dict[str, Tensor]:
    with streams.scope(0, "step", 5, 0):
        return transform.draw(batch, len(batch["image"]))


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_gives_what_its_samples_give_one_by_one(name: str, varied: bool):
    transform, batch = MAKERS[name](), batch_of(varied=varied)
    choices = draw_choices(transform, batch)
    together = transform.apply(batch, choices)
    assert len(together["image"]) == 12
    for place in range(12):
        alone = transform.apply(
            {key: value[place : place + 1] for key, value in batch.items()}, {key: value[place : place + 1] for key, value in choices.items()}
        )
        assert torch.equal(together["image"][place], alone["image"][0])
        assert torch.equal(together["boxes"][place], alone["boxes"][0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKERS)
def test_cuda_gives_what_the_cpu_gives(name: str):
    transform, batch = MAKERS[name](), batch_of(varied=True)
    there = {key: [value.cuda() for value in values] if key != "image_id" else values for key, values in batch.items()}
    choices = draw_choices(transform, batch)
    assert all(torch.equal(value, draw_choices(transform, there)[key]) for key, value in choices.items())
    here, there = transform.apply(batch, choices), transform.apply(there, choices)
    for place in range(12):
        assert (here["image"][place].float() - there["image"][place].float().cpu()).abs().max() <= 1
        torch.testing.assert_close(here["boxes"][place], there["boxes"][place].cpu())


@pytest.mark.parametrize(
    ("name", "function"), [("RandomHorizontalFlipWithBoxes", functional.horizontal_flip), ("RandomVerticalFlipWithBoxes", functional.vertical_flip)]
)
def test_flips_equal_torchvisions(name: str, function: Callable):
    batch = batch_of(varied=True)
    changed = MAKERS[name]().apply(batch, {"flip": torch.tensor([True, False] * 6)})
    for place in range(12):
        image, boxes = batch["image"][place], tv_tensors.BoundingBoxes(batch["boxes"][place], format="XYXY", canvas_size=batch["image"][place].shape[-2:])
        wanted = (image, boxes) if place % 2 else (function(image), function(boxes))
        assert torch.equal(changed["image"][place], wanted[0])
        torch.testing.assert_close(changed["boxes"][place], wanted[1].as_subclass(Tensor))


def test_photometric_distortion_equals_torchvisions_step_by_step():
    batch = batch_of(varied=False)
    transform = RandomPhotometricDistort(p=1.0)
    choices = draw_choices(transform, batch)
    assert choices["contrast_first"].any()
    assert not choices["contrast_first"].all()
    changed = transform.apply(batch, choices)["image"]
    for place, image in enumerate(batch["image"]):
        drawn = {name: float(value[place]) for name, value in choices.items() if name != "channels"}
        image = functional.adjust_brightness(image, drawn["brightness"])
        if drawn["contrast_first"]:
            image = functional.adjust_contrast(image, drawn["contrast"])
        image = functional.adjust_hue(functional.adjust_saturation(image, drawn["saturation"]), drawn["hue"])
        if not drawn["contrast_first"]:
            image = functional.adjust_contrast(image, drawn["contrast"])
        assert (changed[place].int() - image[choices["channels"][place]].int()).abs().max() <= 1


@pytest.mark.parametrize("transform", [RandomHorizontalFlip(), RandAugment()])
def test_a_transform_that_would_leave_the_boxes_behind_is_refused(transform: BatchTransform):
    with pytest.raises(ConfigError, match="would move the image but not its boxes"):
        transform(batch_of(varied=False))


@pytest.mark.parametrize("transform", [RandomHorizontalFlip(), RandAugment()])
@pytest.mark.parametrize("mask", [(12, 16), (1, 12, 16)])
def test_a_transform_that_would_leave_a_mask_behind_is_refused(transform: BatchTransform, mask: tuple[int, ...]):
    batch = {"image": torch.zeros(4, 3, 12, 16, dtype=torch.uint8), "mask": torch.zeros(4, *mask, dtype=torch.int64), "label": torch.zeros(4)}
    with pytest.raises(ConfigError, match="would move the image but not mask, of the same size"):
        transform(batch)
    transform({**batch, "mask": torch.zeros(4, 6, 8)})
    ColorJitter(brightness=0.5)(batch)


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
