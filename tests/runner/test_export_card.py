"""What an export says of itself: whose weights and metrics it holds, and which sizes each file takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_exported import TINY
from torch import nn

from samewise.runner.exports.call import Call, Function
from samewise.runner.exports.formats import FORMATS, sizes


@pytest.mark.slow
def test_an_export_names_its_weights_and_has_the_metrics_of_these(samewise: Callable[..., Any], tmp_path: Path) -> None:
    small = [*TINY, "model.width=4", "dataset.image_size=16", "callbacks=ema", "checkpoint.every_steps=1", f"run_root={tmp_path}"]
    assert samewise("train", "experiment=resnet18_digits", *small).returncode == 0
    run = next(tmp_path.glob("resnet18_digits/*"))
    best = json.loads((run / "summary.json").read_text())["metrics"]["best"]
    assert best["step"] == 2
    own, averages = ({name: value for name, value in best.items() if name.startswith(start)} for start in ("valid/", "ema/valid/"))
    assert own["valid/loss"] != averages["ema/valid/loss"]

    def exported_with(*options: str) -> tuple[dict[str, Any], str, str]:
        folder = tmp_path / "-".join(["out", *options])
        done = samewise("export", run, *options, "--to", "safetensors", "--out", folder)
        assert done.returncode == 0, done.stderr
        assert samewise("verify", folder).returncode == 0
        return json.loads((folder / "export.json").read_text()), (folder / "README.md").read_text(), done.stdout

    said, card, printed = exported_with("--weights", "ema")
    assert (said["average"], said["metrics"]) == ("ema", {**averages, "step": 2})
    assert "The weights are the average `ema` of those in training, not the trained weights themselves." in card.split("|")[0]
    assert f"| metrics | ema/valid/loss {averages['ema/valid/loss']:.4g}, " in card
    assert "step 2, its ema\n" in printed

    said, card, _ = exported_with()
    assert (said["average"], said["metrics"]) == (None, {**own, "step": 2})
    assert "ema" not in card
    assert f"| metrics | valid/loss {own['valid/loss']:.4g}, " in card

    said, card, _ = exported_with("--checkpoint", "1")  # the metrics of the best checkpoint are not this one's
    assert (said["step"], said["metrics"]) == (1, {})
    assert "| metrics | none, since these weights were not evaluated at this step |" in card


class Scaled(nn.Module):
    """Has a factor for each sample, and a fixed number of columns."""

    def forward(self, batch: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(batch, torch.ones(2, 4)) * factor[:, None, None]


@pytest.mark.parametrize("format", ["pt2", "onnx", "executorch"])
def test_fixed_sizes_are_numbers_and_sizes_that_must_be_the_same_have_the_same_name(tmp_path: Path, format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
    model, inputs = Scaled(), {"batch.0": torch.randn(2, 3, 4), "factor": torch.randn(2)}
    call = Call("", Function(model, tuple(inputs.values()), {}), inputs, {"output": model(*inputs.values())})
    if format != "executorch":  # which has its program's sizes; the file does not tell them
        FORMATS[format].write(call, tmp_path / "model")
    assert sizes(FORMATS[format], tmp_path / "model", call) == {"batch.0": ["n1", "n2", 4], "factor": ["n1"]}
