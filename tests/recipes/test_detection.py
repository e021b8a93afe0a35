"""The detection recipe against the reference formulas and torchvision's own values, computed independently."""

import pytest
import torch
from torch import Tensor

from samewise.datasets.digits_on_canvas import DigitsOnCanvas
from samewise.recipes.detection import Detection
from samewise.recipes.models.retinanet import RetinaNet, retinanet
from samewise.runner.data import streams
from samewise.runner.interfaces import Batch, Phase


def small(version: int = 1, head_norm: str = "none", **options: object) -> RetinaNet:
    torch.manual_seed(0)
    made = retinanet(
        backbone="resnet18", version=version, num_classes=11, norm="batch", extra_levels=False, channels=32, head_convs=1, head_norm=head_norm,
        anchor_sizes=[[16, 24], [32, 40], [56, 64]], min_size=64, max_size=80, **options,
    )  # fmt: skip
    with torch.no_grad():  # away from the initial scores of .01, so that losses and detections differ from anchor to anchor
        for parameter in made.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made


@pytest.fixture(scope="module")
def batch() -> Batch:
    data = DigitsOnCanvas(split="train", length=4, height=64, width=80, largest=32, digits=3)
    return Detection(num_classes=11).collate([data[index] for index in range(4)])


def targets(batch: Batch) -> list[dict[str, Tensor]]:
    return [{"boxes": boxes, "labels": labels} for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True)]


def test_micro_batches_have_the_same_loss_and_gradient_as_the_batch(batch: Batch):
    """With frozen statistics, so that images do not see each other."""
    whole, parts = (small().train() for _ in range(2))
    for model in (whole, parts):
        model.backbone.eval()
    recipe = Detection()
    one = recipe.loss(whole, batch, Phase())
    (one.total / one.count).backward()
    losses = [recipe.loss(parts, {name: value[piece] for name, value in batch.items()}, Phase()) for piece in (slice(0, 1), slice(1, 4))]
    for loss in losses:
        (loss.total / 4).backward()
    assert sum(loss.count for loss in losses) == one.count
    assert sum(float(loss.total.detach()) for loss in losses) == pytest.approx(float(one.total.detach()), rel=1e-5)
    for ours, theirs in zip(whole.parameters(), parts.parameters(), strict=True):
        if ours.grad is not None:  # compared by norm: an activation that rounding moves across a ReLU's zero changes some elements by more
            assert (ours.grad - theirs.grad).norm() <= 1e-3 * ours.grad.norm()


def test_one_pass_gives_torchvisions_losses_and_detections(batch: Batch):
    model, images = small().eval(), [image.float() / 255 for image in batch["image"]]
    with torch.no_grad():
        losses, found = model.losses_and_detections(images, targets(batch))
        expected = model(images)
        moved, aims = model.transform(images, targets(batch))
        features = list(model.backbone(moved.tensors).values())
        wanted = model.compute_loss(aims, model.head(features), model.anchor_generator(moved, features))
    assert losses == wanted
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours["boxes"])
        assert all(torch.equal(ours[name], theirs[name]) for name in ("boxes", "scores", "labels"))


@pytest.mark.parametrize("head_norm", ["none", "group"])
@pytest.mark.parametrize("turned", [False, True])
def test_scores_and_predictions_do_not_depend_on_the_batch_size(head_norm: str, turned: bool):
    recipe, model = Detection(num_classes=11), small(head_norm=head_norm).eval()
    data = DigitsOnCanvas(split="train", length=6, height=64, width=96, largest=32, digits=3, turned=turned)
    assert len({data[index]["image"].shape for index in range(6)}) == 1 + turned
    told, found = list[dict[str, float]](), list[list[dict[str, object]]]()
    for size in (1, 2, 6):
        scores, predictions = recipe.scores(None), list[dict[str, object]]()
        for start in range(0, 6, size):
            batch = recipe.collate([data[index] for index in range(start, start + size)])
            with torch.no_grad():
                scores.add(recipe.measure(model, batch))
                predictions += [one.values() for one in recipe.predict(model, batch)]
        told.append(scores.compute())
        found.append(predictions)
    assert {"loss", "loss_classification", "loss_boxes", "map", "map_50", "map_75"} <= told[0].keys()
    for other, predictions in zip(told[1:], found[1:], strict=True):
        assert other == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in told[0].items()}
        for one, alone in zip(predictions, found[0], strict=True):
            assert (one["width"], one["height"]) == (alone["width"], alone["height"])
            scores_of = [[detection["score"] for detection in of["detections"]] for of in (one, alone)]
            assert scores_of[0] == pytest.approx(scores_of[1], abs=1e-5)


def test_pictures_are_written(batch: Batch, tmp_path):
    recipe, model = Detection(num_classes=11), small().eval()
    scores = recipe.scores(DigitsOnCanvas(split="valid", length=1))
    with torch.no_grad():
        scores.add(recipe.measure(model, batch))
    scores.save_pictures(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"detections.png", "precision_recall.png", "class_precision.csv"}
    assert (tmp_path / "class_precision.csv").read_text().startswith("label,class,boxes,ap,ap_50\n")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "maskrcnn_resnet50_fpn"])
def test_torchvisions_detectors_keep_their_bits_by_the_runners_generators(name):
    """Samples of proposals, which torch's generators draw, are the same for the same step, and others in another."""
    from torchvision.models import detection

    data = DigitsOnCanvas(split="train", length=2, height=64, width=80, largest=32, masks="objects")
    recipe = Detection(num_classes=11)
    batch = recipe.collate([data[0], data[1]])
    settings = {"box_batch_size_per_image": 8, "rpn_batch_size_per_image": 16} if "rcnn" in name else {}
    settings |= {} if "ssd" in name else {"min_size": 64, "max_size": 96}
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=11, **settings)
    totals = []
    for step in (0, 1, 0):
        streams.enter(7, "step", step, 0, 0)
        totals.append(recipe.loss(model, batch, Phase()).total.item())
    assert totals[0] == totals[2]
    assert (totals[0] == totals[1]) == ("rcnn" not in name)
    with torch.no_grad():
        assert recipe.measure(model.eval(), batch).images[0].found_masks is None or "mask" in name
