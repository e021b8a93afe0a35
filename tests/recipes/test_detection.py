"""The detection recipe against the reference formulas and torchvision's own values, computed independently."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path

import PIL.Image
import pycocotools.coco
import pycocotools.cocoeval
import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection import retinanet_resnet50_fpn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import box_iou
from torchvision.transforms import v2

from samewise.datasets.coco import COCO
from samewise.datasets.digits_on_canvas import DigitsOnCanvas
from samewise.datasets.transforms.detection import RandomShortestSide
from samewise.recipes.detection import Detection
from samewise.recipes.models.retinanet import RetinaNet, retinanet
from samewise.recipes.parts import dense_losses
from samewise.runner.errors import ConfigError, DataError
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


def by_the_paper(model: RetinaNet, batch: Batch) -> tuple[float, float]:
    """The focal and the L1 loss of arXiv 1708.02002, summed over images: loops over anchors, in Python floats."""
    images = [image.float() / 255 for image in batch["image"]]
    moved, aims = model.transform(images, targets(batch))
    features = list(model.backbone(moved.tensors).values())
    outputs, anchors = model.head(features), model.anchor_generator(moved, features)
    focal, boxes = 0.0, 0.0
    for place, aim in enumerate(aims):
        overlaps = box_iou(aim["boxes"], anchors[place])
        best, which = overlaps.max(0)
        rescued = (overlaps == overlaps.max(1, keepdim=True).values).any(0)
        foreground = (best >= 0.5) | rescued
        ignored = (best >= 0.4) & ~foreground
        of_image, of_boxes = 0.0, 0.0
        logits, offsets = outputs["cls_logits"][place].double(), outputs["bbox_regression"][place].double()
        wanted = torch.zeros_like(logits)
        for anchor in foreground.nonzero().flatten().tolist():
            object_ = int(which[anchor])
            wanted[anchor, aim["labels"][object_]] = 1
            (ax1, ay1, ax2, ay2), (x1, y1, x2, y2) = anchors[place][anchor].tolist(), aim["boxes"][object_].tolist()
            aw, ah, w, h = ax2 - ax1, ay2 - ay1, x2 - x1, y2 - y1
            encoded = (((x1 + x2) - (ax1 + ax2)) / 2 / aw, ((y1 + y2) - (ay1 + ay2)) / 2 / ah, math.log(w / aw), math.log(h / ah))
            of_boxes += sum(abs(a - b) for a, b in zip(offsets[anchor].tolist(), encoded, strict=True))
        for anchor in (~ignored).nonzero().flatten().tolist():
            for logit, yes in zip(logits[anchor].tolist(), wanted[anchor].tolist(), strict=True):
                p = 1 / (1 + math.exp(-logit))
                of_image -= 0.25 * (1 - p) ** 2 * math.log(p) if yes else 0.75 * p**2 * math.log(1 - p)
        focal += of_image / max(1, int(foreground.sum()))
        boxes += of_boxes / max(1, int(foreground.sum()))
    return focal, boxes


def test_the_loss_equals_the_papers(batch: Batch):
    model = small().train()
    loss = Detection().loss(model, batch, Phase())
    with torch.no_grad():
        focal, boxes = by_the_paper(small().train(), batch)
    assert loss.count == 4
    assert float(loss.parts["classification"]) == pytest.approx(focal, rel=1e-4)
    assert float(loss.parts["boxes"]) == pytest.approx(boxes, rel=1e-4)
    assert float(loss.total.detach()) == pytest.approx(focal + boxes, rel=1e-4)


@pytest.mark.parametrize("version", [1, 2])
def test_the_loss_equals_torchvisions_and_has_gradients(batch: Batch, version: int):
    model, images = small(version).train(), [image.float() / 255 for image in batch["image"]]
    theirs = super(RetinaNet, model).forward(images, targets(batch))
    loss = Detection().loss(small(version).train(), batch, Phase())
    assert float(loss.total.detach()) / 4 == pytest.approx(sum(float(part) for part in theirs.values()), rel=1e-6)
    loss.total.backward()


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


def heads_outputs(model: RetinaNet) -> dict[str, Tensor]:
    """Filled by each pass with what the two heads give, in the format in which they compute it."""
    found = dict[str, Tensor]()
    model.head.classification_head.register_forward_hook(lambda _, given, output: found.update(cls_logits=output))
    model.head.regression_head.register_forward_hook(lambda _, given, output: found.update(bbox_regression=output))
    return found


def anchors_by_hand() -> Tensor:
    """Those of `small`, float64[A, 4], for images of 64 x 80, padded to 64 x 96."""
    made = list[list[float]]()
    for stride, sizes in ((8, (16, 24)), (16, (32, 40)), (32, (56, 64))):
        half = [(round(size / math.sqrt(ratio) / 2), round(size * math.sqrt(ratio) / 2)) for ratio in (0.5, 1.0, 2.0) for size in sizes]
        places = [(x, y) for y in range(0, 64, stride) for x in range(0, 96, stride)]
        made += [[float(x - w), float(y - h), float(x + w), float(y + h)] for x, y in places for w, h in half]
    return torch.tensor(made, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_boxes_are_decoded_and_suppressed_in_float32(batch: Batch, dtype: torch.dtype):
    """By float64, from what the heads give in the low format, in which a box here would be rounded by up to a quarter of a pixel, or a 64th."""
    recipe, model = Detection(num_classes=11), small().eval()
    outputs, anchors = heads_outputs(model), anchors_by_hand()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        measured = recipe.measure(model, batch).images
        predicted = [one.found for one in recipe.predict(model, batch)]
    assert {output.dtype for output in outputs.values()} == {dtype}
    for place, (image, again) in enumerate(zip(measured, predicted, strict=True)):
        codes, scores = outputs["bbox_regression"][place].double(), outputs["cls_logits"][place].double().sigmoid()
        size, centre = anchors[:, 2:] - anchors[:, :2], (anchors[:, 2:] + anchors[:, :2]) / 2
        middle, half = codes[:, :2] * size + centre, codes[:, 2:].exp() * size / 2
        by_hand = torch.cat([middle - half, middle + half], 1).clamp(min=0).minimum(torch.tensor([80.0, 64, 80, 64]))
        distance = (image.found_boxes.double()[:, None] - by_hand).abs().amax(2) + (image.found_scores.double()[:, None] - scores.T[image.found_labels]).abs()
        assert distance.amin(1).max() < 1e-4  # each is an anchor's box, with its score
        overlap = box_iou(image.found_boxes, image.found_boxes).nan_to_num().triu(1)
        assert overlap[image.found_labels[:, None] == image.found_labels].max() <= model.nms_thresh + 1e-6
        assert len(image.found_boxes) > 10
        assert torch.equal(image.found_boxes, again.found_boxes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("box_loss", ["l1", "giou"])
def test_under_autocast_losses_are_float32(batch: Batch, dtype: torch.dtype, box_loss: str):
    """By torchvision's loss in float64, from what the heads give in the low format."""
    model, images = small(box_loss=box_loss), [image.float() / 255 for image in batch["image"]]
    outputs, anchors = heads_outputs(model), [anchors_by_hand()] * 4
    aims = [{**one, "boxes": one["boxes"].double()} for one in targets(batch)]
    for losses in (
        lambda: model.eval().losses_and_detections(images, targets(batch))[0],
        lambda: model.train()(images, targets(batch)),
        lambda: dense_losses.losses(model.train(), images, targets(batch)),
    ):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            given = losses()
        wanted = TorchvisionRetinaNet.compute_loss(model, aims, {name: output.double() for name, output in outputs.items()}, anchors)
        assert {output.dtype for output in outputs.values()} == {dtype}
        assert {name: float(one) for name, one in given.items()} == {name: pytest.approx(float(one), rel=1e-5) for name, one in wanted.items()}


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


