"""The trace of training on a device: digests are computed there, and read when that needs no wait."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pretended_cuda import PretendedDevice, pretended
from torch import nn

from samewise.runner.records import trace, trace_reader
from samewise.runner.records.digest import ON_DEVICE, begin_value
from samewise.runner.records.on_device import begin
from samewise.runner.records.trace import Trace


def steps(path: Path, device: str, *, algorithm: str = ON_DEVICE, start: int = 0, chain: int = 0, stop: int = 3) -> Iterator[Trace]:
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
    written = steps(path, "cuda")
    for _ in range(3):
        next(written)
        waits.append(len(path.read_text().splitlines()) - 1)
    assert waits == [0, 1, 2]
    assert [*written] == []  # it ends, and is closed
    head, lines = trace_reader.read_trace(path)
    assert (head["format"], head["algorithm"]) == (2, ON_DEVICE)
    assert list(lines) == [1, 2, 3]


def test_digests_on_the_device_equal_the_cpus(tmp_path: Path):
    list(steps(tmp_path / "cpu", "cpu"))
    with pretended():
        list(steps(tmp_path / "cuda", "cuda"))
        tensor = torch.arange(7.0)
        assert begin([tensor.cuda()])() == begin([tensor])()
        assert begin_value([tensor.cuda()])() != begin_value([tensor.cuda() + 1])()
    there, here = (trace_reader.read_trace(tmp_path / name)[1] for name in ("cpu", "cuda"))
    assert [line["layers"] for line in there.values()] == [line["layers"] for line in here.values()]
