"""The segmentation recipe against torchvision's criterion, and its counts of pixels."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import tv_tensors

from samewise.datasets.transforms.segmentation import PadIfSmaller, RandomHorizontalFlipWithMask
from samewise.recipes.segmentation import Segmentation
from samewise.runner.errors import ConfigError, DataError
from samewise.runner.interfaces import Phase

CLASSES = 4


class Twice(nn.Module):
    """Logits from the colours of a pixel, and auxiliary ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.aux = nn.Conv2d(3, CLASSES, 1), nn.Conv2d(3, CLASSES, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"out": self.main(images), "aux": self.aux(images)}


def sample(height: int, width: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, CLASSES, (height, width), generator=draw, dtype=torch.uint8)
    mask[torch.rand(height, width, generator=draw) < seed / 10] = 255
    return {"image": tv_tensors.Image(torch.rand(3, height, width, generator=draw)), "mask": tv_tensors.Mask(mask)}


def test_micro_batches_add_up_to_the_criterion_of_torchvisions_reference():
    recipe, model = Segmentation(num_classes=CLASSES), Twice()
    samples = [sample(6, 7, seed) for seed in range(1, 5)]  # with more and more pixels that do not count
    images, masks = torch.stack([one["image"] for one in samples]), torch.stack([one["mask"] for one in samples]).long()
    main, aux = (F.cross_entropy(logits, masks, ignore_index=255) for logits in model(images).values())
    losses = [recipe.loss(model, recipe.collate(samples[part]), Phase()) for part in (slice(0, 1), slice(1, 4))]
    total = sum(loss.total for loss in losses) / sum(loss.count for loss in losses)
    torch.testing.assert_close(total, main + 0.5 * aux)
    assert sum(loss.parts["aux"].item() for loss in losses) / sum(loss.count for loss in losses) == pytest.approx(aux.item())


def test_an_evaluation_counts_pixels_whatever_its_batches_and_the_sizes_of_images():
    recipe, model = Segmentation(num_classes=CLASSES), Twice().eval()
    samples = [sample(6, 7, 1), sample(5, 9, 2), sample(6, 7, 3)]
    found = []
    for cuts in ([0, 3], [0, 1, 3], [0, 1, 2, 3]):
        scores = recipe.scores(None)
        for start, end in itertools.pairwise(cuts):
            with torch.no_grad():
                scores.add(recipe.measure(model, recipe.collate(samples[start:end])))
        found.append((scores.compute(), scores.confusion.tolist()))
    assert found[0] == found[1] == found[2]
    pairs = [(model(one["image"][None])["out"].argmax(1)[0], one["mask"].as_subclass(Tensor)) for one in samples]
    for label, overlap in enumerate(scores.overlaps().tolist()):
        true = torch.cat([(mask == label)[mask != 255] for _, mask in pairs])
        guess = torch.cat([(labels == label)[mask != 255] for labels, mask in pairs])
        assert overlap == pytest.approx(int((true & guess).sum()) / int((true | guess).sum()))


def test_a_loss_and_metrics_by_config_take_pixels():
    from torchmetrics.classification import MulticlassF1Score

    from samewise.recipes.parts.losses import CrossEntropy

    metrics = {"f1": MulticlassF1Score(num_classes=CLASSES)}
    plain, other = Segmentation(num_classes=CLASSES), Segmentation(num_classes=CLASSES, loss=CrossEntropy(), metrics=metrics)
    batch = plain.collate([sample(6, 7, seed) for seed in (1, 2)])
    torch.testing.assert_close(other.loss(Twice(), batch, Phase()).total, plain.loss(Twice(), batch, Phase()).total)
    scores = other.scores(None)
    scores.add(other.measure(Twice(), batch))
    diag, rows, columns = scores.confusion.diag().double(), scores.confusion.sum(1), scores.confusion.sum(0)
    assert scores.compute()["f1"] == pytest.approx(float((2 * diag / (rows + columns)).mean()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.full((6, 7), 9, dtype=torch.uint8)}, "label out of range"),
        ({"mask": torch.zeros(3, 7, dtype=torch.uint8)}, "does not fit its image"),
        ({"mask": torch.zeros(6, 7)}, "does not fit its image"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(change, message):
    with pytest.raises(DataError, match=message):
        Segmentation(num_classes=CLASSES).collate([sample(6, 7, 1) | change])


def test_logits_of_another_shape_and_training_images_of_several_sizes_are_refused():
    with pytest.raises(ConfigError, match="logits for each pixel"):
        Segmentation(num_classes=CLASSES).loss(nn.Conv2d(3, 5, 1), Segmentation(num_classes=CLASSES).collate([sample(6, 7, 1)]), Phase())
    recipe = Segmentation(num_classes=CLASSES)
    with pytest.raises(DataError, match="differ in size"):
        recipe.loss(Twice(), recipe.collate([sample(6, 7, 1), sample(5, 9, 2)]), Phase())


def test_padding_and_flips_move_masks_with_images():
    padded = PadIfSmaller([8, 5])(sample(6, 7, 1))
    assert padded["image"].shape == (3, 8, 7)
    assert (padded["image"][:, 6:] == 0).all()
    assert (padded["mask"][6:] == 255).all()
    batch = Segmentation(num_classes=CLASSES).collate([sample(6, 7, 1), sample(6, 7, 2)])
    flipped = RandomHorizontalFlipWithMask().apply(batch, {"flip": torch.tensor([True, False])})
    assert torch.equal(flipped["image"][0], batch["image"][0].flip(-1))
    assert torch.equal(flipped["mask"], torch.stack([batch["mask"][0].flip(-1), batch["mask"][1]]))
