"""An autoencoder for small images: convolutions and linear layers to a code, and back."""

from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

from samewise.recipes.models.activations import activation_module
from samewise.runner.errors import ConfigError, Problem


@final
class ConvAutoencoder(nn.Module):
    """Encodes images float32[B, C, H, H] as float32[B, code], and decodes them to their shape.

    The last layer has no activation: with loss=bce the recipe applies a sigmoid. Every operator is
    deterministic.

    Args:
        channels: C.
        image_size: H, a multiple of 2 for each of `widths`.
        widths: Channels of each convolution of 4x4, which halves the size; empty: none.
        hidden: Outputs of a linear layer between convolutions and code; None: there is none.
        code: Numbers in a code.
        variational: Whether a code is drawn from a normal distribution (Kingma, Welling 2013, arXiv
            1312.6114); the model then also returns its divergence from N(0, 1) in nats, float32[B].
            In evaluation, a code is the mean.
        activation: The activation, a function of torch.nn.functional.

    Raises:
        ConfigError: In `forward`, images of another size.
    """

    def __init__(
        self,
        *,
        channels: int = 1,
        image_size: int = 28,
        widths: Sequence[int] = (16, 32),
        hidden: int | None = None,
        code: int = 16,
        variational: bool = False,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self.image_size, self.code, self.variational = image_size, code, variational
        planes, side = [channels, *widths], image_size // 2 ** len(widths)
        flat = [planes[-1] * side**2, *([hidden] if hidden else [])]
        down, up = list[nn.Module](), list[nn.Module]()
        for inner, outer in pairwise(planes):
            down += [nn.Conv2d(inner, outer, 4, 2, 1), activation_module(activation)]
            up = [activation_module(activation), nn.ConvTranspose2d(outer, inner, 4, 2, 1), *up]
        down, up = [*down, nn.Flatten()], [nn.Unflatten(1, (planes[-1], side, side)), *up]
        for inner, outer in pairwise(flat):
            down += [nn.Linear(inner, outer), activation_module(activation)]
            up = [activation_module(activation), nn.Linear(outer, inner), *up]
        self.encoder = nn.Sequential(*down, nn.Linear(flat[-1], code * (1 + variational)))
        self.decoder = nn.Sequential(nn.Linear(code, flat[-1]), *up)

    def encode(self, image: Tensor) -> Tensor:
        """Return codes float32[B, code]; of a variational autoencoder their means."""
        return self.encoder(image)[:, : self.code]

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        side, (height, width) = self.image_size, image.shape[2:]
        if not height == width == side:
            raise ConfigError(
                Problem(
                    "model.image_size",
                    f"is {side}, but the images are {height} x {width}",
                    hint=f"resize them: transforms=imagenet transforms.size={side} "
                    f"transforms.eval_resize={side}; dataset.image_size sets another size",
                )
            )
        if not self.variational:
            return self.decoder(self.encoder(image))
        mean, log_variance = self.encoder(image).chunk(2, 1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).sum(1)
        if self.training:
            # On the CPU, so that every device gets the same numbers
            noise = torch.randn(mean.shape).to(mean.device, non_blocking=True)
            mean = mean + noise * (0.5 * log_variance).exp()
        return self.decoder(mean), divergence
