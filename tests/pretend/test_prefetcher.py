"""Batches are copied to the device one step ahead, from page-locked memory and on a separate stream; none is used before it has arrived."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended_cuda import PretendedDevice, pretended

from samewise.runner.config.compose import compose
from samewise.runner.config.project import find
from samewise.runner.data.device import Prefetcher, mover
from samewise.runner.errors import Interrupted
from samewise.runner.records.folder import RunFolder
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step
from samewise.runner.training.session import session

CUDA = torch.device("cuda", 0)
BATCH: dict[str, Any] = {"image": torch.arange(48.0).view(1, 3, 4, 4), "boxes": [torch.ones(2), torch.zeros(1)], "name": "one"}


@pytest.fixture
def ahead(device: PretendedDevice) -> Prefetcher:
    return Prefetcher(CUDA, mover(CUDA, channels_last=True), pin=True)


def test_a_batch_arrives_unchanged_and_nothing_waits(device: PretendedDevice, ahead: Prefetcher) -> None:
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
