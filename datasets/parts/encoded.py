"""Encoded image files on their way to the device that decodes them."""

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, Self

import torch
import xxhash
from torch import Tensor
from torch.utils import deterministic

from samewise.datasets.parts.decode import MODES, Mode, decode_file, pixels_of
from samewise.datasets.parts.limits import PIXELS
from samewise.runner.errors import ConfigError, DataError, Problem, first_line

_ALONE: Final = (0x01, *range(0xD0, 0xD8))
"""JPEG markers without content."""
_BASELINE, _PROGRESSIVE, _END, _SCAN, _ADOBE = 0xC0, 0xC2, 0xD9, 0xDA, 0xEE
_FRAMES: Final = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_SAMPLING: Final = {(1, 1), (2, 1), (2, 2), (1, 2), (4, 1), (4, 2)}
"""Sampling of luminance relative to colour's (1, 1): 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1, 4:1:0."""


class EncodedImages:
    """Bytes of B image files on the CPU; for a file that the device cannot decode, its pixels.

    They pass a loader's workers as one tensor and stay on the CPU, where decoders read them, until
    the batch transform `Decode`. The `repr` contains a digest of all content, so that the trace of
    a step depends on it; the files' paths are not in it.

    Args:
        content: uint8[N], image after image.
        shapes: Each image's shape: [bytes], or [C, H, W] if it is pixels.
        names: Each image's name in errors.
        mode: "rgb" or "gray".
    """

    repr_is_whole = True

    def __init__(
        self, content: Tensor, shapes: Sequence[tuple[int, ...]], names: Sequence[str], mode: Mode
    ) -> None:
        self._content, self._shapes, self._names, self._mode = (
            content,
            list(shapes),
            list(names),
            mode,
        )

    @classmethod
    def from_file(cls, raw: bytes, name: str, *, mode: Mode) -> Self:
        """Return one file: encoded if the device can decode it, else as pixels.

        Raises:
            DataError: The file has too many pixels; or the CPU has to decode it, and it is damaged.
        """
        if not is_for_device(raw, mode):
            pixels = decode_file(raw, name, mode=mode)
            return cls(pixels.reshape(-1), [tuple(pixels.shape)], [name], mode)
        PIXELS.check(name, pixels_of(raw))
        return cls(torch.frombuffer(bytearray(raw), dtype=torch.uint8), [(len(raw),)], [name], mode)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Join several parts, in order."""
        shapes, names = (
            [item for part in parts for item in getattr(part, name)]
            for name in ("_shapes", "_names")
        )
        return cls(torch.cat([part._content for part in parts]), shapes, names, parts[0]._mode)

    def __len__(self) -> int:
        return len(self._shapes)

    def __repr__(self) -> str:
        return (
            f"EncodedImages({self._mode}, {self._shapes}, "
            f"{xxhash.xxh3_64_hexdigest(self._content.numpy())})"
        )

    def decode(self, device: torch.device) -> list[Tensor]:
        """Return uint8[C, H, W] of each image, on the device.

        Raises:
            DataError: A file is damaged, or nvJPEG cannot decode it.
            ConfigError: This build of torchvision has no nvJPEG.
        """
        parts = [
            part.view(shape)
            for part, shape in zip(
                self._content.split([torch.Size(shape).numel() for shape in self._shapes]),
                self._shapes,
                strict=True,
            )
        ]
        if device.type == "cpu":
            return [
                self._decode_on_cpu(part, name) if part.dim() == 1 else part
                for part, name in zip(parts, self._names, strict=True)
            ]
        files = [place for place, part in enumerate(parts) if part.dim() == 1]
        images = [part.to(device, non_blocking=True) if part.dim() == 3 else part for part in parts]
        for place, image in zip(
            files,
            self._decode_by_nvjpeg(
                [parts[place] for place in files], [self._names[place] for place in files], device
            ),
            strict=True,
        ):
            images[place] = image
        return images

    def _decode_on_cpu(self, encoded: Tensor, name: str) -> Tensor:
        return decode_file(encoded.numpy().tobytes(), name, mode=self._mode)

    def _decode_by_nvjpeg(
        self, encoded: list[Tensor], names: list[str], device: torch.device
    ) -> list[Tensor]:
        if not encoded:
            return []
        try:
            return _decode_on_device(encoded, MODES[self._mode][0], device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError) as error:
            if isinstance(error, AttributeError) or "not compiled with" in str(error):
                raise ConfigError(
                    Problem(
                        "dataset.decode",
                        "this build of torchvision has no nvJPEG",
                        "device",
                        hint="set dataset.decode=worker, or install a build of torchvision for "
                        "CUDA",
                    )
                ) from None
            for file, name in zip(encoded, names, strict=True):
                self._raise_if_refused(file, name, device)
            raise

    def _raise_if_refused(self, encoded: Tensor, name: str, device: torch.device) -> None:
        """Decode one file alone, and raise an error that says what is wrong with it."""
        try:
            _decode_on_device([encoded], MODES[self._mode][0], device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The CPU's decoder explains damage better; its pixels differ from nvJPEG's and are not
            # used
            self._decode_on_cpu(encoded, name)
            raise DataError(
                Problem(
                    name,
                    f"nvJPEG cannot decode this image: {first_line(error)}",
                    hint="save it again as a JPEG, or set dataset.decode=worker",
                )
            ) from None


def is_for_device(raw: bytes, mode: Mode) -> bool:
    """Whether a file is a JPEG that nvJPEG decodes to the same colours as the CPU's decoder.

    Such a file is complete, baseline or progressive, with 8 bits and a usual colour sampling. It
    has one component for "gray", else three, which are YCbCr. CMYK, grey where colour is requested,
    RGB stored as such, arithmetic coding, and a PNG named .JPEG are refused.
    """
    if not raw.startswith(b"\xff\xd8\xff"):
        return False
    offset, frame, is_rgb = 2, b"", False
    while offset + 4 <= len(raw) and raw[offset] == 0xFF:
        marker = raw[offset + 1]
        # Fill bytes may precede a marker
        if marker == 0xFF or marker in _ALONE:
            offset += 1 if marker == 0xFF else 2
            continue
        (length,) = struct.unpack_from("!H", raw, offset + 2)
        content = raw[offset + 4 : offset + 2 + length]
        if marker in _FRAMES:
            if frame or marker not in (_BASELINE, _PROGRESSIVE):
                return False
            frame = content
        elif marker == _ADOBE and content.startswith(b"Adobe"):
            # Adobe's colour transform 0 means that the colours are not YCbCr
            is_rgb = len(content) < 12 or content[11] == 0
        elif marker == _SCAN:
            return raw.rfind(bytes((0xFF, _END)), offset) >= 0 and _is_usual(
                frame, mode, is_rgb=is_rgb
            )
        elif marker == _END:
            return False
        offset += 2 + length
    return False


def _is_usual(frame: bytes, mode: Mode, *, is_rgb: bool) -> bool:
    """Whether a frame's header meets the conditions of `is_for_device`."""
    if len(frame) < 6:
        return False
    bits, height, width, count = struct.unpack_from("!BHHB", frame)
    parts = [frame[offset : offset + 3] for offset in range(6, len(frame), 3)]
    if bits != 8 or not height or not width or count != len(parts) or len(parts[-1]) != 3:
        return False
    if count == 1:
        return mode == "gray"
    sampling = [(part[1] >> 4, part[1] & 15) for part in parts]
    return (
        count == 3
        and not is_rgb
        and bytes(part[0] for part in parts) != b"RGB"
        and sampling[0] in _SAMPLING
        and sampling[1:] == [(1, 1)] * 2
    )


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _decode_on_device(encoded: list[Tensor], mode: int, device: torch.device) -> list[Tensor]:
    """Return uint8[C, H, W] of each image on the device, by torchvision's operator."""
    # The operator writes on a stream of its own into memory of the current stream, without waiting
    # for that stream. So the current stream is one on which nothing is ever pending, not even the
    # filling of uninitialised memory. The host waits until all images are decoded.
    filling = deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue] (a property of the module)
    deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with torch.cuda.stream(_stream(device)):
            images = torch.ops.image.decode_jpegs_cuda(encoded, mode, device)
            done = torch.cuda.Event()
            done.record(_stream(device))
    finally:
        deterministic.fill_uninitialized_memory = filling  # pyright: ignore[reportAttributeAccessIssue]
    current = torch.cuda.current_stream(device)
    current.wait_event(done)
    for image in images:
        image.record_stream(current)
    return images
