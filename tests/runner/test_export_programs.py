"""Models as programs, without a run: what a file takes and holds, and what an exporter refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn

from samewise.datasets.transforms.geometry import CenterCrop, Resize
from samewise.datasets.transforms.images import ImageTransform
from samewise.datasets.transforms.speech_features import LogMel
from samewise.recipes.audio_classification import AudioClassification
from samewise.runner.errors import ConfigError
from samewise.runner.exports.call import Call, Function, observe
from samewise.runner.exports.folder import write
from samewise.runner.exports.formats import FORMATS
from samewise.runner.interfaces import Loss, Phase, Recipe
from samewise.runner.optim.parametrise import merge


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


@pytest.mark.parametrize("dimensions", [1, 2])
def test_a_classifier_of_recordings_is_exported_with_the_transforms_that_make_its_features(dimensions: int) -> None:
    convolution = torch.nn.Conv2d(1, 3, 3) if dimensions == 2 else torch.nn.Conv1d(20, 3, 3)
    model = torch.nn.Sequential(convolution, torch.nn.Flatten(), torch.nn.LazyLinear(4))
    recipe, mel = AudioClassification(sample_rate=8000, seconds=0.1, dimensions=dimensions), LogMel(sample_rate=8000, n_mels=20, n_fft=128, hop_length=64)
    batch = recipe.collate([{"waveform": torch.randn(800), "label": 0}, {"waveform": torch.randn(800), "label": 1}])
    features = mel(batch)["features"]
    with torch.no_grad():
        expected = model(features[:, None] if dimensions == 2 else features)
    call = observe(recipe, model.eval(), batch, mel)
    assert call.whole
    assert set(call.inputs) <= {"waveform", "length"}
    (output,) = call.function(*call.inputs.values())
    assert torch.equal(output, expected)


class Paired(torch.nn.Module):
    """Its program holds for two samples."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.sum(2) * torch.ones(2, 1)


@pytest.mark.parametrize("transform", [CenterCrop(6), Resize([5, 9])], ids=lambda one: type(one).__name__)
def test_transforms_of_images_leave_the_batchs_size_free_in_a_program(transform: ImageTransform) -> None:
    class Moved(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return transform.apply({"image": image}, {})["image"]

    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    program = torch.export.export(Moved(), (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=False)
    assert torch.equal(program.module()(images), transform.apply({"image": images}, {})["image"])


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


def test_a_size_that_an_onnx_file_does_not_take_is_fixed_in_it(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    batch = torch.randn(2, 3, 4)
    call = Call("", Function(Paired(), (batch,), {}), {"batch": batch}, {"output": Paired()(batch)})
    FORMATS["onnx"].write(call, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (form,) = session.get_inputs()
    assert form.shape[0] == 2
    assert [isinstance(size, str) for size in form.shape[1:]] == [True, True]
    assert FORMATS["onnx"].sizes(tmp_path / "model.onnx", call) == {"batch": [2, "n1", "n2"]}
    with pytest.raises(Exception, match="Got: 3 Expected: 2"):
        session.run(None, {"batch": torch.randn(3, 3, 4).numpy()})


class Folded(nn.Module):
    """A program of it exists, and torch.onnx cannot decompose it for heights and widths that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv2d(3, 4, 3, padding=1), nn.GRU(4, 4, batch_first=True, bidirectional=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.interpolate(self.conv(images), scale_factor=1.5, mode="bilinear")
        values, last = self.gru(nn.functional.adaptive_avg_pool2d(wide, (4, 4)).flatten(2).transpose(1, 2))
        return values.amax(1) + last.mean()


@pytest.mark.slow
def test_what_an_exporter_refuses_is_told_with_its_cause_and_leaves_no_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, images = Folded(), torch.randn(2, 3, 8, 8)
    call = Call("", Function(model, (images,), {}), {"image": images}, {"output": model(images).detach()})
    with pytest.raises(ConfigError) as raised:
        write(tmp_path / "model", call, to=["onnx"], tolerance=1e-4, about={})
    (problem,) = raised.value.problems
    assert problem.message.startswith("onnxruntime's exporter cannot take this model: ")
    assert "Error: " in problem.message
    assert "\x1b" not in problem.message
    assert not (tmp_path / "model").exists()
