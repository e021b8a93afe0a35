"""Wav2Letter in any size, unaffected by a batch's padding.

The layers are torchaudio's, with configurable widths, kernels and normalisation.
"""

from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from samewise.recipes.models.activations import activation_function

Norm = Literal["none", "layer"]


@final
class Wav2Letter(nn.Module):
    """Convolutions in time: float32[B, num_features, N] to log-probabilities [B, num_classes, M].

    Source: Collobert et al. 2016, Wav2Letter, arXiv 1609.03193. With the defaults, these are the
    layers of `torchaudio.models.Wav2Letter(input_type="mfcc")`, weight by weight, except for a
    rectifier after its last layer, which keeps all scores from 0 up. Positions beyond an
    utterance's end are set to 0 before each convolution, so an utterance has the same output alone
    and in a padded batch; torchaudio's biases spread from the padding into the last frames.

    Args:
        num_classes: Number of letters, plus the blank.
        num_features: Features of each frame.
        width: Channels of the lower layers.
        top_width: Channels of the last two hidden layers.
        depth: Number of layers between the first and the top.
        first_kernel: Frames in the first layer's kernel; its stride is 2.
        kernel: Frames in a middle layer's kernel; an odd number keeps their number.
        top_kernel: Frames in the kernel of the first top layer.
        norm: "none", as published, or "layer": layer normalisation of each frame's channels (arXiv
            1607.06450), which makes training faster.
        dropout: Share of channel values dropped before the top layers.
        activation: The activation of the hidden layers, a function of torch.nn.functional.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        num_features: int,
        width: int = 250,
        top_width: int = 2000,
        depth: int = 7,
        first_kernel: int = 48,
        kernel: int = 7,
        top_kernel: int = 32,
        norm: Norm = "none",
        dropout: float = 0.0,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        self._activate = activation_function(activation)
        sizes = [(num_features, width, first_kernel, 2, (first_kernel - 1) // 2)]
        sizes += [(width, width, kernel, 1, kernel // 2)] * depth
        sizes += [
            (width, top_width, top_kernel, 1, top_kernel // 2),
            (top_width, top_width, 1, 1, 0),
        ]
        self.layers = nn.ModuleList(
            nn.Conv1d(inner, outer, size, stride, padding)
            for inner, outer, size, stride, padding in sizes
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(outer) if norm == "layer" else nn.Identity() for _, outer, *_ in sizes
        )
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Conv1d(top_width, num_classes, 1)
        self._top = len(sizes) - 2

    def forward(self, features: Tensor, length: Tensor) -> Tensor:
        """Return log-probabilities float32[B, num_classes, M].

        Args:
            features: float32[B, num_features, N].
            length: int64[B], valid frames of `features`.
        """
        hidden = features
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            hidden = layer(hidden if number < self._top else self.dropout(hidden))
            length = length_after(layer, length)
            hidden = (
                norm(hidden.transpose(1, 2)).transpose(1, 2)
                if isinstance(norm, nn.LayerNorm)
                else hidden
            )
            inside = torch.arange(hidden.shape[-1], device=length.device) < length[:, None]
            hidden = torch.where(inside[:, None], self._activate(hidden), 0.0)
        return self.last(hidden).log_softmax(1)

    def output_lengths(self, length: Tensor) -> Tensor:
        """Return the number of output frames without padding, int64[B]."""
        return length_after_all(
            [layer for layer in self.layers if isinstance(layer, nn.Conv1d)], length
        )


def shortest_input(layers: Sequence[nn.Conv1d]) -> int:
    """Return the number of frames from which 1-d convolutions in sequence make one."""
    shortest = 1
    for layer in reversed(layers):
        margins = 2 * layer.padding[0] if isinstance(layer.padding, tuple) else 0
        shortest = max(
            1,
            (shortest - 1) * layer.stride[0]
            + layer.dilation[0] * (layer.kernel_size[0] - 1)
            + 1
            - margins,
        )
    return shortest


def length_after_all(layers: Sequence[nn.Conv1d], length: Tensor) -> Tensor:
    """Return the number of frames after 1-d convolutions in sequence, int64[...].

    It is 0 if one of them has fewer frames, with its padding, than its kernel takes.
    """
    after = length
    for layer in layers:
        after = length_after(layer, after)
    return torch.where(length < shortest_input(layers), 0, after)


def length_after(layer: Any, length: Tensor) -> Tensor:
    """Return the number of frames after a 1-d convolution, int64[...]."""
    return (
        length + 2 * layer.padding[0] - layer.dilation[0] * (layer.kernel_size[0] - 1) - 1
    ) // layer.stride[0] + 1
