"""timm's models as this project makes them: timm's own, by name, with weights that timm saved, and without any download by timm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samewise.recipes.models.timm_models import timm_model
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.initialise import initialise

pytestmark = pytest.mark.slow  # timm takes seconds to import


def problem(name: str, **more: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        timm_model(name, num_classes=3, **more)
    (one,) = caught.value.problems
    assert isinstance(one, Problem)
    return one


def test_a_model_is_timms_own_with_the_weights_that_timm_saved(tmp_path: Path) -> None:
    import timm
    from timm.models import save_for_hf

    torch.manual_seed(1)
    own = timm.create_model("test_vit", num_classes=3, img_size=64).eval()
    save_for_hf(own, str(tmp_path), safe_serialization=True)
    assert (tmp_path / "model.safetensors").is_file()
    model = timm_model("test_vit", num_classes=3, image_size=64).eval()
    initialise(model, {"weights": str(tmp_path)})
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(model(images), own(images))
    other = timm_model("test_vit", num_classes=5, image_size=64)
    initialise(other, {"weights": str(tmp_path), "exclude": ["head.*"]})
    assert torch.equal(other.blocks[0].attn.qkv.weight, own.blocks[0].attn.qkv.weight)
    with pytest.raises(ConfigError, match=r"model\.name=test_vit"):
        initialise(timm_model("test_vit2", num_classes=3, image_size=64), {"weights": str(tmp_path)})


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18.a1_in1k", "hf_hub:timm/resnet18", "local-dir:/tmp", "timm/resnet18", "/tmp/resnet18"])
def test_a_name_that_would_make_timm_fetch_or_read_is_refused(name: str) -> None:
    assert problem(name).message == "timm has no such model"


@pytest.mark.parametrize("argument", ["pretrained", "checkpoint_path", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay", "features_only", "scriptable"])
def test_an_argument_that_would_make_timm_load_something_is_refused(argument: str) -> None:
    assert problem("resnet18", settings={argument: "x"}).path == f"settings.{argument}"


def test_training_repeats_and_its_environment_names_timm(samewise, tmp_path: Path) -> None:
    given = [
        *("model=timm", "model.name=test_vit", "dataset=generated_classification", "debug=tiny"),
        *("dataset.image_size=32", "+model.settings.drop_path_rate=0.5"),
    ]
    weights = set()
    for number in range(2):
        done = samewise(
            "train", *given, "tracking=none", "evaluate.pictures=false", "callbacks=none", "max_steps=3", f"run_root={tmp_path}/{number}", "--json", code=0
        )
        weights.add(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])
    assert len(weights) == 1
    (environment,) = (tmp_path / "0").rglob("environment.json")
    assert list(json.loads(environment.read_text())["libraries"]) == ["timm"]
