"""Exports in int8 and for executorch: their loss, their content, and their faults, which are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor
from samewise_runner_exported import TINY, trained_in, verified


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_in(tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_int8_reports_its_loss_on_the_validation_split_and_names_faults(samewise: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    from onnx import numpy_helper

    by_loss = ["evaluate.monitor=valid/loss", "evaluate.mode=min", "--most-lost", "0.9"]
    assert samewise("export", run, *by_loss, "--to", "onnx,onnx-int8", "--out", tmp_path / "out").returncode == 0
    form = json.loads((tmp_path / "out" / "export.json").read_text())["formats"]["onnx-int8"]
    lost = form["accuracy"]
    best = json.loads((run / "summary.json").read_text())["metrics"]["best"]
    assert (lost["metric"], lost["exact"]) == ("loss", pytest.approx(best["valid/loss"], rel=1e-6))
    assert 0 < abs(lost["quantised"] - lost["exact"]) < 0.5 * lost["exact"]  # it was evaluated, and it is the same model
    assert 1e-5 < lost["differs"] < 0.2
    assert "QuantizeLinear" in form["operators"]
    sizes = [(tmp_path / "out" / name).stat().st_size for name in ("model.int8.onnx", "model.onnx")]
    assert sizes[0] < sizes[1]
    assert f"loss {lost['quantised']:.4g} in int8, {lost['exact']:.4g} in float32" in (tmp_path / "out" / "README.md").read_text()
    held = verified(samewise, tmp_path / "out", 0)["onnx-int8"]
    assert held["same"]
    assert held["words"] == "compared with its results at export: the same bits"

    for fault in ("transposed", "scale"):
        folder = Path(shutil.copytree(tmp_path / "out", tmp_path / fault))
        model = onnx.load(str(folder / "model.int8.onnx"))
        name = "model.layer2.1.conv1.weight_" + ("scale" if fault == "scale" else "quantized")
        weight = next(one for one in model.graph.initializer if one.name == name)
        other = numpy_helper.to_array(weight) * np.float32(2) if fault == "scale" else numpy_helper.to_array(weight).swapaxes(0, 1).copy()
        weight.CopyFrom(numpy_helper.from_array(other, weight.name))
        onnx.save(model, str(folder / "model.int8.onnx"))
        words = verified(samewise, folder, 1, "--trust")["onnx-int8"]["words"]
        assert "these weights differ from the model's: layer2.1.conv1.weight" in words
        assert "first at model.layer2.1.conv1.weight" in words


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "onnx-int8"])
def test_an_exporter_fault_is_named_and_refuses_the_export(
    samewise: Callable[..., Any], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """What torch's exporter and onnxruntime's quantiser write is altered before samewise reads it."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    from onnx import numpy_helper

    from samewise.runner.exports.formats import FORMATS

    true = FORMATS[format].write

    def faulty(call: Any, path: Path) -> Any:
        program = true(call, path)
        model = onnx.load(str(path))
        if format == "onnx":
            norm = [node for node in model.graph.node if node.op_type == "BatchNormalization"][9]
            next(one for one in norm.attribute if one.name == "epsilon").f = 0.5
        else:
            scale = next(one for one in model.graph.initializer if one.name == "model.layer2.1.conv1.weight_scale")
            scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(2), scale.name))
        onnx.save(model, str(path))
        return program

    monkeypatch.setattr(FORMATS[format], "write", faulty)
    done = samewise("export", run, "--to", format, "--most-lost", "0.9", "--out", tmp_path / "out")
    assert done.returncode == 2
    named = {
        "onnx": "(BatchNormalization in layer2.1.bn2); its weights are the model's, so an operator computes differently",
        "onnx-int8": "was not exported: these weights differ by more than int8 rounding explains: layer2.1.conv1.weight",
    }
    assert named[format] in done.stderr
    assert not (tmp_path / "out" / "export.json").exists()


@pytest.mark.slow
def test_int8_that_loses_too_much_is_refused(samewise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges taken from black images alone clip all others; this would cost nothing if the model had learned nothing."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    from samewise.runner.exports import quantised

    learns = [*TINY, "max_steps=60", "model.width=4", "dataset.image_size=16"]
    assert samewise("train", "experiment=resnet18_digits", *learns, f"run_root={tmp_path / 'runs'}").returncode == 0
    run = next(tmp_path.glob("runs/resnet18_digits/*"))
    true = quantised.examples
    black = lambda *given, **options: tuple({name: torch.zeros_like(one) for name, one in example.items()} for example in true(*given, **options))  # noqa: E731
    monkeypatch.setattr(quantised, "examples", black)
    done = samewise("export", run, "evaluate.monitor=valid/loss", "evaluate.mode=min", "--to", "onnx-int8", "--most-lost", "0", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "was not exported: quantised, it loses " in done.stderr
    assert not (tmp_path / "out" / "export.json").exists()


@pytest.mark.slow
def test_an_executorch_program_takes_any_batch_size_and_lists_its_operators(samewise: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="executorch is not installed")
    from executorch.runtime import Runtime

    assert samewise("export", run, "--to", "executorch,pt2", "--out", tmp_path / "out").returncode == 0
    found = verified(samewise, tmp_path / "out", 0)
    assert found["executorch"]["same"] or found["executorch"]["apart"]["relative"] < 1e-5
    operators = json.loads((tmp_path / "out" / "export.json").read_text())["formats"]["executorch"]["operators"]
    assert {"aten::convolution.out", "aten::relu.out"} < set(operators)
    images = torch.randint(0, 256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    (given,) = Runtime.get().load_program(str(tmp_path / "out" / "model.pte")).load_method("forward").execute([images])
    (expected,) = torch.export.load(str(tmp_path / "out" / "model.pt2")).module()(images)
    assert (given - expected).abs().max() < 1e-5 * expected.abs().max()

    done = samewise("export", run, "memory_format=channels_last", "--bare", "--to", "executorch", "--out", tmp_path / "last")
    assert done.returncode == 0, done.stderr  # its kernels do not accept weights in this memory format
