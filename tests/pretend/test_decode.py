"""Images decoded on the device, here a pretended one whose nvJPEG is the CPU's decoder: what the device does for them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pretended_cuda import steps
from torch import Tensor

from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.transforms.decode import Decode
from samewise.recipes.classification import Classification
from samewise.runner.errors import DataError
from samewise.runner.interfaces import Batch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """train and valid, with JPEGs of several sizes and one PNG, in two classes."""
    random = np.random.default_rng(0)
    for split in ("train", "valid"):
        for name in ("ant", "bee"):
            (folder := tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, 256, (20 + number, 26, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / ("7.png" if number == 7 else f"{number}.jpg"))
    return tmp_path / "data"


def batch_of(root: Path, *, device: str = "cuda") -> tuple[Batch, ImageFolder]:
    """The training images, encoded, with labels on the device."""
    data = ImageFolder(root=str(root), folder="train", decode="device")
    batch = Classification(num_classes=2).collate([data[index] for index in range(len(data))])
    return {**batch, "label": batch["label"].to(device)}, data


def test_a_step_waits_for_nvjpeg_twice_and_nowhere_else(root: Path, tmp_path: Path) -> None:
    data = ["dataset=image_folder", f"dataset.root={root}", "dataset.num_classes=2", "dataset.channels=3", "dataset.decode=device"]
    transforms = ["transforms=imagenet_on_device", "transforms.size=16", "transforms.eval_resize=20"]
    given = ["experiment=resnet18_digits", "model.width=4", *data, *transforms, "batch_size=8", "evaluate.batch_size=8"]
    found = steps.counted(given, tmp_path / "run")
    waits = found["step"].functions("waits")
    assert {function: count for function, count in waits.items() if "encoded.py" in function} == {"datasets/parts/encoded.py _decode_on_device": 2}
    assert sum(waits.values()) == 3, waits
    assert not found["step"].blocking_copies_in
    assert found["evaluation_batch"].functions("waits")["datasets/parts/encoded.py _decode_on_device"] == 2


@pytest.mark.usefixtures("device")
def test_an_image_that_nvjpeg_refuses_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, data = batch_of(root)
    refused = torch.frombuffer(bytearray(data.path(3).read_bytes()), dtype=torch.uint8)
    real = torch.ops.image.decode_jpegs_cuda

    def picky(encoded: list[Tensor], *given: object) -> list[Tensor]:
        if any(torch.equal(one, refused) for one in encoded):
            raise RuntimeError("Error while decoding JPEG images: Failed to decode jpeg stream: 4")
        return real(encoded, *given)

    monkeypatch.setattr(torch.ops.image, "decode_jpegs_cuda", picky)
    with pytest.raises(DataError, match=r"3\.jpg: nvJPEG cannot decode this image: .*stream: 4(.|\n)*dataset\.decode=worker"):
        Decode()(batch)
