"""On a device: batches are copied one step ahead, traces are digested and read when that needs no wait, and images are decoded."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pretended_cuda import PretendedDevice, pretended, steps
from torch import Tensor, nn

from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.transforms.decode import Decode
from samewise.recipes.classification import Classification
from samewise.runner.config.compose import compose
from samewise.runner.config.project import find
from samewise.runner.data.device import Prefetcher, mover
from samewise.runner.errors import DataError, Interrupted
from samewise.runner.interfaces import Batch
from samewise.runner.records import trace, trace_reader
from samewise.runner.records.digest import ON_DEVICE, begin_value
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.on_device import begin
from samewise.runner.records.trace import Trace
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step
from samewise.runner.training.session import session

CUDA = torch.device("cuda", 0)
BATCH: dict[str, Any] = {"image": torch.arange(48.0).view(1, 3, 4, 4), "boxes": [torch.ones(2), torch.zeros(1)], "name": "one"}


def test_a_batch_arrives_unchanged_and_nothing_waits(device: PretendedDevice) -> None:
    ahead = Prefetcher(CUDA, mover(CUDA, channels_last=True), pin=True)
    with device.counting() as counts:
        sent = ahead.send(BATCH)()
        doubled = sent["image"] * 2
    assert counts.waits == counts.blocking_copies_in == 0
    assert counts.copies_in == 3
    assert sent["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(doubled.cpu(), BATCH["image"] * 2)
    assert [one.tolist() for one in sent["boxes"]] == [[1.0, 1.0], [0.0]]
    assert sent["name"] == "one"


def test_in_training_the_next_batch_is_sent_before_this_step_is_waited_for(tmp_path: Path) -> None:
    overrides = ["experiment=resnet18_digits", "debug=tiny", "model.width=4", "batch_size=8", "device=cuda", "tracking=none", "callbacks=none", "max_steps=3"]
    project = find(tmp_path)
    composed = compose(overrides, project=project)
    with pretended() as device:
        run = build(composed, project, RunFolder(tmp_path))
        with suppress(Interrupted), session(run):
            batches, copied = TrainingBatches(run), list[tuple[int, ...]]()

            def load_next() -> None:
                before = torch.get_rng_state()
                with device.counting() as sent:
                    batches.load_next()
                assert not sent.waits
                assert torch.equal(torch.get_rng_state(), before)
                loaded.append(sent.copies_in)

            for _ in range(3):
                loaded = list[int]()
                with device.counting() as asked:
                    batch = next(batches)
                train_step(run, batch, load_next)
                copied.append((asked.copies_in, *loaded))
            raise Interrupted("seen")
    assert copied == [(2, 2), (0, 2), (0, 0)], "an image and a label each; the last step has none to load"


def traced_steps(path: Path, device: str, *, algorithm: str = ON_DEVICE, start: int = 0, chain: int = 0, stop: int = 3) -> Iterator[Trace]:
    """A trace of a small network's steps, after each of them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(device)
    written = Trace(path, net, algorithm=algorithm)
    written.open(start, chain)
    for step in range(1, stop + 1):
        net(torch.arange(20.0).view(5, 4).to(device) * step).sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad  # pyright: ignore[reportOperatorIssue]
        if step > start:
            written.digest_gradients(step)
            written.digest_weights(step)
            ((_, read),) = written.digests(step, {"x": torch.ones(2)}, {"x": torch.ones(2).to(device)})
            written.record(step, batch=step, inputs=read() if callable(read) else read, loss=float(step))
        net.zero_grad()
        yield written
    written.close()


def test_the_line_of_a_step_is_written_with_the_next_step(device: PretendedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace, "_EVERY_S", 0.0)
    path, waits = tmp_path / "trace.jsonl", []
    written = traced_steps(path, "cuda")
    for _ in range(3):
        next(written)
        waits.append(len(path.read_text().splitlines()) - 1)
    assert waits == [0, 1, 2]
    assert [*written] == []  # it ends, and is closed
    head, lines = trace_reader.read_trace(path)
    assert (head["format"], head["algorithm"]) == (2, ON_DEVICE)
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_digests_on_the_device_equal_the_cpus(tmp_path: Path):
    list(traced_steps(tmp_path / "cpu", "cpu"))
    with pretended():
        list(traced_steps(tmp_path / "cuda", "cuda"))
        tensor = torch.arange(7.0)
        assert begin([tensor.cuda()])() == begin([tensor])()
        assert begin_value([tensor.cuda()])() != begin_value([tensor.cuda() + 1])()
    there, here = (trace_reader.read_trace(tmp_path / name)[1] for name in ("cpu", "cuda"))
    assert [line["layers"] for line in there] == [line["layers"] for line in here]


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
