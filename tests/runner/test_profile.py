"""`samewise profile` finds deliberately slow parts, and leaves runs and bits unchanged."""

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from samewise_tiny import QUIET
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from samewise.runner.measuring import operators

LAB = """
import time
import torch
from torch import nn

class Digits(torch.utils.data.Dataset):
    classes = [str(digit) for digit in range(10)]

    def __init__(self, *, slow=0.0):
        self.slow = slow

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.slow)
        return {"image": torch.full((1, 8, 8), index % 7 / 7), "label": index % 10}

class Net(nn.Module):
    def __init__(self, *, slow=0.0):
        super().__init__()
        self.first, self.second, self.slow = nn.Linear(64, 32), nn.Linear(32, 10), slow

    def forward(self, pixels):
        time.sleep(self.slow)
        return self.second(self.first(pixels.flatten(1)).relu())

class Sharpen(nn.Module):
    def forward(self, image):
        time.sleep(0.02)
        return image

class Sleepy(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.1)
        return super().step(closure)
"""
SMALL = [
    *(*QUIET, "device=cpu", "dataset=digits", "transforms=none", "name=measured", "max_steps=6"),
    *("~model", "+model={_target_: lab_of_profiles.Net}", "~dataset.train", "+dataset.train={_target_: lab_of_profiles.Digits}"),
    *("~dataset.valid", "+dataset.valid={_target_: lab_of_profiles.Digits}", "batch_size=4"),
]
SLOW = {
    "data": "+dataset.train.slow=0.02",
    "transforms": "+transforms.train.sample=[{_target_: lab_of_profiles.Sharpen}]",
    "forward": "+model.slow=0.1",
    "optimizer": "~optimizer +optimizer={_target_:lab_of_profiles.Sleepy,_partial_:true,lr:0.1}",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the classes above; commands are given in it."""
    (tmp_path / "lab_of_profiles.py").write_text(LAB)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab_of_profiles"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("part", SLOW)
def test_a_planted_slowness_is_found_in_its_part(part: str, here: Path, samewise: Callable[..., Any]) -> None:
    overrides = [SLOW[part]] if part == "transforms" else SLOW[part].split()
    done = samewise("profile", *SMALL, *overrides, "--steps", 2, "--traced", 0, "--json", code=0)
    found = json.loads(done.stdout)
    assert sum(found["ranks"][0]["parts_ms"].values()) == pytest.approx(found["ranks"][0]["measured_ms"], rel=1e-9)
    assert max(found["ranks"][0]["parts_ms"].items(), key=lambda one: one[1])[0] == part


class Heavy(torch.autograd.Function):
    """Twenty products in its backward pass."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        for _ in range(20):
            torch.mm(gradients[0], gradients[0])
        return gradients[0]


class Slow(nn.Module):
    def forward(self, value: Tensor) -> Any:
        return Heavy.apply(value)


def test_operators_belong_to_layers_and_functions_in_both_passes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Slow(), nn.ReLU())
    with operators.mark_layers(model), profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
        for _ in range(2):
            model(torch.ones(8, 8)).sum().backward()
    events = profiler.events()
    found = operators.tables(events, [("f on rank1", 3.0)], 2)
    averages = {row.key: row for row in profiler.key_averages()}
    for name in ("aten::mm", "aten::addmm", "aten::threshold_backward"):
        assert found["operators"][name]["calls"] == averages[name].count / 2
        assert found["operators"][name]["ms"] == pytest.approx(averages[name].self_cpu_time_total / 2000)
    # Products of the backward pass: twenty of Heavy, and one for the first layer's weight, whose input needs no gradient
    assert found["operators"]["aten::mm"]["calls"] == 21
    assert max(found["layers"], key=lambda name: found["layers"][name]["calls"]) == "1"
    assert {"0", "1", "2", "model"} >= set(found["layers"]) - {"-"}
    if hasattr(events[0], "is_python_function"):
        assert any(name.endswith(": forward") and "test_profile.py" in name for name in found["functions"])
    assert found["calls"] == {"f on rank1": {"calls": 0.5, "ms": 1.5}}
    assert not found["kernels"]
    for event in events:  # as on CUDA, where an operator has the kernels that it launched
        if event.name == "aten::mm":
            event.append_kernel("ampere_fp16_s16816gemm_fp16_64x64_nn", 0, 4.0)
            event.append_kernel("splitKreduce_kernel", 0, 1.0)
        if event.name == "aten::addmm":
            event.append_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 8.0)
    found = operators.tables(events, [], 2)
    assert next(iter(found["layers"])) == "1", "by the time on the device"
    assert found["operators"]["aten::mm"]["device_ms"] == pytest.approx(21 * 5.0 / 1000)
    assert found["communication"] == {"ncclDevKernel_AllReduce_Sum_f32_RING_LL": {"calls": 1.0, "device_ms": 0.008}}
    assert operators.sum_apart(found)[1] == 0.008
    lines = list(operators.table_lines(found, "layers"))
    assert [line.endswith(", on Tensor Cores") for line in lines if "kernel" in line or "gemm" in line] == [False, False, True, False]


@pytest.mark.slow
def test_communication_is_apart_and_remote_calls_are_named(here: Path, samewise: Callable[..., Any]) -> None:
    done = samewise("profile", *SMALL, "strategy=rpc", "strategy.nproc=2", "strategy.split=[second]", "--steps", 1, "--traced", 1, "--json", code=0)
    first, second = json.loads(done.stdout)["ranks"]
    assert first["calls"]["_remote_forward on rank1"]["calls"] == 1
    assert {"gloo:all_gather"} <= first["communication"].keys() & second["communication"].keys()


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_profile_has_the_bits_of_training_and_touches_no_run(here: Path, samewise: Callable[..., Any]) -> None:
    command = ["profile", *SMALL, "--steps", 2, "--traced", 2, "--json"]
    first = json.loads(samewise(*command).stdout)
    assert not (here / "runs").exists()
    assert samewise("train", *SMALL).returncode == 0
    trained = [json.loads(line) for line in next(here.glob("runs/*/*/trace.jsonl")).read_text().splitlines()]
    assert trained[-1]["step"] == 6
    assert first["chain"] == trained[-1]["chain"], "the steps that were measured and watched are those of training"
    with ZipFile(next(here.glob("runs/*/*/checkpoints/latest/state.pt"))) as state:
        written = sum(entry.file_size for entry in state.infolist() if "/data/" in entry.filename)
    assert first["ranks"][0]["checkpoint"] == {"disk": written, "memory": written}
    before = digests(here / "runs")
    second = json.loads(samewise(*command).stdout)
    assert second["chain"] == first["chain"]
    assert second["fingerprint"] == first["fingerprint"]
    assert digests(here / "runs") == before
    assert [path.name for path in sorted((here / "profiles" / "measured").iterdir())] == [first["fingerprint"][:12], f"{first['fingerprint'][:12]}-2"]

    folder = here / "profiles" / "measured" / first["fingerprint"][:12]
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json", "rank-0.trace.json.gz"]
    events = json.loads(gzip.decompress((folder / "rank-0.trace.json.gz").read_bytes()))["traceEvents"]
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"data", "forward", "backward", "optimizer", "trace", "step 5", "step 6"} <= named
    assert any(event.get("cat") == "python_function" and "train_step" in event["name"] for event in events)
    assert any(event.get("name") == "[memory]" for event in events)
