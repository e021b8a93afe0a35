"""Models as programs: what a file takes and holds, detectors, speaking in other runtimes, and what is reported of a difference."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from samewise_runner_exported import TINY
from torch import nn

from samewise.runner.errors import ConfigError
from samewise.runner.exports.call import Call, Function, observe
from samewise.runner.exports.difference import difference
from samewise.runner.exports.formats import FORMATS
from samewise.runner.interfaces import Loss, Phase, Recipe
from samewise.runner.optim.parametrise import merge
from samewise.runner.records.tensor_file import read_tensors, write_tensors


class Distillation(Recipe):
    def loss(self, model: torch.nn.Module, batch: dict[str, Any], phase: Phase) -> Loss:
        with torch.no_grad():
            taught = model.get_submodule("teacher")(batch["x"])
        return Loss((model.get_submodule("student")(batch["x"]) - taught).square().sum(), len(batch["x"]))


def test_a_recipe_that_calls_several_parts_of_its_model_needs_the_name_of_the_one_to_export() -> None:
    model = torch.nn.ModuleDict({"teacher": torch.nn.Linear(3, 2), "student": torch.nn.Linear(3, 2)}).eval()
    batch = {"x": torch.randn(4, 3)}
    with pytest.raises(ConfigError) as raised:
        observe(Distillation(), model, batch, lambda batch: batch)
    (problem,) = raised.value.problems
    assert (problem.path, problem.hint) == ("--module", "name teacher or student, or give the recipe a `predict` that calls the model")
    call = observe(Distillation(), model, batch, lambda batch: batch, module="student")
    assert torch.equal(next(iter(call.outputs.values())), model["student"](batch["x"]))


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_in_three_dimensions_runs_as_onnx(tmp_path: Path, bias: bool) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, clip = torch.nn.Conv3d(3, 4, 3, bias=bias), torch.randn(2, 3, 5, 6, 7)
    call = Call("", Function(model, (clip,), {}), {"clip": clip}, {"output": model(clip).detach()})
    FORMATS["onnx"].write(call, tmp_path / "model.onnx")
    clips = torch.randn(3, 3, 6, 7, 8)
    (found,) = onnxruntime.InferenceSession(str(tmp_path / "model.onnx")).run(None, {"clip": clips.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(clips).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["pt2", "onnx"])
def test_a_file_holds_the_merged_weights_of_a_recurrent_layer(tmp_path: Path, name: str) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    torch.manual_seed(0)
    model = nn.utils.parametrizations.weight_norm(nn.LSTM(3, 4, batch_first=True), "weight_hh_l0")
    with torch.no_grad():
        model.parametrizations.weight_hh_l0.original0.mul_(2)
    expected = model.eval()(x := torch.randn(2, 5, 3))[0].detach()
    weight = model.weight_hh_l0.detach()
    merge(model)
    FORMATS[name].write(Call("", Function(model, (x,), {}).eval(), {"x": x}, {"output": expected}), tmp_path / "model.pt2")
    assert torch.equal(FORMATS[name].weights(tmp_path / "model.pt2")["weight_hh_l0"], weight)
    assert torch.allclose(FORMATS[name].load(tmp_path / "model.pt2")({"x": x})[0], expected, atol=1e-6)


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its export."""
    from samewise.runner.cli import main

    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    root = tmp_path_factory.mktemp("detector")
    assert main(["train", "experiment=retinanet_bccd", *TINY, "max_steps=8", f"run_root={root}"]) == 0
    assert main(["export", str(next(root.glob("retinanet_bccd/*"))), "--to", "pt2,onnx", "--out", str(root / "export")]) == 0
    return next(root.glob("retinanet_bccd/*")), root / "export"


