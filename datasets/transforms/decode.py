"""Decoding on the device, as the first batch transform."""

from typing import final

import torch
from torch import Tensor

from samewise.datasets.parts.encoded import EncodedImages
from samewise.runner.interfaces import Batch, BatchTransform


@final
class Decode(BatchTransform):
    """Decodes encoded images (`parts.encoded`) to uint8[B, C, H, W] on the device.

    Images that differ in size become a list of B tensors [C, H, W]. On the CPU the pixels are those
    of `decode: worker`. On CUDA nvJPEG decodes, to slightly different pixels, and the host waits
    for it. Images that are already decoded, such as those of `samewise predict`, stay as they are.

    Raises:
        DataError: A file is damaged, or nvJPEG cannot decode it.
        ConfigError: This build of torchvision has no nvJPEG.
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
