"""Digests on a CUDA device by one kernel: in Triton's interpreter they are those of torch's operators, and it compiles for current devices."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from samewise.runner.records import on_device

pytest.importorskip("triton", reason="triton is not installed")
INTERPRETED = """\
import torch
from samewise.runner.records import on_device, on_device_kernel

on_device._ROW, on_device_kernel.CHUNK, on_device_kernel.BLOCK = 64, 16, 8
torch.manual_seed(0)
images = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
odd = torch.randn(9).bfloat16()
given = [torch.randn(200), None, torch.zeros(0), images, images[:, :2], odd, odd[1:5], odd[:4], torch.randn(64, dtype=torch.float64)]
given += [torch.tensor(7), torch.arange(3), torch.randn(3, 4).t(), torch.tensor([True, False, True]), torch.randn(5, dtype=torch.complex64)]
given += [torch.full((16,), -2**31, dtype=torch.int32)]
for tensors in (given, given[:1], [None], [], given[::-1]):
    found = on_device._begin_by_kernel(tensors, torch.device("cpu"))()
    assert found == on_device._begin_by_operators(tensors)(), (found, on_device._begin_by_operators(tensors)())
    assert all(isinstance(one, int) for one in found)
given[0].add_(1)
assert on_device._begin_by_kernel(given, torch.device("cpu"))() == on_device._begin_by_operators(given)()
"""


@pytest.mark.slow
def test_the_kernels_digests_are_those_of_torchs_operators(clean_environment: dict[str, str], repository: Path) -> None:
    environment = {**clean_environment, "TRITON_INTERPRET": "1", "PYTHONPATH": str(repository / ".package")}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from samewise.runner.records import on_device_kernel

    kinds = {"chunks": "*i64", "programs": "i32", "factors": "*i64", "sums": "*i64", "CHUNK": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(fn=on_device_kernel.add_up, signature=kinds, constexprs={"CHUNK": on_device_kernel.CHUNK, "BLOCK": on_device_kernel.BLOCK})
    assert triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.gpu
def test_a_device_digests_a_model_by_the_kernel_as_the_cpu_does_without() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 700, 31), nn.BatchNorm2d(700), nn.Linear(5, 3)).to(memory_format=torch.channels_last)
    tensors = [*model.state_dict().values(), None, torch.randn(3).bfloat16(), torch.randn(4, 6)[:, :3]]
    there = [None if one is None else one.cuda() for one in tensors]
    assert on_device._has_kernel(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(3):
        assert on_device.begin(there)() == on_device.begin(tensors)()
        model[0].weight.data.add_(1e-7)
        there[0].add_(1e-7)
