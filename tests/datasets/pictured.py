"""Pictures for tests of batch transforms. Tests import this as `samewise_datasets_pictured`."""

import torch
from torch import Tensor


def pictures(size: int = 24, height: int = 33, width: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    smooth = torch.nn.functional.interpolate(torch.rand(size, 3, 8, 10, generator=generator), size=(height, width), mode="bicubic").clamp(0, 1)
    return (smooth * 255).round().to(torch.uint8)
