"""Autoencoders: the divergence of a variational one, metrics for any batch size, and a model that does not fit."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torchmetrics.functional.image import peak_signal_noise_ratio

from samewise.recipes.autoencoder import Autoencoding
from samewise.recipes.models.conv_autoencoder import ConvAutoencoder
from samewise.recipes.parts.losses import BinaryCrossEntropy
from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Phase

IMAGES = torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_a_variational_loss_is_cross_entropy_plus_divergence_of_drawn_codes() -> None:
    """With one hidden layer, the model of PyTorch's examples."""
    torch.manual_seed(0)
    model = ConvAutoencoder(image_size=8, widths=[], hidden=12, code=3, variational=True)
    assert [type(layer).__name__ for layer in model.encoder] == ["Flatten", "Linear", "ReLU", "Linear"]
    torch.manual_seed(5)
    loss = Autoencoding(loss=BinaryCrossEntropy()).loss(model, {"image": IMAGES}, Phase())
    torch.manual_seed(5)
    mean, log_variance = model.encoder(IMAGES).chunk(2, 1)
    divergence = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(0.0, 1.0)).sum()
    drawn = model.decoder(mean + torch.randn(9, 3) * (log_variance / 2).exp()).sigmoid()
    error = torch.nn.functional.binary_cross_entropy(drawn, IMAGES, reduction="sum")
    torch.testing.assert_close(loss.total, error + divergence)
    torch.testing.assert_close(loss.parts["divergence"], divergence.detach())
    torch.testing.assert_close(model.encode(IMAGES), mean)


def test_metrics_are_the_same_for_any_batch_size() -> None:
    recipe, model = Autoencoding(peak=2.0), torch.nn.Hardtanh(0.2, 0.9)
    scores = []
    for size in (9, 4):
        scored = recipe.scores(None)
        for part in IMAGES.split(size):
            scored.add(recipe.measure(model, {"image": part}))
        scores.append(scored.compute())
    assert scores[0] == scores[1]
    expected = [peak_signal_noise_ratio(model(image), image, data_range=2.0).item() for image in IMAGES]
    assert scores[0]["psnr"] == pytest.approx(sum(expected) / 9, rel=1e-5)
    assert scores[0]["loss"] == scores[0]["mse"] == pytest.approx(((model(IMAGES) - IMAGES) ** 2).mean().item(), rel=1e-5)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.image_size: is 16, but the images are 8 x 8(.|\n)*transforms.size=16"):
        Autoencoding().loss(ConvAutoencoder(image_size=16), {"image": IMAGES}, Phase())


def test_a_size_that_cannot_be_halved_is_refused() -> None:
    batch = {"image": torch.rand(2, 1, 10, 10)}
    with pytest.raises(ConfigError, match=r"model: does not return images(.|\n)*multiple of 2 for each of model\.widths"):
        Autoencoding().loss(ConvAutoencoder(image_size=10, widths=[4, 8]), batch, Phase())
