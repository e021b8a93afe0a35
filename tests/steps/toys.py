"""Small models with every kind of layer that the zoo has, data whose samples count unevenly, and a recipe of one or two phases.

Activations are smooth where possible, so that a float32 result is as close to the float64 one as its sums are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchvision.ops import FrozenBatchNorm2d

from samewise.runner.interfaces import Batch, Loss, Phase, Recipe, Scores

CLASSES = 5


class Toys(Dataset[Any]):
    """`samples` images float32[3, 8, 8] with a label and a weight by which the sample counts.

    Args:
        samples: The number of images.
        uneven: Weights of 1 to 3; otherwise all are 1.
    """

    def __init__(self, *, samples: int, uneven: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.images = torch.randn(samples, 3, 8, 8, generator=generator)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        self.weights = torch.randint(1, 4, (samples,), generator=generator).float() if uneven else torch.ones(samples)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "label": self.labels[index], "weight": self.weights[index]}


class Image(nn.Module):
    """Residual blocks with batch norm, as a ResNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.SiLU())
        self.body = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.skip = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.GELU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        value = self.body(self.stem(images))
        return self.head(value + self.skip(value))


class Pyramid(nn.Module):
    """Frozen batch norm, group norm, upsampling and convolutions with biases, as a RetinaNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), FrozenBatchNorm2d(6), nn.Tanh())
        self.body = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.side = nn.Conv2d(6, 8, 1)
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, CLASSES, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        fine = self.stem(images)
        value = self.side(fine) + F.interpolate(self.body(fine), scale_factor=2.0, mode="nearest")
        return self.head(value).mean((2, 3))


class Letters(nn.Module):
    """1-d convolutions over frames, as Wav2Letter's; its logits are normalised over the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(12, 10, 5, stride=2, padding=2), nn.SiLU())
        self.body = nn.Sequential(nn.Conv1d(10, 10, 3, padding=1, bias=False), nn.LayerNorm(8), nn.Dropout(0.0), nn.SiLU())
        self.head = nn.Conv1d(10, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images.reshape(-1, 12, 16)))).mean(2)


class Masks(nn.Module):
    """Encoder, depthwise convolutions, global norms, PReLU and a transposed convolution, as ConvTasNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 8, stride=4, bias=False)
        self.body = nn.Sequential(nn.GroupNorm(1, 8), nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=8), nn.PReLU(), nn.GroupNorm(1, 8), nn.Conv1d(8, 8, 1))
        self.head = nn.ConvTranspose1d(8, CLASSES, 8, stride=4)

    def forward(self, images: Tensor) -> Tensor:
        value = self.stem(images.flatten(1).unsqueeze(1))
        return self.head(value * torch.sigmoid(self.body(value))).square().mean(2)


class Waves(nn.Module):
    """An embedding, 1-d batch norm and recurrent layers, as WaveRNN's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(24, 8, 1, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        self.body = nn.GRU(8, 6, batch_first=True)
        self.other = nn.LSTM(6, 6, batch_first=True)
        self.embedding = nn.Embedding(4, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        value, _ = self.body(self.stem(images.reshape(-1, 24, 8)).transpose(1, 2))
        value, _ = self.other(value)
        place = (images[:, 0, 0, 0] > 0).long()
        return self.head(value[:, -1] + self.embedding(place))


class Matrices(nn.Module):
    """Nothing but matrices, the only parameters that Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(192, 12, bias=False)
        self.body = nn.Sequential(nn.Tanh(), nn.Linear(12, 8, bias=False), nn.Tanh())
        self.head = nn.Linear(8, CLASSES, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images.flatten(1))))


class Tied(nn.Module):
    """Two layers with the same matrix, as a language model's embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(192, 12), nn.Tanh())
        self.body, self.side = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.side.weight = self.body.weight
        self.head = nn.Linear(12, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.tanh(self.side(torch.tanh(self.body(self.stem(images.flatten(1)))))))


class Offsets(nn.Module):
    """Adds vectors whose gradients are the same values, which autograd gives to all of them in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.first, self.rest = nn.Parameter(torch.zeros(12)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(11))

    def forward(self, value: Tensor) -> Tensor:
        return value + (self.whole[None] + torch.cat([self.first, self.rest])[None])


class Sums(nn.Module):
    """Offsets between linear layers, as the position embeddings and class token of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(192, 12)
        self.body = Offsets()
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(12, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images.flatten(1))))


MODELS: dict[str, type[nn.Module]] = {one.__name__: one for one in (Image, Pyramid, Letters, Masks, Waves, Matrices, Tied, Sums)}


def total_loss(model: Any, batch: Batch, phase: int) -> Tensor:
    """The sum over the batch: cross-entropy by weight, and in a second phase the logits' squares."""
    logits = model(batch["image"])
    logits = logits if logits.dtype is torch.float64 else logits.float()
    if phase:
        return (logits.square().mean(1) * batch["weight"]).sum()
    return (F.cross_entropy(logits, batch["label"], reduction="none") * batch["weight"]).sum()


class ToyScores(Scores):
    """The mean of the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def add(self, measured: float) -> None:
        self.losses.append(measured)

    def compute(self) -> dict[str, float]:
        return {"loss": sum(self.losses) / len(self.losses)}


class ToyRecipe(Recipe):
    """Cross-entropy over weighted samples.

    Args:
        parts: For each phase the parts of the model that it trains.
    """

    def __init__(self, *, parts: list[list[str]] | None = None) -> None:
        self.parts = parts or []

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(Phase(f"phase{number}", tuple(names)) for number, names in enumerate(self.parts)) or (Phase(),)

    def loss(self, model: nn.Module, batch: Batch, phase: Phase) -> Loss:
        return Loss(total_loss(model, batch, int(phase.name.endswith("1"))), count=batch["weight"].sum().item())

    def measure(self, model: nn.Module, batch: Batch) -> float:
        return total_loss(model, batch, 0).item()

    def scores(self, dataset: Any) -> Scores:
        return ToyScores()
