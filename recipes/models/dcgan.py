"""A generator and a discriminator for small images, after DCGAN.

Source: Radford, Metz, Chintala 2015, Unsupervised Representation Learning with DCGAN, arXiv
1511.06434.
"""

from typing import final

from torch import Tensor, nn

from samewise.recipes.models.activations import activation_module
from samewise.runner.errors import ConfigError


@final
class DCGAN(nn.Module):
    """Both networks of a generative adversarial recipe, `generator` and `discriminator`.

    The generator follows the paper: noise is projected, then doubled in size by transposed
    convolutions of 4x4 with batch norm and ReLU; the last has tanh. The discriminator mirrors it
    with leaky ReLU (0.2) and without batch norm: an image's logit depends on that image alone.
    Weights start as torch's layers do; `initialise=normal` sets the paper's N(0, 0.02), which
    trains slower on images as small as digits. Every operator is deterministic.

    Args:
        noise: Length of the noise vector.
        image_size: Height and width in pixels, a multiple of 2 ** levels.
        channels: Channels of the images.
        width: Channels next to the image; they double with each level away from it.
        levels: Number of times that the size is doubled, and halved.
        activation: The activation of both networks, a function of torch.nn.functional; None: the
            paper's.

    Raises:
        ConfigError: The image cannot be halved so often.
    """

    def __init__(
        self,
        *,
        noise: int = 64,
        image_size: int = 8,
        channels: int = 1,
        width: int = 32,
        levels: int = 2,
        activation: str | None = None,
    ) -> None:
        super().__init__()
        ConfigError.raise_if(
            levels < 1 or image_size % 2**levels,
            "model.image_size",
            f"cannot be halved {levels} times",
            image_size,
            "a multiple of 2 ** model.levels, which is at least 1",
        )
        side, deepest = image_size // 2**levels, width * 2 ** (levels - 1)
        widths = [width * 2**level for level in range(levels)]
        self.generator = nn.Sequential(
            # Batch norm follows, which would remove a bias
            nn.Linear(noise, deepest * side * side, bias=False),
            nn.Unflatten(1, (deepest, side, side)),
            nn.BatchNorm2d(deepest),
            activation_module(activation or "relu"),
            *(
                layer
                for inputs, outputs in zip(widths[:0:-1], widths[-2::-1], strict=True)
                for layer in _upsampling(inputs, outputs, activation or "relu")
            ),
            nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            *(
                layer
                for inputs, outputs in zip([channels, *widths], widths, strict=False)
                for layer in _downsampling(inputs, outputs, activation)
            ),
            nn.Flatten(),
            nn.Linear(deepest * side * side, 1),
            nn.Flatten(0),
        )

    def forward(self, noise: Tensor, images: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the discriminator's outputs for real and for generated images.

        Args:
            noise: float32[B, noise].
            images: float32[B, C, H, W], real images in [-1, 1]; None: no real images.

        Returns:
            Logits of being real: float32[B] of `images` (empty without them), and float32[B] of the
                images generated from `noise`.
        """
        fake = self.discriminator(self.generator(noise))
        return fake[:0] if images is None else self.discriminator(images), fake


def _upsampling(inputs: int, outputs: int, activation: str) -> list[nn.Module]:
    return [
        nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        activation_module(activation),
    ]


def _downsampling(inputs: int, outputs: int, activation: str | None) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2) if activation is None else activation_module(activation),
    ]
