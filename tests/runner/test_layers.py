"""`samewise check` summarises a model by layer, with the parameters and operations that torchvision publishes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samewise_tiny import QUIET
from torchvision.models import get_weight

LAB = """
import torch

class Photos(torch.utils.data.Dataset):
    classes = [str(number) for number in range(1000)]

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"image": torch.full((3, 224, 224), index / 4), "label": index}
"""
PHOTOS = [
    *(*QUIET, "device=cpu", "dataset=digits", "transforms=none", "batch_size=2", "max_steps=1", "dataset.num_classes=1000", "~model"),
    *("~dataset.train", "+dataset.train={_target_: lab_of_layers.Photos}", "~dataset.valid", "+dataset.valid={_target_: lab_of_layers.Photos}"),
]


@pytest.mark.parametrize("weights", ["ResNet50_Weights.IMAGENET1K_V1", pytest.param("ViT_B_32_Weights.IMAGENET1K_V1", marks=pytest.mark.slow)])
def test_a_summary_has_the_published_parameters_and_operations(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samewise: Callable[..., Any]
) -> None:
    (tmp_path / "lab_of_layers.py").write_text(LAB)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab_of_layers"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    published: dict[str, Any] = get_weight(weights).meta
    name = weights.partition("_Weights")[0].lower()
    given = [*PHOTOS, f"+model={{_target_: torchvision.models.{name}, num_classes: ${{dataset.num_classes}}}}"]
    done = samewise("check", *given, "--json", "--depth", 9, code=0)
    model, *inner = json.loads(done.stdout)["layers"]
    assert model["name"] == ""
    assert model["output"] == [[2, 1000]]
    assert model["parameters"] == model["trained"] == published["num_params"]
    # torchvision counts a multiplication and an addition as one
    assert model["operations"] / 2e9 == pytest.approx(published["_ops"], abs=0.0006)
    # Those at the leaves are all there is, except what a model computes itself
    blocks = [layer for layer in inner if "." not in layer["name"]]
    assert sum(layer["operations"] for layer in blocks) == pytest.approx(model["operations"], rel=1e-6)
    assert sum(layer["parameters"] for layer in blocks) == pytest.approx(model["parameters"], rel=1e-3)
