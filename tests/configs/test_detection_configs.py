"""The choices for detection: composed as published, built, and trained and evaluated for a step on data of each layout."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.models import resnet50
from torchvision.ops.misc import FrozenBatchNorm2d

from samewise.runner.config.compose import Composed, compose
from samewise.runner.config.project import Project, find
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.build import build
from samewise.runner.training.dry_run import dry_run

QUIET = ["tracking=none", "evaluate.pictures=false", "callbacks=none", "reproducibility.threads=1"]
SMALL = ["model.min_size=64", "model.max_size=96", "batch_size=8"]


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def project() -> Project:
    return find(Path("/"))


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten training and two validation images in COCO 2017's layout, in landscape and portrait format."""
    root = tmp_path_factory.mktemp("coco")
    (root / "annotations").mkdir()
    for split, count in (("train2017", 10), ("val2017", 2)):
        (root / split).mkdir()
        images, annotations = [], []
        for number in range(count):
            width, height = (64, 48) if number % 3 else (48, 64)
            name = f"{number:012d}.jpg"
            Image.new("RGB", (width, height), (number * 20, 90, 30)).save(root / split / name)
            images.append({"id": number, "file_name": name, "width": width, "height": height})
            annotations.append({"id": number, "image_id": number, "category_id": 90 - number, "bbox": [4, 5, 30, 35], "area": 1000.0, "iscrowd": 0})
        content = {"images": images, "annotations": annotations, "categories": [{"id": number, "name": f"thing {number}"} for number in range(1, 91)]}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that load a ResNet-50 classifier from a file, its batch norms as if they had seen images."""
    torch.manual_seed(0)
    state = resnet50().state_dict()
    for name, value in state.items():
        if name.endswith("running_var"):
            value.fill_(4.0)
    path = tmp_path_factory.mktemp("weights") / "resnet50.pth"
    torch.save(state, path)
    return ["model.weights_backbone=null", f"initialise.weights={path}", "initialise.into=backbone.body", "initialise.exclude=[fc.*]"]


def compose_quiet(project: Project, *overrides: str) -> Composed:
    return compose([*overrides, *QUIET], project=project)


@pytest.mark.parametrize("experiment", ["retinanet_coco", "retinanet_coco_v2"])
def test_both_published_recipes_have_their_common_settings(project: Project, experiment: str):
    cfg = compose_quiet(project, f"experiment={experiment}").cfg
    assert (cfg.batch_size, cfg.accumulate, cfg.max_epochs, cfg.clip_norm) == (16, 1, 26, None)
    schedules = cfg.scheduler.schedules
    assert (schedules.warmup.duration, schedules.warmup.start_factor, schedules.warmup.within_first_epoch, schedules.warmup.unit) == (1000, 0.001, True, "step")
    assert (list(schedules.decay.milestones), schedules.decay.gamma, schedules.decay.unit) == ([16, 22], 0.1, "epoch")
    assert (cfg.loader.order.factor, cfg.dataset.num_classes, cfg.dataset.category_ids) == (3, 91, "keep")
    assert (cfg.model.score_thresh, cfg.model.nms_thresh, cfg.model.topk_candidates, cfg.model.detections_per_img) == (0.05, 0.5, 1000, 300)
    assert (cfg.evaluate.monitor, cfg.evaluate.mode) == ("valid/map", "max")
    assert cfg.dataset.train.training is True
    assert "training" not in cfg.dataset.valid


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["retinanet_coco", "retinanet_coco_v2"])
def test_the_published_recipes_train_on_data_in_cocos_layout(project: Project, coco: Path, backbone: list[str], experiment: str, tmp_path: Path):
    few = ["transforms.shortest=[64,80]", "transforms.longest=96"] if experiment.endswith("v2") else []
    overrides = [f"experiment={experiment}", f"dataset.root={coco}", *SMALL, *few, *backbone]
    run = build(compose_quiet(project, *overrides), project, RunFolder(tmp_path))
    published = 34_014_999 if experiment == "retinanet_coco" else 38_198_935
    assert sum(parameter.numel() for parameter in run.model.parameters()) == published
    assert any(isinstance(module, FrozenBatchNorm2d) for module in run.model.modules()) == (experiment == "retinanet_coco")
    assert run.model.backbone.body.bn1.running_var.unique().tolist() == [4.0]
    assert (len(run.splits["train"].dataset), len(run.splits["valid"].dataset)) == (10, 2)
    dry_run(compose_quiet(project, *overrides), project)


@pytest.mark.parametrize("transforms", ["detection", "detection_multiscale", "detection_ssd", "detection_flips"])
def test_every_choice_of_transforms_trains_on_digits_on_canvases(project: Project, transforms: str):
    data = ["recipe=detection", "model=retinanet_resnet18", "dataset=digits_on_canvas", "dataset.samples=4", "dataset.valid_samples=2", "dataset.turned=true"]
    small = ["model.channels=32", "model.min_size=64", "model.max_size=96", "batch_size=4", "evaluate.batch_size=2"]
    sizes = ["transforms.shortest=[64]", "transforms.longest=96"] if transforms == "detection_multiscale" else []
    dry_run(compose_quiet(project, *data, *small, f"transforms={transforms}", *sizes), project)
