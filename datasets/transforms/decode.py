"""Decoding on the device, as the first batch transform."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from samewise.datasets.parts.encoded import EncodedImages
from samewise.runner.interfaces import Batch, BatchTransform


@final
class Decode(BatchTransform):
    """Encoded images (`parts.encoded`) to uint8[B, C, H, W], or to a list of B images [C, H, W]
    where they differ in size.

    On the CPU the pixels are those of `decode: worker`. On CUDA nvJPEG decodes, to slightly other
    pixels, and the host waits for it. Images that are decoded already, as those that `samewise
    predict` reads, stay as they are.
    """

    takes_encoded = True

    def apply(self, batch: Batch, choices: dict[str, Tensor]) -> Batch:
        encoded = batch["image"]
        if not isinstance(encoded, EncodedImages):
            return dict(batch)
        device = next(
            (value.device for value in batch.values() if isinstance(value, Tensor)),
            torch.device("cpu"),
        )
        images = encoded.decode(device)
        return {
            **batch,
            "image": torch.stack(images) if len({image.shape for image in images}) == 1 else images,
        }
