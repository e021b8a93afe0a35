"""Models as programs, without a run: what a file takes and holds, and what an exporter refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn

from samewise.runner.errors import ConfigError
from samewise.runner.exports.call import Call, Function, observe
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