@pytest.mark.slow
def test_an_exported_detector_finds_the_same_boxes_in_other_images(detector: tuple[Path, Path]) -> None:
    import onnxruntime

    import samewise as package

    run, folder = detector
    said = json.loads((folder / "export.json").read_text())
    assert said["whole"]
    assert said["inputs"]["image"]["dtype"] == "uint8"
    assert list(said["outputs"]) == ["boxes", "labels", "scores"]
    model = package.load(run, trust=True).model
    program = torch.export.load(str(folder / "model.pt2")).module()
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == said["inputs"]["image"]["shape"]  # the resized size is in the file, so another one is refused
    assert said["formats"]["onnx"]["sizes"] == {"image": said["inputs"]["image"]["shape"]}
    counts = set[int]()
    for image in torch.randint(0, 256, (4, 1, *said["inputs"]["image"]["shape"][1:]), generator=torch.Generator().manual_seed(5), dtype=torch.uint8):
        with torch.no_grad():
            (expected,) = model([image[0].float() / 255])
            found = program(image)
        for boxes, labels, scores in (found, map(torch.from_numpy, session.run(None, {"image": image.numpy()}))):
            assert torch.equal(labels, expected["labels"])
            assert (boxes - expected["boxes"]).abs().max() < 1e-3
            assert (scores - expected["scores"]).abs().max() < 1e-5
        counts.add(len(labels))
    assert len(counts) > 1  # the number of boxes depends on the image


EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from samewise.runner.cli import main

    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    root = tmp_path_factory.mktemp("vocoder")
    assert main(["train", "experiment=wavernn_spoken_digits", *TINY, f"run_root={root}"]) == 0
    return next(root.glob("wavernn_spoken_digits/*"))


@pytest.fixture(scope="module")
def speaker(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from samewise.runner.cli import main

    folder = tmp_path_factory.mktemp("export") / "speaker"
    assert main(["export", str(run), "--to", "pt2,onnx", "--out", str(folder)]) == 0
    return folder


def speak_in_python(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the Python program, which does not use samewise."""
    return subprocess.run([sys.executable, str(EXAMPLES / "python" / "speak.py"), str(folder)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_programs_speak_what_the_model_speaks_and_fail_otherwise(speaker: Path, tmp_path: Path) -> None:
    import onnx
    from onnx import numpy_helper

    said = speak_in_python(speaker)
    assert said.returncode == 0, said.stdout + said.stderr
    copy = Path(shutil.copytree(speaker, tmp_path / "copy"))
    for part in ("conditioning", "step"):
        (copy / part / "model.onnx").unlink()
    said = speak_in_python(copy)  # by torch
    assert said.returncode == 0, said.stdout + said.stderr
    assert "spoken the same bits" in said.stdout

    vectors = read_tensors(copy / "step" / "vectors.safetensors")
    held = (copy / "step" / "vectors.safetensors").read_bytes()
    about = json.loads(held[8 : 8 + int.from_bytes(held[:8], "little")])["__metadata__"]
    write_tensors(copy / "step" / "vectors.safetensors", vectors | {"check/uniform": vectors["check/uniform"].flip(0)}, about)
    assert speak_in_python(copy).returncode == 1  # other random numbers

    shutil.copytree(speaker, tmp_path / "planted")
    path = tmp_path / "planted" / "step" / "model.onnx"
    model = onnx.load(str(path))
    weight = next(one for one in model.graph.initializer if one.name == "model.rnn1.weight_hh_l0")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[::-1].copy(), weight.name))
    onnx.save(model, str(path))
    assert speak_in_python(tmp_path / "planted").returncode == 1


def test_ulps_count_the_steps_between_numbers() -> None:
    one = torch.tensor([1.0, -0.0, -1.0])
    other = torch.nextafter(torch.nextafter(one, torch.full_like(one, 9.0)), torch.full_like(one, 9.0))
    apart = difference({"x": one}, {"x": other})
    assert apart is not None
    assert apart.ulps == 2
    assert difference({"x": one}, {"x": one.clone()}) is None
    zeros = difference({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])})
    assert zeros is not None  # other bits, but the same number
    assert (zeros.ulps, zeros.relative) == (0, 0.0)
