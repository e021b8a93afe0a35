"""Images that the device decodes: which files those are, and that decoding, cropping and resizing them in the step changes nothing but nvJPEG's own pixels."""

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samewise_runner_jobs as jobs
import torch
from PIL import Image
from torch import Tensor

from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.parts.encoded import EncodedImages, is_for_device
from samewise.datasets.transforms.decode import Decode
from samewise.recipes.classification import Classification
from samewise.runner.interfaces import Batch


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 120 * np.sin(x / 9 + phase) * np.cos(y / 7 + 2 * phase) for phase in range(3)]
    return Image.fromarray(np.stack(waves, -1).astype(np.uint8)).convert(mode)


def encode(image: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    image.save(held := io.BytesIO(), form, **options)
    return held.getvalue()


def with_byte(raw: bytes, marker: int, offset: int, value: int) -> bytes:
    """Return a JPEG with one byte changed in the segment of a marker."""
    at = raw.index(bytes((0xFF, marker))) + offset
    return raw[:at] + bytes([value]) + raw[at + 1 :]


EXIF = Image.Exif()
EXIF[0x0112] = 6
PHOTO = picture(60, 44)
ADOBE = b"\xff\xee" + struct.pack("!H", 14) + b"Adobe" + bytes((0, 100, 0, 0, 0, 0, 0))
FOR_DEVICE = {
    "4:4:4": encode(PHOTO, subsampling=0),
    "4:2:2": encode(PHOTO, subsampling=1),
    "4:2:0": encode(PHOTO, subsampling=2),
    "progressive": encode(PHOTO, progressive=True),
    "turned by EXIF": encode(PHOTO, exif=EXIF),
    "with restart markers": encode(PHOTO, restart_marker_blocks=2),
    "with bytes after its end": encode(PHOTO) + b"\0\0more",
}
FOR_WORKER = {
    "PNG": encode(PHOTO, "PNG"),
    "BMP": encode(PHOTO, "BMP"),
    "WebP": encode(PHOTO, "WEBP"),
    "grey": encode(PHOTO.convert("L")),
    "CMYK": encode(PHOTO.convert("CMYK")),
    "RGB as such": encode(PHOTO, keep_rgb=True),
    "RGB by Adobe's marker": (raw := encode(PHOTO, subsampling=0))[:2] + ADOBE + raw[2:],
    "of unusual sampling": with_byte(encode(PHOTO, subsampling=0), 0xC0, 11, 0x13),
}
ALL = {**FOR_DEVICE, **FOR_WORKER}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Each kind of file that decodes, in several sizes."""
    for split in ("train", "valid"):
        for name in ("ant", "bee"):
            (folder := tmp_path / split / name).mkdir(parents=True)
            for number, (kind, raw) in enumerate(ALL.items()):
                if "sampling" not in kind:
                    (folder / f"{number:02}.jpg").write_bytes(raw)
            (folder / "large.jpg").write_bytes(encode(picture(90, 71)))
            (folder / "long.jpg").write_bytes(encode(picture(120, 30)))
    return tmp_path


def both(root: Path, **settings: Any) -> tuple[list[Tensor], Batch]:
    """The images as a worker decodes them, and a batch of the same images still encoded."""
    plain, encoded = (ImageFolder(root=str(root), folder="train", decode=decode, **settings) for decode in ("worker", "device"))
    assert encoded.encoded
    assert not plain.encoded
    assert plain.fingerprint() == encoded.fingerprint()
    return [plain[index]["image"] for index in range(len(plain))], Classification(num_classes=2).collate([encoded[index] for index in range(len(encoded))])


@pytest.mark.parametrize("mode", ["rgb", "gray"])
def test_on_the_cpu_the_pixels_are_those_that_a_worker_decodes(root: Path, mode: Any):
    images, batch = both(root, mode=mode)
    decoded = Decode()(batch)
    assert [image.shape for image in decoded["image"]] == [image.shape for image in images]
    assert all(torch.equal(one, other) for one, other in zip(decoded["image"], images, strict=True))
    assert decoded["label"] is batch["label"]
    assert isinstance(batch["image"], EncodedImages)


@pytest.mark.parametrize("kind", ALL)
def test_only_a_file_that_nvjpeg_decodes_to_the_same_colours_is_left_encoded(kind: str):
    assert is_for_device(ALL[kind], "rgb") is (kind in FOR_DEVICE)
    if kind == "grey":
        assert is_for_device(ALL[kind], "gray")


@pytest.mark.parametrize("kind", ["4:2:0", "progressive"])
def test_a_truncated_file_is_never_left_to_the_device(kind: str):
    raw = FOR_DEVICE[kind]
    end = raw.rindex(b"\xff\xd9")
    assert not any(is_for_device(raw[:length], "rgb") for length in range(0, end + 2, 3))
    assert is_for_device(raw[: end + 2], "rgb")


SETTINGS = (
    *("experiment=resnet18_digits", "model.width=4", "dataset=image_folder", "dataset.num_classes=2"),
    *("dataset.channels=3", "max_steps=3", "batch_size=8", "replicas=2", "tracking=none", "evaluate.pictures=false"),
    *("device=cpu", "dataset.decode=device"),
)


@pytest.mark.slow
def test_neither_workers_nor_ranks_change_bits(root: Path, samewise: Callable[..., Any], tmp_path: Path):
    transforms = ("transforms=imagenet_on_device", "transforms.size=24", "transforms.eval_resize=28")
    given = (*SETTINGS, *transforms, f"dataset.root={root}", "strategy=elastic")
    for workers in (0, 2):
        samewise("train", *given, f"loader.num_workers={workers}", f"run_root={tmp_path / 'runs' / str(workers)}", code=0)
    jobs.run(tmp_path / "runs" / "ranks", 2, experiment=given)
    traces = [trace.read_bytes() for trace in (tmp_path / "runs").glob("*/*/*/trace.jsonl")]
    assert (len(traces), len({*traces})) == (3, 1)


@pytest.mark.gpu
def test_nvjpeg_is_close_to_the_cpu_and_repeatable_alone_or_in_a_batch(root: Path):
    images, batch = both(root)
    batch["label"] = batch["label"].cuda()
    made = Decode()(batch)["image"]
    for here, there in zip((image.double() for image in images), made, strict=True):
        assert there.is_cuda
        apart = here - there.cpu().double()  # nvJPEG repeats colours of half the resolution, libjpeg interpolates: brightness and means are the same
        assert (torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64) @ apart.flatten(1)).abs().mean() < 1
        assert apart.mean((1, 2)).abs().max() < 1.5
    again = Decode()(batch)["image"]
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
    data = ImageFolder(root=str(root), folder="train", decode="device")
    for index in range(len(data)):
        alone = Decode()({**Classification(num_classes=2).collate([data[index]]), "label": batch["label"][:1]})["image"]
        assert torch.equal(alone[0], made[index])


@pytest.mark.gpu
def test_pixels_are_right_while_the_device_is_busy(root: Path):
    """nvJPEG writes on its own stream, and pending computations must not use the same memory at the same time."""
    _, batch = both(root)
    batch["label"] = batch["label"].cuda()
    expected = [image.cpu() for image in Decode()(batch)["image"]]
    busy = torch.randn(2048, 2048, device="cuda")
    for _ in range(5):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
            torch.empty(1 << 16, dtype=torch.uint8, device="cuda").fill_(7)
        made = Decode()(batch)["image"]
        assert all(torch.equal(image.cpu(), other) for image, other in zip(made, expected, strict=True))
