"""Convolutions of any form as torch computes them on the CPU, compared with float64, on memory full of nan: see oneDNN in docs/measurements.md.

    OMP_NUM_THREADS=1 python tests/oracle/drawn_convolutions.py SEED TRIALS

Each that is wrong is printed with its form, and the counts at the end.
In channels_last, oneDNN 6035 may end the process: `--contiguous` leaves that format out.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float16)
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
CHANNELS = (1, 2, 3, 4, 5, 8, 12, 16, 17, 20, 24, 32, 40, 48, 64), (1, 2, 3, 5, 8, 10, 12, 16, 24, 30, 32, 48, 64)


def draw(chance: random.Random) -> dict[str, Any]:
    """The form of one convolution; `size` may be too small for it."""
    form: dict[str, Any] = {"dtype": chance.choice(DTYPES), "dims": chance.choice([1, 2, 2, 2, 3]), "transposed": chance.random() < 0.15}
    dims, batch, groups = form["dims"], chance.choice([1, 2, 3, 4]), chance.choice([1, 1, 1, 1, 2, "depthwise"])
    inputs, outputs = (chance.choice(some) for some in CHANNELS)
    if groups == "depthwise":
        groups, outputs = inputs, inputs * chance.choice([1, 2])
    elif groups == 2:
        inputs, outputs = 2 * inputs, 2 * outputs
    kernel = [chance.choice([1, 2, 3, 3, 4, 5, 7]) for _ in range(dims)]
    if chance.random() < 0.6:
        kernel = [kernel[0]] * dims
    stride = [chance.choice([1, 1, 2, 2, 3, 4])] * dims if chance.random() < 0.7 else [chance.choice([1, 2, 3]) for _ in range(dims)]
    dilation = [chance.choice([1, 1, 1, 2, 3])] * dims
    padding = [0] * dims if form["transposed"] else [chance.choice([0, one // 2, one // 2, one - 1]) for one in kernel]
    size = [chance.choice([1, 1, 2, 3, 4, 5, 7, 8, 9, 13, 16]) for _ in range(dims)]
    if dims == 3:
        size, kernel, batch = [min(one, 5) for one in size], [min(one, 3) for one in kernel], min(batch, 2)
        padding = [min(one, width - 1) for one, width in zip(padding, kernel, strict=True)]
    if dims == 1:
        size = [chance.choice([1, 2, 3, 5, 16, 33, 100])]
    return form | {"batch": batch, "inputs": inputs, "outputs": outputs, "groups": groups, "kernel": kernel, "stride": stride} | {
        "dilation": dilation, "padding": padding, "size": size, "channels_last": chance.random() < 0.5, "bias": chance.random() < 0.5
    }  # fmt: skip


def computed(form: dict[str, Any], given: list[Tensor], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """The output and the gradients of the input, the weights and the bias."""
    function = getattr(functional, f"conv{'_transpose' if form['transposed'] else ''}{form['dims']}d")
    tensors = [one.to(dtype).detach().requires_grad_() for one in given]
    settings = {name: form[name] for name in ("stride", "padding", "dilation", "groups")}
    _waste()
    output = function(*tensors, **settings)
    above = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(form["dtype"])
    if form["channels_last"] and form["dims"] in FORMATS:
        above = above.to(memory_format=FORMATS[form["dims"]])
    _waste()
    output.backward(above.to(dtype))
    gradients = zip(("input", "weight", "bias"), tensors, strict=False)
    return {"output": output.detach(), **{f"gradient of {name}": one.grad for name, one in gradients}}  # pyright: ignore[reportReturnType]


def _waste() -> None:
    """Fill free memory with nan."""
    for waste in [torch.full((size,), torch.nan) for size in (64, 256, 1024, 4096, 16384, 65536) * 3]:
        del waste


def main() -> None:
    """Draw, compare, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("trials", type=int)
    parser.add_argument("--contiguous", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    chance, tried, wrong = random.Random(asked.seed), collections.Counter[str](), collections.Counter[str]()
    while sum(tried.values()) < asked.trials:
        form = draw(chance)
        form["channels_last"] &= not asked.contiguous
        spans = zip(form["size"], form["padding"], form["dilation"], form["kernel"], strict=True)
        if not form["transposed"] and any(size + 2 * padding < dilation * (kernel - 1) + 1 for size, padding, dilation, kernel in spans):
            continue
        source = torch.Generator().manual_seed(sum(tried.values()))
        ends = (form["inputs"], form["outputs"] // form["groups"]) if form["transposed"] else (form["outputs"], form["inputs"] // form["groups"])
        shapes = [(form["batch"], form["inputs"], *form["size"]), (*ends, *form["kernel"]), *([(form["outputs"],)] if form["bias"] else [])]
        given = [torch.randn(shape, generator=source).to(form["dtype"]) for shape in shapes]
        if form["channels_last"] and form["dims"] in FORMATS:
            given[0] = given[0].to(memory_format=FORMATS[form["dims"]])
        found, right = (computed(form, given, dtype, sum(tried.values())) for dtype in (form["dtype"], torch.float64))
        name, most = str(form["dtype"]).removeprefix("torch."), 1e-4 if form["dtype"] is torch.float32 else 0.03
        off = {what: float((found[what].double() - one).abs().max() / (one.abs().max() + 1e-9)) for what, one in right.items()}
        off = {what: error for what, error in off.items() if not error < most}
        tried[name] += 1
        wrong[name] += bool(off)
        if off:
            print({what: f"{error:.2g}" for what, error in off.items()}, form, flush=True)
    print("drawn", dict(tried), "wrong", dict(wrong))


if __name__ == "__main__":
    main()
