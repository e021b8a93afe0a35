"""Speech from a WaveRNN, sample by sample, for any way of writing samples down (torchaudio's own `infer` knows labels only)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchaudio.models import WaveRNN

from samewise.runner.errors import ConfigError, Problem


@torch.no_grad()
def speak(model: nn.Module, mel: Tensor, drawn: Callable[[Tensor], Tensor]) -> Tensor:
    """float32[B, S], as the model reads samples, drawn one after the other (Kalchbrenner et al., arXiv 1802.08435).

    What does not depend on earlier samples is computed for all times at once: a time step is then two GRU cells and three small products.

    Args:
        model: A torchaudio WaveRNN.
        mel: float32[B, n_mels, N], which gives S = (N - kernel_size + 1) * hop_length samples, as in training.
        drawn: From outputs float32[B, n_classes] to the next sample float32[B].
    """
    if not isinstance(model, WaveRNN):
        raise ConfigError(Problem("model", "cannot generate sample by sample", type(model).__name__, "torchaudio.models.WaveRNN"))
    with torch.autocast(mel.device.type, enabled=False):
        spectrum, aux = model.upsample(mel.float())
        first, second, third, fourth = aux.permute(2, 0, 1).split(model.n_aux, dim=2)[:4]
        width = model.n_rnn
        entry = torch.cat([spectrum.permute(2, 0, 1), first], 2) @ model.fc.weight[:, 1:].t() + model.fc.bias
        fc1, fc2 = model.fc1.weight[:, :width].t(), model.fc2.weight[:, : model.fc1.out_features].t()
        third = third @ model.fc1.weight[:, width:].t() + model.fc1.bias
        fourth = fourth @ model.fc2.weight[:, model.fc1.out_features :].t() + model.fc2.bias
        heard = model.fc.weight[:, 0]
        cell1, cell2 = _cell(model.rnn1), _cell(model.rnn2)

        sample = torch.zeros(len(mel), device=mel.device)
        state1 = state2 = torch.zeros(len(mel), width, device=mel.device)
        spoken = list[Tensor]()
        for time in range(len(entry)):
            x = torch.addcmul(entry[time], sample[:, None], heard)
            state1 = torch.gru_cell(x, state1, *cell1)
            x = x + state1
            state2 = torch.gru_cell(torch.cat([x, second[time]], 1), state2, *cell2)
            x = x + state2
            x = torch.addmm(third[time], x, fc1).relu_()
            x = torch.addmm(fourth[time], x, fc2).relu_()
            sample = drawn(torch.addmm(model.fc3.bias, x, model.fc3.weight.t()))
            spoken.append(sample)
        return torch.stack(spoken, 1)


def _cell(rnn: nn.GRU) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rnn.weight_ih_l0, rnn.weight_hh_l0, rnn.bias_ih_l0, rnn.bias_hh_l0
