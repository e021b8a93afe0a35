"""Generates speech with a WaveRNN, sample by sample, for any representation of samples
(torchaudio's `infer` supports only labels).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchaudio.models import WaveRNN

from samewise.runner.errors import ConfigError, Problem


@torch.no_grad()
def speak(model: nn.Module, mel: Tensor, drawn: Callable[[Tensor], Tensor]) -> Tensor:
    """float32[B, S] in the model's representation, drawn one sample after another (Kalchbrenner et
    al., arXiv 1802.08435).

    What does not depend on earlier samples is computed for all times at once: a time step is then
    two GRU cells and three small products.

    Args:
        model: A torchaudio WaveRNN.
        mel: float32[B, n_mels, N], which gives S = (N - kernel_size + 1) * hop_length samples, as
            in training.
        drawn: From outputs float32[B, n_classes] to the next sample float32[B].
    """
    if not isinstance(model, WaveRNN):
        raise ConfigError(
            Problem(
                "model",
                "cannot generate sample by sample",
                type(model).__name__,
                "torchaudio.models.WaveRNN",
            )
        )
    with torch.autocast(mel.device.type, enabled=False):
        known, weights = conditioning(model, mel.float()), _weights(model)
        sample = torch.zeros(len(mel), device=mel.device)
        state1 = state2 = torch.zeros(len(mel), model.n_rnn, device=mel.device)
        spoken = list[Tensor]()
        for at_once in zip(*known.values(), strict=True):
            outputs, state1, state2 = _step(weights, sample, state1, state2, *at_once)
            sample = drawn(outputs)
            spoken.append(sample)
        return torch.stack(spoken, 1)


def conditioning(model: WaveRNN, mel: Tensor) -> dict[str, Tensor]:
    """The part that does not depend on earlier samples, for S times: `entry` [S, B, n_rnn],
    `second` [S, B, n_aux], `third` and `fourth` [S, B, n_fc].

    Args:
        model: It.
        mel: float32[B, n_mels, N].
    """
    spectrum, aux = model.upsample(mel)
    first, second, third, fourth = aux.permute(2, 0, 1).split(model.n_aux, dim=2)[:4]
    width, fc = model.n_rnn, model.fc1.out_features
    return {
        "entry": torch.cat([spectrum.permute(2, 0, 1), first], 2) @ model.fc.weight[:, 1:].t()
        + model.fc.bias,
        "second": second,
        "third": third @ model.fc1.weight[:, width:].t() + model.fc1.bias,
        "fourth": fourth @ model.fc2.weight[:, fc:].t() + model.fc2.bias,
    }


def step(
    model: WaveRNN, sample: Tensor, state1: Tensor, state2: Tensor, *known: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step: the outputs float32[B, n_classes] for the next sample, and the new states of the
    two cells.

    Args:
        model: It.
        sample: float32[B], the one before; zeros at first.
        state1: float32[B, n_rnn], likewise.
        state2: Likewise.
        known: What `conditioning` gives for this time.
    """
    return _step(_weights(model), sample, state1, state2, *known)


_Weights = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor, Tensor, Tensor]


def _weights(model: WaveRNN) -> _Weights:
    """The weights of a step."""
    fc1, fc2 = (
        model.fc1.weight[:, : model.n_rnn].t(),
        model.fc2.weight[:, : model.fc1.out_features].t(),
    )
    return (
        model.fc.weight[:, 0],
        _cell(model.rnn1),
        _cell(model.rnn2),
        fc1,
        fc2,
        model.fc3.weight.t(),
        model.fc3.bias,
    )


def _step(
    weights: _Weights,
    sample: Tensor,
    state1: Tensor,
    state2: Tensor,
    entry: Tensor,
    second: Tensor,
    third: Tensor,
    fourth: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    heard, cell1, cell2, fc1, fc2, fc3, bias = weights
    x = torch.addcmul(entry, sample[:, None], heard)
    state1 = torch.gru_cell(x, state1, *cell1)
    x = x + state1
    state2 = torch.gru_cell(torch.cat([x, second], 1), state2, *cell2)
    x = x + state2
    x = torch.addmm(third, x, fc1).relu_()
    x = torch.addmm(fourth, x, fc2).relu_()
    return torch.addmm(bias, x, fc3), state1, state2


def _cell(rnn: nn.GRU) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0
