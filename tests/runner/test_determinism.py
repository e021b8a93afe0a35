"""Recurrent layers of cuDNN are used if they repeat to the bit, and refused by name if they do not."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from samewise.runner.data import streams
from samewise.runner.errors import ConfigError
from samewise.runner.training.same_bits.determinism import refused_recurrence, require_deterministic


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "cuBLAS's own choice"),
        ({"CUBLAS_WORKSPACE_CONFIG": ""}, "cuBLAS's own choice"),
        ({"CUBLAS_WORKSPACE_CONFIG": "4096"}, "cuBLAS's own choice"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, "several sizes"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "cuBLAS's own choice"),
    ],
)
def test_settings_that_let_cublas_choose_are_refused(variables, words):
    refused = refused_recurrence(variables)
    assert refused is not None
    assert words in refused[0]


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3)
        self.body = nn.ModuleDict({"rnn1": nn.GRU(4, 8), "cell": nn.GRUCell(4, 8), "rnn2": nn.LSTM(4, 8)})


def test_each_refused_layer_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    strict, cuda = SimpleNamespace(deterministic=True), torch.device("cuda")
    require_deterministic(nn.Conv1d(4, 4, 3), cuda, strict)
    with pytest.raises(ConfigError) as refused:
        require_deterministic(Speaker(), cuda, strict)
    assert [problem.path for problem in refused.value.problems] == ["model.body.rnn1", "model.body.rnn2"]
    assert "cuDNN's GRU does not repeat" in refused.value.problems[0].message
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in refused.value.problems[0].expected
    with pytest.raises(ConfigError) as refused:
        require_deterministic(nn.RNN(2, 2), cuda, strict)
    assert refused.value.problems[0].path == "model"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_cudnn_repeats_forward_and_backward_passes_with_dropout(kind):
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    torch.manual_seed(0)
    layer = kind(128, 512, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True).cuda()
    heard = torch.randn(32, 200, 128, device="cuda")
    first = None
    for _ in range(5):
        with streams.scope(0, "step", 7):
            layer.zero_grad()
            spoken, _ = layer(heard)
            spoken.square().sum().backward()
        found = [spoken, *(parameter.grad.clone() for parameter in layer.parameters())]
        first = first or found
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True))