def test_another_detector_of_torchvision_is_trained_and_measured(batch: Batch):
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    torch.manual_seed(0)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=11, min_size=64, max_size=80)
    recipe = Detection(num_classes=11)
    loss = recipe.loss(model.train(), batch, Phase())
    assert set(loss.parts) == {"classification", "boxes", "objectness", "rpn_box_reg"}
    assert float(loss.total.detach()) == pytest.approx(sum(float(part) for part in loss.parts.values()), rel=1e-5)
    scores = recipe.scores(None)
    with torch.no_grad():
        scores.add(recipe.measure(model.eval(), batch))
    assert set(scores.compute()) >= {"map", "map_50"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_detector_of_torchvision_is_evaluated_without_autocast(batch: Batch, dtype: torch.dtype):
    torch.manual_seed(0)
    anchors = AnchorGenerator(((16, 24, 9001),) * 3, ((0.5, 1.0, 2.0),) * 3)  # the low formats round the largest
    model = TorchvisionRetinaNet(small().backbone, 11, anchor_generator=anchors, min_size=64, max_size=80, score_thresh=0.001)
    recipe, state, found = Detection(num_classes=11), {name: value.clone() for name, value in model.state_dict().items()}, list[list[Tensor]]()
    for context in (contextlib.nullcontext(), torch.autocast("cpu", dtype)):
        with torch.no_grad(), context:
            found.append([one.found_boxes for one in recipe.measure(model.eval(), batch).images])
            found.append([one.found.found_boxes for one in recipe.predict(model, batch)])
        with torch.autocast("cpu", dtype):
            recipe.loss(model.train(), batch, Phase())
        model.load_state_dict(state)
    for one in zip(*found, strict=True):
        assert len(one[0])
        assert all(torch.equal(one[0], other) for other in one)
    fresh = AnchorGenerator(anchors.sizes, anchors.aspect_ratios).cell_anchors
    assert all(map(torch.equal, anchors.cell_anchors, fresh)), "evaluations after a training under autocast would differ from those of the saved weights"


def test_images_of_one_size_become_a_tensor_and_of_several_a_list():
    data = DigitsOnCanvas(split="train", length=30, height=64, width=80, largest=32, turned=True)
    shapes = [tuple(data[index]["image"].shape) for index in range(30)]
    alike = [index for index in range(30) if shapes[index] == shapes[0]]
    recipe = Detection()
    assert isinstance(recipe.collate([data[index] for index in alike])["image"], Tensor)
    made = recipe.collate([data[index] for index in range(30)])
    assert [tuple(image.shape) for image in made["image"]] == shapes
    assert len(set(shapes)) == 2
    assert all(type(value) is Tensor for name in ("image", "boxes", "labels") for value in made[name])


class Corners(nn.Module):
    """Finds the whole image, and its left upper quarter."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        sizes = [(image.shape[-1], image.shape[-2]) for image in images]
        boxes = [torch.tensor([[0.0, 0, width, height], [0, 0, width / 2, height / 2]]) for width, height in sizes]
        return [{"boxes": found, "labels": torch.tensor([1, 2]), "scores": torch.tensor([0.9, 0.8])} for found in boxes]


@pytest.mark.parametrize("read_size", [None, [32, 32], [200, 100]])
def test_boxes_are_in_pixels_of_a_file_that_is_resized_as_it_is_read(tmp_path: Path, read_size: list[int] | None):
    for name, size in (("a", (80, 64)), ("b", (50, 150))):
        PIL.Image.new("RGB", size, (200, 10, 10)).save(tmp_path / f"{name}.png")
    recipe = Detection()
    recipe.read_size = read_size
    batch = recipe.collate([recipe.read(tmp_path / f"{name}.png") for name in "ab"])
    assert [tuple(image.shape[-2:]) for image in batch["image"]] == ([(64, 80), (150, 50)] if read_size is None else [tuple(read_size)] * 2)
    for made, (width, height) in zip(recipe.predict(Corners(), batch), ((80, 64), (50, 150)), strict=True):
        told = made.values()
        assert (told["width"], told["height"]) == (width, height)
        assert [one["box"] for one in told["detections"]] == [[0, 0, width, height], [0, 0, width / 2, height / 2]]
        (picture,) = made.save(tmp_path, "drawn")
        with PIL.Image.open(picture) as drawn:
            assert drawn.width / drawn.height == pytest.approx(width / height, rel=0.02)


class Planted(nn.Module):
    """Finds objects at these places, given as parts of an image's width and height."""

    def __init__(self, boxes: Tensor) -> None:
        super().__init__()
        self.boxes = boxes

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        sizes = [torch.tensor([image.shape[-1], image.shape[-2]] * 2) for image in images]
        scores = torch.linspace(0.9, 0.5, len(self.boxes))
        return [{"boxes": self.boxes * size, "labels": torch.ones(len(self.boxes), dtype=torch.int64), "scores": scores} for size in sizes]


TO_OTHER_SIZES = {
    "as it is": ({}, [], []),
    "as it is read": ({"size": [512, 384]}, [], []),
    "by a transform of samples": ({}, [v2.Resize([300, 500])], []),
    "by a transform of batches": ({}, [], [RandomShortestSide(shortest=[480], longest=900)]),
    "by all": ({"size": [64, 80]}, [v2.Resize([300, 500])], [RandomShortestSide(shortest=[480], longest=900)]),
}


@pytest.mark.parametrize("how", TO_OTHER_SIZES)
def test_sizes_of_objects_and_results_are_in_pixels_of_the_file_however_it_is_resized(tmp_path: Path, how: str):
    """By pycocotools, on the annotations as they are in the file and detections in its pixels."""
    boxes = [[10.0, 20, 20, 20], [50, 20, 40, 60], [20, 90, 120, 100], [150, 30, 30, 30]]
    areas = [300.0, 1100, 9500, 950]  # of masks
    truth = {
        "images": [{"id": number, "file_name": f"{number}.png", "width": 200, "height": 200} for number in (1, 2)],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [
            {"id": 4 * number + place, "image_id": number, "category_id": 1, "bbox": box, "area": area, "iscrowd": 0}
            for number in (1, 2)
            for place, (box, area) in enumerate(zip(boxes, areas, strict=True))
        ],
    }
    for number in (1, 2):
        PIL.Image.new("RGB", (200, 200), (90, 10, 10)).save(tmp_path / f"{number}.png")
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    false = [[150.0, 150, 24, 24], [2, 2, 40, 40], [100, 2, 44, 44], [100, 100, 99, 99]]  # before the true ones
    x, y, width, height = torch.tensor([*false, *boxes[:3]]).unbind(1)
    model = Planted(torch.stack([x, y, x + width, y + height], 1) / 200)

    options, of_samples, of_batches = TO_OTHER_SIZES[how]
    data, recipe = COCO(root=str(tmp_path), images=".", annotations="truth.json", **options), Detection(num_classes=2)
    batch = recipe.collate([v2.Compose(of_samples or [v2.Identity()])(data[index]) for index in range(2)])
    for transform in of_batches:
        batch = transform(batch)
    scores = recipe.scores(data)
    scores.add(recipe.measure(model, batch))

    with contextlib.redirect_stdout(io.StringIO()):
        reference = pycocotools.coco.COCO(str(tmp_path / "truth.json"))
        results = [row for number, one in enumerate(recipe.predict(model, batch), start=1) for row in one.coco(number)]
        assert [row["bbox"] for row in results[:7]] == [pytest.approx(box, abs=0.02) for box in torch.stack([x, y, width, height], 1).tolist()]
        evaluator = pycocotools.cocoeval.COCOeval(reference, reference.loadRes(results), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    expected = dict(zip(("map", "map_50", "map_75", "map_small", "map_medium", "map_large"), evaluator.stats[:6], strict=True))
    assert len({round(expected[f"map_{size}"], 3) for size in ("small", "medium", "large")}) == 3
    assert {name: scores.compute()[name] for name in expected} == {name: pytest.approx(value, abs=1e-9) for name, value in expected.items()}


@pytest.mark.parametrize(
    "moved",
    [v2.Pad(20), v2.CenterCrop([30, 40]), v2.RandomHorizontalFlip(1.0), v2.RandomVerticalFlip(1.0), v2.RandomRotation((90, 90), expand=True)],
    ids=lambda one: type(one).__name__,
)
def test_an_evaluation_that_moves_the_picture_within_the_image_is_refused(tmp_path: Path, moved: v2.Transform):
    PIL.Image.new("RGB", (80, 64)).save(tmp_path / "a.png")
    sample = Detection().read(tmp_path / "a.png")
    resized = Detection().collate([v2.Compose([v2.Resize(50), v2.ColorJitter(0.5), v2.ToDtype(torch.float32, scale=True)])(sample)])
    assert resized["image"].shape[-2:] == (50, 62)
    with pytest.raises(ConfigError, match=r"transforms\.eval\.sample: crop, pad, flip or turn images"):
        Detection().collate([v2.Compose([moved, v2.Resize(50)])(sample)])


def sample_with(**values: object) -> dict[str, object]:
    return {**DigitsOnCanvas(split="train", length=1)[0], "image_id": 7, **values}


@pytest.mark.parametrize("box", [[20, 10, 10, 20], [-3, 0, 5, 5], [0, 0, 500, 5], [0, 0, float("nan"), 5]])
def test_an_impossible_box_is_reported_with_its_image(box: list[float]):
    with pytest.raises(DataError, match="image 7 of 128 x 96 pixels has an impossible box"):
        Detection().collate([sample_with(boxes=torch.tensor([box]), labels=torch.tensor([1]))])


@pytest.mark.parametrize("label", [0, 11, -1])
def test_a_label_out_of_range_is_reported_with_its_image(label: int):
    with pytest.raises(DataError, match=r"image 7 has a label out of range(.|\n)*1 to 10"):
        Detection(num_classes=11).collate([sample_with(boxes=torch.tensor([[0.0, 0, 5, 5]]), labels=torch.tensor([label]))])


def test_a_sample_without_matching_boxes_and_labels_is_refused():
    with pytest.raises(DataError, match="not an image with boxes"):
        Detection().collate([(torch.zeros(3, 4, 4), 1)])
    with pytest.raises(DataError, match="boxes \\[1, 4\\] and labels \\[2\\]"):
        Detection().collate([sample_with(boxes=torch.tensor([[0.0, 0, 5, 5]]), labels=torch.tensor([1, 2]))])


def test_boxes_without_area_are_removed():
    made = Detection().collate([sample_with(boxes=torch.tensor([[0.0, 0, 5, 5], [5, 5, 5, 9]]), labels=torch.tensor([1, 2]))])
    assert made["boxes"][0].tolist() == [[0, 0, 5, 5]]
    assert made["labels"][0].tolist() == [1]


def test_an_image_without_boxes_counts_as_background(batch: Batch):
    empty = {**{name: value[:1] for name, value in batch.items()}, "boxes": [torch.zeros(0, 4)], "labels": [torch.zeros(0, dtype=torch.int64)]}
    loss = Detection().loss(small().train(), empty, Phase())
    assert float(loss.parts["boxes"]) == 0
    assert float(loss.parts["classification"]) > 0


def test_a_model_that_is_not_a_detector_is_refused(batch: Batch):
    class Classifier(nn.Module):
        def forward(self, images: list[Tensor], targets: object) -> Tensor:
            return torch.zeros(4, 10)

    with pytest.raises(ConfigError, match="does not return a dict of losses"):
        Detection().loss(Classifier(), batch, Phase())


def test_pictures_are_written(batch: Batch, tmp_path):
    recipe, model = Detection(num_classes=11), small().eval()
    scores = recipe.scores(DigitsOnCanvas(split="valid", length=1))
    with torch.no_grad():
        scores.add(recipe.measure(model, batch))
    scores.save_pictures(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"detections.png", "precision_recall.png", "class_precision.csv"}
    assert (tmp_path / "class_precision.csv").read_text().startswith("label,class,boxes,ap,ap_50\n")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))


def test_torchvisions_model_and_ours_give_the_same_loss_with_the_same_weights(batch: Batch):
    torch.manual_seed(0)
    theirs = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=11, min_size=64, max_size=80).train()
    ours = retinanet(num_classes=11, norm="batch", trainable_layers=5, min_size=64, max_size=80).train()
    ours.load_state_dict(theirs.state_dict())
    wanted = theirs([image.float() / 255 for image in batch["image"]], targets(batch))
    loss = Detection().loss(ours, batch, Phase())
    assert float(loss.total.detach()) / 4 == pytest.approx(sum(float(part) for part in wanted.values()), rel=1e-6)
