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
from torch import nn

from samewise.runner.exports.call import Call, Function
from samewise.runner.exports.folder import write
from samewise.runner.exports.formats import FORMATS
from samewise.runner.exports.quantised import Accuracy


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
    assert not (tmp_path / "out").exists()


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
    assert not (tmp_path / "out").exists()


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


class Products(nn.Module):
    """Every way to write a product: a linear layer of sequences and of vectors, `x @ W`, `W @ x`, and the weights of an embedding, which stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.sequences, self.vectors = nn.Linear(8, 12), nn.Linear(12, 6)
        self.square, self.wide, self.before = (nn.Parameter(torch.randn(shape)) for shape in ((12, 12), (6, 10), (3, 7)))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vectors = self.embedding(tokens)
        hidden = torch.tanh(self.before @ self.sequences(vectors)) @ self.square
        return torch.tanh(self.vectors(hidden.mean(1))) @ self.wide, vectors @ self.embedding.weight.T


def call_of(model: nn.Module) -> Call:
    tokens = torch.randint(0, 5, (4, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, alike = model(tokens)
    return Call("", Function(model, (tokens,), {}).eval(), {"tokens": tokens}, {"logits": logits, "alike": alike})


def test_a_product_becomes_int8_however_it_is_written_and_a_fault_in_its_weight_is_named(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    from onnx import numpy_helper

    torch.manual_seed(0)
    model = Products().eval()
    call, form, path, weights = call_of(model), FORMATS["onnx-int8"], tmp_path / "model.onnx", model.state_dict()
    form.write(call, path)
    int8 = {"sequences.weight", "vectors.weight", "square", "wide", "before"}
    assert form.int8_share(path, weights) == sum(weights[name].numel() for name in int8) / sum(weight.numel() for weight in weights.values())
    held = form.weights(path)
    assert all(0 < (held[name] - weights[name]).abs().max() < weights[name].abs().max() / 60 for name in int8)
    assert torch.equal(held["embedding.weight"], weights["embedding.weight"])
    for given, expected in zip(form.load(path)(call.inputs), call.outputs.values(), strict=True):
        assert (given - expected).abs().max() < 0.1 * expected.abs().max()
    assert form.altered_weights(path, weights) == []

    for name in int8:
        faulty = onnx.load(str(path))
        scale = next(one for one in faulty.graph.initializer if one.name.removeprefix("model.") in (f"{name}_scale", f"{name}.transposed_scale"))
        scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(2), scale.name))
        onnx.save(faulty, str(tmp_path / "faulty.onnx"))
        assert form.altered_weights(tmp_path / "faulty.onnx", weights) == [name]


def test_an_export_of_which_little_becomes_int8_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    model = Products().eval()
    model.embedding = nn.Embedding(100, 8)
    about = {"experiment": "one", "run": "3f2a", "step": 1, "model": {}, "metrics": {}, "transforms": {}}
    write(tmp_path / "out", call_of(model), to=["onnx-int8"], tolerance=1e-4, about=about, accuracy=lambda _: Accuracy("loss", 1.0, 1.0, 0.0, 4))
    form = json.loads((tmp_path / "out" / "export.json").read_text())["formats"]["onnx-int8"]
    assert 0.3 < form["int8_share"] < 0.4
    assert f"{form['int8_share']:.0%} of the weights are int8" in form["compared"]
    assert form["compared"] in (tmp_path / "out" / "README.md").read_text()
    assert f"only {form['int8_share']:.0%} of the weights are int8" in capsys.readouterr().err
