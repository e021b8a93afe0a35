"""A whitening first convolution: its outputs on training images are uncorrelated with variance 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Images = Callable[[int], Tensor]
"""Gives so many training images, float[B, C, H, W], as a model is called with them in evaluation."""


def whitening_(tensor: Tensor, images: Images | None, *, samples: int = 5000, eps: float = 5e-4) -> Tensor:
    """Fill a convolution's weight with the eigenvectors of its patches' covariance, each divided by the root of its eigenvalue, then with their negatives.

    After D. Page (https://myrtle.ai/learn/how-to-train-your-resnet/) and T. Balsam (https://github.com/tysam-code/hlb-CIFAR10); K. Jordan 2024 (arXiv
    2404.00498), section 3.2. As there the covariance is taken around zero, which is the mean of normalised images. Computed in float64; the largest eigenvalue
    comes first, and of an eigenvector, whose sign is free, the largest element is positive. ValueError if the weight has another shape, the images have other
    channels, or a number is out of its range.

    Args:
        tensor: float[2 n, C, h, w] with n = C h w, or float[n, C, h, w]: then without the negatives. Changed in place.
        images: Where images come from; None: the weight stays as it is.
        samples: How many images are looked at; no more than there are.
        eps: Added to each eigenvalue, so that directions in which patches hardly differ are not blown up.
    """
    size = tensor[0].numel()
    if tensor.ndim != 4 or len(tensor) not in (size, 2 * size):
        raise ValueError("whitening needs a convolution [n or 2 n, C, h, w] with n = C h w")
    if samples < 1 or eps < 0:
        raise ValueError("samples must be at least 1, and eps at least 0")
    if images is None:
        return tensor
    seen = images(samples)
    if seen.ndim != 4 or seen.shape[1] != tensor.shape[1]:
        raise ValueError(f"whitening needs images [B, {tensor.shape[1]}, H, W], not {list(seen.shape)}")
    patches = F.unfold(seen.double(), tensor.shape[2:]).transpose(1, 2).reshape(-1, size)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))  # ascending, in columns
    rows = vectors.T.flip(0) / (values.flip(0).clamp(min=0.0) + eps).sqrt()[:, None]
    rows = rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    return tensor.copy_((rows if len(tensor) == size else torch.cat([rows, -rows])).view(tensor.shape))
