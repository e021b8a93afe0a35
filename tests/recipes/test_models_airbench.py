"""Airbench's network: its size, its number of operations, and its initial weights."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from samewise.recipes.models.airbench import Airbench


@pytest.mark.parametrize(
    ("settings", "published"),
    # the source's tables: operations of a whole training, forwards and backwards, over the number of images in it
    [({}, 0.29e15 / (8 * 50_000)), ({"widths": [128, 384, 384]}, 1.4e15 / (15 * 50_000))],
)
def test_it_takes_the_published_number_of_operations(settings: dict[str, list[int]], published: float):
    with torch.device("meta"):
        model = Airbench(**settings)
        counter = FlopCounterMode(display=False)
        with counter:
            model(torch.empty(1, 3, 32, 32)).sum().backward()
    assert counter.get_total_flops() == pytest.approx(published, rel=0.05)


def test_it_has_the_documented_number_of_parameters():
    assert sum(parameter.numel() for parameter in Airbench().parameters()) == 1_972_792


def test_convolutions_initially_pass_on_inputs_and_the_head_has_deviation_one():
    torch.manual_seed(0)
    model = Airbench()
    image = torch.randn(1, 24, 5, 5)
    convolution = model.get_submodule("blocks.0.conv1")
    assert isinstance(convolution, nn.Conv2d)
    assert torch.equal(convolution(image)[:, :24], image)
    assert model.head.weight.std().item() == pytest.approx(1.0, rel=1e-6)
