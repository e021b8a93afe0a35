"""timm's models as this project makes them: timm's own, by name, with weights that timm saved, and without any download by timm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from samewise.recipes.models.timm_models import timm_model
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.groups import parameter_groups
from samewise.runner.optim.initialise import initialise

pytestmark = pytest.mark.slow  # timm takes seconds to import
CONFIGS = Path(__file__).parents[2] / "configs"


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


def test_weights_are_refused_by_a_model_that_timm_would_make_with_other_arguments(tmp_path: Path) -> None:
    import timm
    from timm.models import save_for_hf

    own = timm.create_model("test_resnet", num_classes=3, global_pool="max").eval()
    save_for_hf(own, str(tmp_path), safe_serialization=True, model_args={"global_pool": "max", "num_classes": 3, "drop_rate": 0.5})
    with pytest.raises(ConfigError) as caught:
        initialise(timm_model("test_resnet", num_classes=3), {"weights": str(tmp_path)})
    (wrong,) = caught.value.problems
    assert isinstance(wrong, Problem)
    assert (wrong.path, wrong.value, wrong.expected, wrong.hint) == ("model.settings.global_pool", "avg", "max", "+model.settings.global_pool=max")
    model = timm_model("test_resnet", num_classes=3, settings={"global_pool": "max"}).eval()
    initialise(model, {"weights": str(tmp_path)})
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(model(images), own(images))


@pytest.mark.parametrize(
    ("mean", "told"), [([0.25], ["warning: transforms.eval: mean is not that of the images on which the weights were trained"]), ([0.5], [])]
)
def test_another_normalisation_than_that_of_the_weights_is_warned_of(samewise, tmp_path: Path, mean: list[float], told: list[str]) -> None:
    import timm
    from timm.models import save_for_hf

    own = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    save_for_hf(own, str(tmp_path), safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "pretrained_cfg": {**config["pretrained_cfg"], "mean": [0.5], "std": [0.5]}}))
    given = ["dataset=digits", "model=timm", "model.name=test_resnet", "transforms=images", "batch_size=64", "max_epochs=1", f"dataset.mean={mean}"]
    done = samewise("check", *given, "dataset.std=[0.5]", f"initialise.weights={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert [line.strip().partition("; hint: dataset.mean=[0.5]")[0] for line in done.stdout.splitlines() if "warning" in line] == told


@pytest.mark.parametrize("name", ["hf-hub:timm/resnet18.a1_in1k", "hf_hub:timm/resnet18", "local-dir:/tmp", "timm/resnet18", "/tmp/resnet18"])
def test_a_name_that_would_make_timm_fetch_or_read_is_refused(name: str) -> None:
    assert problem(name).message == "timm has no such model"


@pytest.mark.parametrize("argument", ["pretrained", "checkpoint_path", "cache_dir", "pretrained_cfg", "pretrained_cfg_overlay", "features_only", "scriptable"])
def test_an_argument_that_would_make_timm_load_something_is_refused(argument: str) -> None:
    assert problem("resnet18", settings={argument: "x"}).path == f"settings.{argument}"


def test_the_choices_for_fine_tuning_fit_models_from_timm() -> None:
    def choice(group: str, name: str) -> Any:
        return yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())

    model = timm_model("test_vit", num_classes=3, image_size=64)
    initialise(model, choice("initialise", "lora"))
    blocks = len(model.blocks)
    assert sum("lora_up" in name for name in model.state_dict()) == 4 * blocks
    groups = parameter_groups(model, choice("param_groups", "lora"))
    assert [(group["name"], len(group["params"])) for group in groups] == [("changes", 8 * blocks), ("head", 2)]
    (group,) = parameter_groups(timm_model("mobilenetv3_small_050", num_classes=3), choice("param_groups", "head_only"))
    assert [name for name, _ in group["params"]] == ["classifier.weight", "classifier.bias"]


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("vit_tiny_patch16_224", ["blocks"]),
        ("deit3_small_patch16_224", ["blocks"]),
        ("test_vit", ["blocks"]),
        ("resnet18", ["layer1", "layer2", "layer3", "layer4"]),
    ],
)
def test_layer_decay_has_timms_levels(name: str, blocks: list[str]) -> None:
    import timm
    from timm.optim import param_groups_layer_decay

    model = timm.create_model(name, num_classes=3)
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {names[parameter]: group["lr_scale"] for group in param_groups_layer_decay(model, layer_decay=0.75) for parameter in group["params"]}
    groups = parameter_groups(model, {"layers": {"layer_decay": 0.75, "blocks": blocks}})
    assert {name: group["lr_factor"] for group in groups for name, _ in group["params"]} == pytest.approx(expected)


def test_training_repeats_and_its_environment_names_timm(samewise, tmp_path: Path) -> None:
    given = [
        "model=timm",
        "model.name=test_vit",
        "dataset=generated_classification",
        "debug=tiny",
        "dataset.image_size=32",
        "+model.settings.drop_path_rate=0.5",
    ]
    weights = set()
    for number in range(2):
        done = samewise("train", *given, "tracking=none", "evaluate.pictures=false", "callbacks=none", "max_steps=3", f"run_root={tmp_path}/{number}", "--json")
        assert done.returncode == 0, done.stderr
        weights.add(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])
    assert len(weights) == 1
    (environment,) = (tmp_path / "0").rglob("environment.json")
    assert list(json.loads(environment.read_text())["libraries"]) == ["timm"]
