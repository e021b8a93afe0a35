"""The pretended device refuses what CUDA refuses, and counts what CUDA would start, copy and wait for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pretended_cuda import DeviceError, PretendedDevice
from torch import Tensor, nn

from samewise.runner.data import streams
from samewise.runner.data.keyed import Key, KeyedDataset
from samewise.runner.optim import muon
from samewise.runner.optim.muon import Muon


def ours(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def train(device: str, **options: Any) -> list[Tensor]:
    """The weights after three steps."""
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(images), torch.tensor([0, 1, 1, 0], device=device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}])
def test_a_model_trains_on_the_device_as_on_the_cpu(device: PretendedDevice, options: dict[str, bool]):
    for here, there in zip(train("cpu", **options), train("cuda", **options), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)  # clipping sums the squares in another order


MIXED: dict[str, Callable[[], Any]] = {
    "sum": lambda: ours(2) + torch.ones(2),
    "product": lambda: torch.ones(2, 2) @ ours(2, 2),
    "list": lambda: torch.cat([ours(2), torch.ones(2)]),
    "number where none may be": lambda: torch.stack([ours(1)[0], torch.tensor(1.0)]),
    "layer": lambda: network()(ours(1, 3, 8, 8)),
    "input": lambda: network().cuda()(torch.ones(1, 3, 8, 8)),
    "index on a tensor of the CPU": lambda: torch.ones(2)[torch.tensor([1]).cuda()],
    "value to set": lambda: ours(2).index_put_((torch.tensor([1]).cuda(),), torch.ones(1)),
    "change in place": lambda: torch.ones(2).add_(ours(2)),
}


@pytest.mark.parametrize("case", MIXED)
def test_tensors_of_both_devices_are_refused_with_the_line(device: PretendedDevice, case: str):
    with pytest.raises(DeviceError, match=r"(same device|'cuda' device type)[^\n]*\n    at tests/pretend/test_device.py:\d+ \("):
        MIXED[case]()


UNREADABLE: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda tensor: tensor.numpy(),
    "asarray": np.asarray,
    "data_ptr": lambda tensor: tensor.data_ptr(),
    "dlpack": np.from_dlpack,
    "no kernel": lambda tensor: torch.histogram(tensor, 3),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_operations_for_the_cpu_only_are_refused_with_the_line(device: PretendedDevice, case: str):
    with pytest.raises(DeviceError, match=r"\n    at tests/pretend/test_device.py:\d+"):
        UNREADABLE[case](ours(3))


WAITS: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {  # what, waits, copies to the host
    "item": (lambda x: x.sum().item(), 1, 1),
    "truth": (lambda x: bool(x.sum() > 0), 1, 1),
    "cpu": (lambda x: x.cpu(), 1, 1),
    "cpu without blocking": (lambda x: x.to("cpu", non_blocking=True), 0, 1),
    "copy out": (lambda x: torch.empty(4).copy_(x), 1, 1),
    "equal": (lambda x: torch.equal(x, x + 0), 1, 1),
    "nonzero": (lambda x: x.nonzero(), 1, 0),
    "mask": (lambda x: x[x > 0], 1, 0),
    "set by mask": (lambda x: x.__setitem__(x > 0, 2.0), 0, 0),
    "set by mask, values": (lambda x: x.__setitem__(x > 0, torch.ones(4, device="cuda")), 1, 0),
    "unique": (lambda x: x.unique(), 1, 0),
    "repeat_interleave": (lambda x: x.repeat_interleave(torch.full((4,), 2, device="cuda")), 1, 0),
    "number in": (lambda x: x + torch.tensor(1.0), 0, 0),
    "index": (lambda x: x[torch.zeros(2, dtype=torch.int64, device="cuda")], 0, 0),
    "list of indices": (lambda x: x[[1, 2]], 1, 0),
    "synchronize": (lambda x: torch.cuda.synchronize(), 1, 0),
}


@pytest.mark.parametrize("case", WAITS)
def test_waits_are_counted(device: PretendedDevice, case: str):
    what, waits, copies = WAITS[case]
    tensor = ours(4)
    with device.counting() as found:
        what(tensor)
    assert (found.waits, found.copies_out) == (waits, copies)


def test_samples_that_draw_on_the_device_are_the_same_whatever_was_drawn_before(device: PretendedDevice):
    class Samples:
        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(2, device="cuda").cpu()

    def made(number: int) -> list[list[float]]:
        streams.enter(number, "step")
        return keyed[Key(0, 4, (5, 6, 7))].tolist()

    keyed = KeyedDataset(Samples(), torch.stack, seed=0, stream="sample")
    assert made(1) == made(2)


SHAPES = [(6, 3, 3, 3), (12, 5), (5, 12), (6, 3, 3, 3)]
STEPS = 5


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def created() -> tuple[list[Tensor], Muon]:
    """Weights on the device, the last channels_last and of a second group, and their optimizer."""
    weights = [random(*shape, seed=number).cuda().requires_grad_() for number, shape in enumerate(SHAPES[:-1])]
    weights.append(random(*SHAPES[-1], seed=9).cuda().to(memory_format=torch.channels_last).requires_grad_())
    return weights, Muon([{"params": weights[:-1], "weight_decay": 0.1}, {"params": weights[-1:], "normalize_weights": True, "nesterov": False}], lr=0.05)


def take_step(weights: list[Tensor], optimizer: Muon, step: int, without: int | None = None) -> None:
    """One step with gradients that depend on its number; one weight may have none."""
    for number, weight in enumerate(weights):
        gradient = random(*weight.shape, seed=100 * step + number).cuda()
        layout = torch.channels_last if weight.ndim == 4 and not weight.is_contiguous() else torch.preserve_format
        weight.grad = None if number == without else gradient.to(memory_format=layout)
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / (step + 1)
    optimizer.step()


def trained(without_at: int | None = None) -> list[Tensor]:
    weights, optimizer = created()
    for step in range(STEPS):
        take_step(weights, optimizer, step, without=1 if step == without_at else None)
    return [weight.detach().cpu() for weight in weights]


@pytest.mark.any_cuda
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("without_at", [None, 0, 3])
def test_a_graph_has_the_bits_of_operators(without_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = trained(without_at)
    monkeypatch.setattr(muon._Graph, "LARGEST", 0)
    one_by_one = trained(without_at)
    assert all(torch.equal(one, other) for one, other in zip(replayed, one_by_one, strict=True))
    assert all(one.isfinite().all() for one in replayed)
