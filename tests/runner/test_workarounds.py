"""Known faults of torch's libraries do not affect training: results are those of a plain computation in float64."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from samewise.runner.training.same_bits.workarounds import work_around


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("channels", "groups", "stride"), [(3, 1, 2), (8, 1, 2), (15, 1, (3, 2)), (16, 1, 2), (24, 3, 2)])
def test_a_strided_pointwise_convolution_agrees_with_float64(channels: int, groups: int, stride: int | tuple[int, int], bias: bool) -> None:
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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(16, 16, 3, stride=2, padding=1), (2, 16, 1, 1)),
        (nn.Conv2d(16, 5, (2, 3), stride=4, padding=1), (1, 16, 8, 3)),
        (nn.Conv2d(10, 48, 2, stride=4, padding=1, groups=2), (2, 10, 7, 3)),
        (nn.Conv2d(48, 96, 4, stride=(1, 2), padding=(3, 0), groups=48), (1, 48, 7, 4)),
        (nn.Conv1d(40, 12, 2, stride=4, padding=1), (1, 40, 3)),
        (nn.Conv3d(12, 12, 3, padding=(2, 1, 1)), (1, 12, 2, 4, 5)),
        (nn.Conv3d(4, 8, 3, stride=2, padding=(2, 0, 2), groups=4), (2, 4, 1, 5, 5)),
        (nn.Conv2d(8, 16, 1, stride=2), (2, 8, 1, 1)),
    ],
)
def test_a_convolution_of_a_small_input_in_bfloat16_agrees_with_float64(module: nn.Module, shape: tuple[int, ...], autocast: bool) -> None:
    """Without the workaround results are wrong at random on a CPU with AVX-512, depending on what was in memory."""
    torch.manual_seed(0)
    module = copy.deepcopy(module)
    expected, module = copy.deepcopy(module).double(), module if autocast else module.bfloat16()
    work_around(module, torch.device("cpu"))
    for _ in range(5):
        image = torch.randn(shape).bfloat16()
        one, right = (image.detach().to(dtype).requires_grad_() for dtype in (torch.float32 if autocast else torch.bfloat16, torch.float64))
        for waste in [torch.full((size,), torch.nan) for size in (64, 256, 1024, 4096, 16384) * 4]:
            del waste
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = module(one)
        assert output.dtype is torch.bfloat16
        weight = torch.randn(output.shape).bfloat16()
        module.zero_grad()
        expected.zero_grad()
        output.backward(weight)
        expected(right).backward(weight.double())
        torch.testing.assert_close(output.double(), expected(right), atol=0.05, rtol=0.02)
        for found, wanted in zip((one, *module.parameters()), (right, *expected.parameters()), strict=True):
            torch.testing.assert_close(found.grad.double(), wanted.grad, atol=0.02 * float(wanted.grad.abs().max()), rtol=0.02)


def test_contiguous_tensors_keep_their_bits() -> None:
    module, plain = nn.Conv2d(8, 16, 1, stride=2), nn.Conv2d(8, 16, 1, stride=2)
    plain.load_state_dict(module.state_dict())
    work_around(module, torch.device("cpu"))
    image = torch.randn(3, 8, 32, 32)
    for one in (module, plain):
        one(image).square().sum().backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)
    assert torch.equal(module(image), plain(image))


@pytest.mark.slow
def test_a_narrow_resnet_trains_in_channels_last_on_two_threads(samewise, tmp_path) -> None:
    """Without the workaround the heap of the process is damaged within a few steps, and a signal ends it."""
    tiny = ["experiment=resnet18_digits", "model.width=3", "debug=tiny", "batch_size=3", "max_steps=5", "tracking=none", "evaluate.pictures=false"]
    losses = []
    for memory_format in ("contiguous", "channels_last"):
        ended = samewise("train", *tiny, "reproducibility.threads=2", f"memory_format={memory_format}", f"run_root={tmp_path}", "--json", code=0)
        losses.append(json.loads(ended.stdout)["metrics"]["final"]["valid/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
