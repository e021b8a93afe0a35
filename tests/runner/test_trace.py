"""The trace shows where two runs diverge."""

import json
import resource
import tracemalloc

import pytest
import torch
from torch import nn

from samewise.runner.records import trace, trace_reader
from samewise.runner.records.digest import digests, weights_sha256
from samewise.runner.records.trace import Trace
from samewise.runner.verify.divergence import (
    Divergence,
    first_divergence,
)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def record(path, steps, *, change=lambda step, net: None, start=0, chain=0, every=1):
    net = model()
    with torch.no_grad():
        change(0, net)
    written = Trace(path, net, every_steps=every)
    written.open(start, chain, None if start else written.digest_initial())
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        net(torch.randn(5, 4)).sum().backward()
        change(step, net)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
        if step > start:
            written.digest_gradients(step)
            written.digest_weights(step)
            written.record(step, batch=step, inputs=step, loss=float(step))
        net.zero_grad()
    written.close()
    return written.chain


def lines_of(path):
    return {line["step"]: line for line in trace_reader.read_trace(path)[1]}


def test_the_same_training_gives_the_same_file(tmp_path):
    record(tmp_path / "a", 5), record(tmp_path / "b", 5)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    head, *lines = (tmp_path / "a").read_text().splitlines()
    assert [*json.loads(head)] == ["format", "gradients", "weights", "initial"]
    assert len(lines) == 5


def test_a_resumed_trace_equals_an_undisturbed_one(tmp_path):
    record(tmp_path / "whole", 6)
    record(tmp_path / "cut", 5)
    lines = lines_of(tmp_path / "cut")
    with open(tmp_path / "cut", "a") as file:
        file.write('{"step": 6, "ba')  # killed while it wrote
    record(tmp_path / "cut", 6, start=3, chain=int(lines[3]["chain"], 16))
    assert (tmp_path / "cut").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_partly_written_line_is_an_error_and_leaves_no_gap_after_resuming(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_EVERY_S", 0.0)
    record(tmp_path / "whole", 6)
    lines = lines_of(tmp_path / "whole")
    path, before = tmp_path / "full", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step, _):  # from step 4 there is room again
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]) if step == 3 else before)

    try:
        with pytest.raises(OSError, match="File too large"):
            record(path, 6, change=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    record(path, 6, start=2, chain=int(lines[2]["chain"], 16))
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def divergence(tmp_path, change):
    record(tmp_path / "a", 4), record(tmp_path / "b", 4, change=change)
    (head, one), (_, two) = (trace_reader.read_trace(tmp_path / name) for name in "ab")
    return next((line["step"], *found) for line, other in trace_reader.common_lines(one, two) if (found := first_divergence(head, line, other)))


def test_comparing_longer_traces_takes_no_more_memory(tmp_path):
    peaks = []
    for steps in (30, 30, 300):  # the first also imports
        path = tmp_path / f"{steps}"
        record(path, steps)
        tracemalloc.start()
        try:
            assert sum(1 for _ in trace_reader.common_lines(*(trace_reader.read_trace(path)[1] for _ in range(2)))) == steps
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[2] < 1.2 * peaks[1]


def test_a_changed_gradient_is_found_at_its_step_and_layer(tmp_path):
    def change(step, net):
        if step == 3:
            net[1].weight.grad[1] += 1e-6

    assert divergence(tmp_path, change) == (3, "gradients", "1.weight")
    assert str(Divergence(3, "gradients", "1.weight", "why")) == "step 3: why; of the parameters that differ, 1.weight is defined last"


def test_digests_accept_every_dtype_and_follow_the_memory_layout():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool):
        assert digests([torch.ones(3, 2, dtype=dtype)]) == digests([torch.ones(3, 2, dtype=dtype)])
    image = torch.randn(2, 3, 4, 5)
    assert digests([image.to(memory_format=torch.channels_last)]) == digests([image.permute(0, 2, 3, 1).contiguous()])
    assert digests([torch.tensor(1.5)]) != digests([torch.tensor(2.5)])


def test_the_weights_digest_covers_names_dtypes_shapes_and_bytes():
    base = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1)}
    digest = weights_sha256(base)
    assert weights_sha256(dict(reversed(base.items()))) == digest
    assert weights_sha256({**base, "a": base["a"].t().contiguous().t()}) == digest
    for other in ({**base, "c": base["b"]}, {**base, "a": base["a"].view(3, 2)}, {**base, "a": base["a"].double()}, {**base, "b": torch.tensor(2)}):
        assert weights_sha256(other) != digest
