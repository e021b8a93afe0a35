"""The adversarial recipe: its losses, its metrics, its two optimizers, and the messages if they do not fit."""

import json
from pathlib import Path

import pytest
import torch

from samewise.recipes.adversarial import GenerativeAdversarial
from samewise.recipes.models.dcgan import DCGAN
from samewise.runner.errors import ConfigError

GAN = ["experiment=gan_digits", "debug=tiny", "tracking=none"]


def model(**settings) -> DCGAN:
    torch.manual_seed(0)
    return DCGAN(**{"noise": 4, "width": 4, **settings})


@pytest.mark.parametrize("loss", ["non_saturating", "hinge", "least_squares", "wasserstein"])
def test_losses_are_the_published_formulas(loss):
    recipe, network, batch = (
        GenerativeAdversarial(noise=4, loss=loss),
        model(),
        {"image": torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1},
    )
    discriminator, generator = recipe.phases
    assert (discriminator.name, generator.name) == ("discriminator", "generator")
    torch.manual_seed(3)
    got = recipe.loss(network.requires_grad_(False), batch, discriminator)
    torch.manual_seed(3)
    generated = network.generator(torch.randn(6, 4))
    real, fake = (network.discriminator(each).double() for each in (batch["image"], generated))
    if loss == "hinge":
        expected, wanted = (1 - real).clamp(min=0).sum() + (1 + fake).clamp(min=0).sum(), -fake.sum()
    elif loss == "least_squares":
        expected, wanted = ((1 - real) ** 2).sum() + (fake**2).sum(), ((1 - fake) ** 2).sum()
    elif loss == "wasserstein":
        expected, wanted = fake.sum() - real.sum(), -fake.sum()
        share = torch.rand(6, 1, 1, 1)
        between = share * batch["image"] + (1 - share) * generated
        slopes = torch.func.vmap(torch.func.grad(lambda image: network.discriminator(image[None])[0]))(between)
        expected += 10 * ((slopes.flatten(1).double().square().sum(1).sqrt() - 1) ** 2).sum()
    else:
        expected, wanted = -(real.sigmoid().log() + (1 - fake.sigmoid()).log()).sum(), -fake.sigmoid().log().sum()
    assert got.count == 6
    assert float(got.total) == pytest.approx(float(expected), rel=1e-5)
    assert float(sum(got.parts.values())) == pytest.approx(float(expected), rel=1e-5)
    torch.manual_seed(3)
    assert float(recipe.loss(network, batch, generator).total) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize(
    ("setting", "words"), [({"noise": 0}, r"recipe\.noise: must be at least 1"), ({"compared": 1}, r"recipe\.compared: must be at least 2")]
)
def test_impossible_settings_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        GenerativeAdversarial(**setting)


def logged(folder: Path, metric: str) -> list[float]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"][metric] for line in lines if metric in line.get("metrics", {})]


def test_it_trains_with_everything_that_a_run_may_have(samewise, tmp_path):
    """A schedule, clipping, an average of weights, parameter groups and an optimizer of another kind for one phase, all at once."""
    further = ["scheduler=cosine", "clip_norm=0.5", "callbacks=[default,ema]", "param_groups=no_decay_on_norms", "optimizer@optimizer.generator=sgd"]
    values = ["optimizer.generator.momentum=0.5", "optimizer.generator.lr=0.01", "~optimizer.generator.betas", "accumulate=2", "initialise=normal"]
    made = json.loads(samewise("train", *GAN, *further, *values, f"run_root={tmp_path}", "--json", code=0).stdout.splitlines()[-1])
    folder = Path(made["folder"])
    environment = json.loads((folder / "environment.json").read_text())
    assert [optimizer["class"] for optimizer in environment["optimizers"].values()] == ["Adam", "SGD"]
    assert {group["name"] for group in environment["optimizers"]["generator"]["groups"]} == {"norms", "rest"}
    assert made["metrics"]["final"].keys() >= {"ema/valid/energy_distance", "valid/real_accuracy"}
    for name in (
        *("discriminator/loss", "discriminator/real", "discriminator/fake", "generator/loss", "lr/generator"),
        *("lr/discriminator", "discriminator/gradient_norm", "generator/gradient_norm"),
    ):
        assert len(logged(folder, f"train/{name}")) == 20, name
    assert logged(folder, "train/lr/generator")[0] == 0.01
    assert logged(folder, "train/lr/generator")[-1] < 0.01
    assert (folder / "artifacts" / "valid" / "generated.png").is_file()
    samewise("eval", folder, "--json", code=0)
