"""Generates speech with a WaveRNN, sample by sample, for any representation of samples.

torchaudio's `infer` supports only labels.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchaudio.models import WaveRNN

from samewise.runner.errors import ConfigError


@torch.no_grad()
def speak(model: nn.Module, mel: Tensor, drawn: Callable[[Tensor], Tensor]) -> Tensor:
    """Draw one sample after another: float32[B, S] in the model's representation.

    Source: Kalchbrenner et al. 2018, Efficient Neural Audio Synthesis, arXiv 1802.08435.

    Args:
        model: A torchaudio WaveRNN.
        mel: float32[B, n_mels, N], for S = (N - kernel_size + 1) * hop_length samples, as in
            training.
        drawn: Draws the next samples float32[B] from outputs float32[B, n_classes].

    Raises:
        ConfigError: The model is not a WaveRNN.
    """
    ConfigError.raise_if(
        not isinstance(model, WaveRNN),
        "model",
        "cannot generate sample by sample",
        type(model).__name__,
        "torchaudio.models.WaveRNN",
    )
    # The part that does not depend on earlier samples is computed for all times at once: a time
    # step is then two GRU cells and three small products
    with torch.autocast(mel.device.type, enabled=False):
        conditions, weights = conditioning(model, mel.float()), _weights(model)
        sample = torch.zeros(len(mel), device=mel.device)
        state1 = state2 = torch.zeros(len(mel), model.n_rnn, device=mel.device)
        spoken = list[Tensor]()
        for step_conditions in zip(*conditions.values(), strict=True):
            outputs, state1, state2 = _step(weights, sample, state1, state2, *step_conditions)
            sample = drawn(outputs)
            spoken.append(sample)
        return torch.stack(spoken, 1)


def conditioning(model: WaveRNN, mel: Tensor) -> dict[str, Tensor]:
    """Return the part of the steps that does not depend on earlier samples, for S times.

    Args:
        model: The WaveRNN.
        mel: float32[B, n_mels, N].

    Returns:
        `entry` [S, B, n_rnn], `second` [S, B, n_aux], `third` and `fourth` [S, B, n_fc].
    """
    spectrum, aux = model.upsample(mel)
    first, second, third, fourth = aux.permute(2, 0, 1).split(model.n_aux, dim=2)[:4]
    width, fc = model.n_rnn, model.fc1.out_features
    return {
        # The first column belongs to the previous sample
        "entry": torch.cat([spectrum.permute(2, 0, 1), first], 2) @ model.fc.weight[:, 1:].t()
        + model.fc.bias,
        "second": second,
        "third": third @ model.fc1.weight[:, width:].t() + model.fc1.bias,
        "fourth": fourth @ model.fc2.weight[:, fc:].t() + model.fc2.bias,
    }


def step(
    model: WaveRNN, sample: Tensor, state1: Tensor, state2: Tensor, *conditions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs float32[B, n_classes] for the next sample, and the cells' new states.

    Args:
        model: The WaveRNN.
        sample: float32[B], the previous sample; zeros at first.
        state1: float32[B, n_rnn], state of the first cell; zeros at first.
        state2: float32[B, n_rnn], state of the second cell; zeros at first.
        conditions: The tensors of `conditioning` for this time.
    """
    return _step(_weights(model), sample, state1, state2, *conditions)


_Weights = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor, Tensor, Tensor]


def _weights(model: WaveRNN) -> _Weights:
    """Return the weights of a step."""
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
    sample_weight, cell1, cell2, fc1, fc2, fc3, bias = weights
    hidden = torch.addcmul(entry, sample[:, None], sample_weight)
    state1 = torch.gru_cell(hidden, state1, *cell1)
    hidden = hidden + state1
    state2 = torch.gru_cell(torch.cat([hidden, second], 1), state2, *cell2)
    hidden = hidden + state2
    hidden = torch.addmm(third, hidden, fc1).relu_()
    hidden = torch.addmm(fourth, hidden, fc2).relu_()
    return torch.addmm(bias, hidden, fc3), state1, state2


def _cell(rnn: nn.GRU) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0
