"""Known faults of torch's libraries do not reach a training: results are those of a plain computation in float64."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from samewise.runner.training.workarounds import work_around


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("channels", "groups", "stride"), [(3, 1, 2), (8, 1, 2), (15, 1, (3, 2)), (16, 1, 2), (24, 3, 2)])
def test_a_strided_pointwise_convolution_has_the_gradients_of_float64(channels: int, groups: int, stride: int | tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Conv2d(channels, 24, 1, stride=stride, groups=groups, bias=bias).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    work_around(module, torch.device("cpu"))
    image = torch.randn(3, channels, 32, 31).contiguous(memory_format=torch.channels_last).requires_grad_()
    output = module(image)
    weight = torch.randn_like(output)
    (output * weight).sum().backward()
    given = [None if one is None else one.detach().double().requires_grad_() for one in (image, module.weight, module.bias)]
    expected = conv2d(given[0], given[1], given[2], stride=stride, groups=groups)
    (expected * weight.double()).sum().backward()
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    for found, right in zip((image, module.weight, module.bias), given, strict=True):
        if right is not None:
            torch.testing.assert_close(found.grad.double(), right.grad, atol=2e-4, rtol=1e-5)


def test_contiguous_tensors_have_the_bits_that_they_had() -> None:
    module, plain = nn.Conv2d(8, 16, 1, stride=2), nn.Conv2d(8, 16, 1, stride=2)
    plain.load_state_dict(module.state_dict())
    work_around(module, torch.device("cpu"))
    image = torch.randn(3, 8, 32, 32)
    for one in (module, plain):
        one(image).square().sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert torch.equal(module(image), plain(image))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_narrow_resnet_trains_in_channels_last_on_two_threads(samewise, tmp_path) -> None:
    """Without the workaround the heap of the process is damaged within a few steps, and it ends by a signal."""
    tiny = ["experiment=resnet18_digits", "model.width=3", "debug=tiny", "batch_size=3", "max_steps=5", "tracking=none", "evaluate.pictures=false"]
    losses = []
    for memory_format in ("contiguous", "channels_last"):
        ended = samewise("train", *tiny, "reproducibility.threads=2", f"memory_format={memory_format}", f"run_root={tmp_path}", "--json")
        assert ended.returncode == 0, ended.stderr
        losses.append(json.loads(ended.stdout)["metrics"]["final"]["valid/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
