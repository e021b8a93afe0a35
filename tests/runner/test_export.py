"""A model exported to other formats gives the same results, for other inputs too; a fault in a file is found and named."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor
from samewise_runner_exported import TINY, trained_in, verified

from samewise.runner.exports import formats
from samewise.runner.exports.formats import FORMATS
from samewise.runner.records.tensor_file import read_tensors, write_tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_in(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from samewise.runner.cli import main

    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    folder = tmp_path_factory.mktemp("export") / "model"
    assert main(["export", str(run), "--to", "pt2,onnx", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


@pytest.mark.slow
def test_a_model_is_exported_to_the_same_bits_and_altered_files_are_found(samewise: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    done = samewise("export", run, "--out", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert "the same bits" in done.stdout
    found = verified(samewise, tmp_path / "model", 0)
    assert list(found) == ["safetensors", "pt2"]
    assert found["pt2"]["same"]

    (tmp_path / "model" / "model.pt2").write_bytes(b"another's")
    found = verified(samewise, tmp_path / "model", 1)
    assert found["pt2"]["words"] == "model.pt2 was altered since the export, so it is only run with --trust"
    vectors = read_tensors(tmp_path / "model" / "vectors.safetensors")
    write_tensors(tmp_path / "model" / "vectors.safetensors", vectors | {"output/output": vectors["output/output"] + 1})
    found = verified(samewise, tmp_path / "model", 1)
    assert list(found) == ["safetensors", "vectors"]
    assert not found["vectors"]["sound"]


@pytest.mark.slow
def test_each_runtime_gives_the_models_results_on_other_images_and_batch_sizes(run: Path, exported: Path) -> None:
    import onnxruntime

    import samewise as package

    model = package.load(run, trust=True).model.double()
    images = torch.randint(0, 256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with torch.no_grad():
        expected = model((images.double() / 255 - 0.5) / 0.205)  # the transforms, by hand
        (pt2,) = torch.export.load(str(exported / "model.pt2")).module()(images)
    session = onnxruntime.InferenceSession(str(exported / "model.onnx"), providers=["CPUExecutionProvider"])
    (onnx,) = session.run(None, {"image": images.numpy()})
    assert (pt2 - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (torch.from_numpy(onnx) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow
def test_the_export_describes_inputs_and_outputs_and_holds_the_weights(run: Path, exported: Path) -> None:
    import samewise as package

    said = json.loads((exported / "export.json").read_text())
    assert said["inputs"] == {"image": {"dtype": "uint8", "shape": [2, 3, 16, 16]}}
    assert said["whole"]
    assert said["outputs"] == {"output": {"dtype": "float32", "shape": [2, 10]}}
    assert [form["sizes"] for form in said["formats"].values()] == [{"image": ["n1", 3, "n2", "n3"]}] * 2
    assert "- `model.onnx`: `image` [n1, 3, n2, n3]\n" in (exported / "README.md").read_text()
    assert len(said["classes"]) == 10
    assert said["transforms"]["batch"][1]["mean"] == [0.5, 0.5, 0.5]
    state = package.load(run, trust=True).model.state_dict()
    weights = read_tensors(exported / "weights.safetensors")
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)


@pytest.mark.slow
def test_a_speech_model_takes_raw_recordings(samewise: Callable[..., Any], tmp_path: Path) -> None:
    import samewise as package

    assert samewise("train", "experiment=wav2letter_spoken_digits", *TINY, f"run_root={tmp_path}").returncode == 0
    run = next(tmp_path.glob("wav2letter_spoken_digits/*"))
    assert samewise("export", run, "--out", tmp_path / "out").returncode == 0
    said = json.loads((tmp_path / "out" / "export.json").read_text())["formats"]
    assert [form["sizes"] for form in said.values()] == [{"waveform": ["n1", "n2"], "length": ["n1"]}]
    model, transforms, _ = package.load(run, trust=True)
    waveform, length = torch.randn(3, 6000, generator=torch.Generator().manual_seed(1)), torch.tensor([6000, 4000, 5123])
    given = {"waveform": torch.where(torch.arange(6000) < length[:, None], waveform, 0.0), "length": length}
    with torch.no_grad():
        batch = transforms.predictor.transform(dict(given))
        expected = model(batch["features"], batch["feature_length"])
        (found,) = torch.export.load(str(tmp_path / "out" / "model.pt2")).module()(given["waveform"], length)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.slow
def test_an_export_is_verified_in_every_runtime(samewise: Callable[..., Any], exported: Path) -> None:
    found = verified(samewise, exported, 0)
    assert [found[name]["sound"] for name in ("safetensors", "pt2", "onnx")] == [True, True, True]
    assert found["pt2"]["same"]
    assert found["onnx"]["same"] or found["onnx"]["apart"]["relative"] < 1e-5


@pytest.mark.slow
def test_an_altered_weight_is_named_for_the_weights_file_and_for_a_model(samewise: Callable[..., Any], copy: Path) -> None:
    import onnx
    from onnx import numpy_helper

    weights = read_tensors(copy / "weights.safetensors")
    write_tensors(copy / "weights.safetensors", weights | {"fc.bias": weights["fc.bias"] + 1e-6})
    model = onnx.load(str(copy / "model.onnx"))
    weight = next(one for one in model.graph.initializer if one.name.endswith("fc.weight"))
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[::-1].copy(), weight.name))
    onnx.save(model, str(copy / "model.onnx"))
    found = verified(samewise, copy, 1, "--trust")
    assert found["safetensors"]["words"] == "altered since the export: fc.bias"
    assert "model.onnx was altered since the export" in found["onnx"]["words"]
    assert "these weights differ from the model's: fc.weight" in found["onnx"]["words"]
    assert found["pt2"]["sound"]


def plant_in_onnx(folder: Path, fault: str) -> None:
    """An exporter that writes a weight transposed, or an operator with another epsilon."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(folder / "model.onnx"))
    if fault == "weight":
        weight = next(one for one in model.graph.initializer if one.name == "model.layer2.1.conv1.weight")
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).swapaxes(0, 1).copy(), weight.name))
    elif fault == "epsilon":
        norm = [node for node in model.graph.node if node.op_type == "BatchNormalization"][9]
        next(one for one in norm.attribute if one.name == "epsilon").f = 0.5
    else:
        last = next(node for node in model.graph.node if "output" in node.output)
        last.input[2] = "nothing"
        model.graph.initializer.append(numpy_helper.from_array(np.ones(10, np.float32), "nothing"))
    onnx.save(model, str(folder / "model.onnx"))


def plant_in_pt2(folder: Path, fault: str) -> None:
    program = torch.export.load(str(folder / "model.pt2"))
    if fault == "weight":
        program.state_dict["model.layer2.1.conv1.weight"].data = program.state_dict["model.layer2.1.conv1.weight"].transpose(0, 1).contiguous()
    elif fault == "epsilon":
        norm = [node for node in program.graph.nodes if node.target is torch.ops.aten.batch_norm.default][9]
        norm.args = (*norm.args[:7], 0.5, norm.args[8])
    else:
        last = [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default][-1]
        last.args = last.args[:2]
    torch.export.save(program, str(folder / "model.pt2"))


@pytest.mark.slow
@pytest.mark.parametrize(("format", "plant"), [("onnx", plant_in_onnx), ("pt2", plant_in_pt2)])
def test_a_planted_exporter_fault_is_named_with_its_operator_and_module(
    samewise: Callable[..., Any], exported: Path, tmp_path: Path, format: str, plant: Callable[[Path, str], None]
) -> None:
    module = {"weight": "in layer2.1.conv1)", "epsilon": "in layer2.1.bn2)", "last": "in fc)"}
    operator = {"onnx": ("Conv ", "BatchNormalization ", "Gemm "), "pt2": ("aten.conv2d.default ", "aten.batch_norm.default ", "aten.linear.default ")}
    for fault, kind in zip(module, operator[format], strict=True):
        folder = Path(shutil.copytree(exported, tmp_path / fault))
        plant(folder, fault)
        words = verified(samewise, folder, 1, "--trust")[format]["words"]
        assert f"({kind}{module[fault]}" in words
        assert ("differ from the model's: layer2.1.conv1.weight" in words) == (fault == "weight")


@pytest.mark.slow
def test_an_unsigned_export_runs_only_if_trusted(samewise: Callable[..., Any], copy: Path) -> None:
    (copy / ".export.json.signature").unlink()
    done = samewise("verify", copy)
    assert done.returncode == 2
    assert "is not signed by you" in done.stderr
    assert "--trust" in done.stderr
    assert samewise("verify", copy, "--trust").returncode == 0


@pytest.mark.slow
def test_results_outside_the_tolerance_refuse_the_export(samewise: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    done = samewise("export", run, "--to", "onnx", "--tolerance", "0", "--out", tmp_path / "strict")
    if done.returncode == 0 and verified(samewise, tmp_path / "strict", 0)["onnx"]["same"]:
        pytest.skip("onnxruntime gives the same bits here")
    assert done.returncode == 2
    assert "was not exported: output differs by" in done.stderr
    assert not (tmp_path / "strict" / "export.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "torchscript"], "TorchScript is deprecated: pt2 is for Python and C++, onnx for other runtimes"),
        (["--to", "onx"], "did you mean 'onnx'?"),
        (["--tolerance", "2"], "--tolerance: is not a valid share"),
        (["--module", "layer9"], "did you mean 'layer4'?"),
        (["--weights", "other"], "the run does not have these weights"),
        (["--log-model"], "--log-model: MLflow cannot serve any of these formats; hint: --to onnx"),
    ],
)
def test_impossible_exports_are_refused_with_the_reason(samewise: Callable[..., Any], run: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    done = samewise("export", run, *arguments, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_aoti_is_refused_without_a_compiler(samewise: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        done = samewise("export", run, "--to", "aoti", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "needs a C++ compiler to be written; hint: on Debian and Ubuntu, apt install g++" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_not_blamed_on_the_model(samewise: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, before[1]))  # more than the weights take
    try:
        done = samewise("export", run, "--to", "pt2", "--out", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/out/model.pt2: cannot be written: File too large; hint: check the storage")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_interrupted_export_can_be_repeated(samewise: Callable[..., Any], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for while_it in ("write", "sizes"):  # the second comes last, when all files but the description are there
        with monkeypatch.context() as patch:
            patch.setattr(formats, while_it, interrupted)
            done = samewise("export", run, "--to", "pt2", "--out", tmp_path / "out")
        assert (done.returncode, done.stderr) == (3, "interrupted; run the same command again\n")
        assert not (tmp_path / "out").exists()
    assert samewise("export", run, "--to", "pt2", "--out", tmp_path / "out").returncode == 0
    (tmp_path / "out" / "export.json").unlink()  # as after SIGKILL
    assert "hint: it is an export that did not end, without export.json" in samewise("export", run, "--to", "pt2", "--out", tmp_path / "out").stderr
    done = samewise("verify", tmp_path / "out")
    assert (done.returncode, "RUN: is an export that did not end, without export.json" in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_parametrised_weights_are_merged_in_every_format(samewise: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    import samewise as package

    kinds = {"conv1.*": "weight_norm", "layer1.*.conv1.*": "spectral_norm", "layer2.*.conv1.*": "orthogonal", "layer3.*.conv1.*, rank: 2": "lora"}
    parametrised = [f"+initialise.parametrisations.rule{place}={{match: {match}, kind: {kind}}}" for place, (match, kind) in enumerate(kinds.items())]
    sizes = ["model.width=4", "dataset.image_size=16"]
    assert samewise("train", "experiment=resnet18_digits", *TINY, *sizes, *parametrised, f"run_root={tmp_path / 'runs'}").returncode == 0
    found = next(tmp_path.glob("runs/resnet18_digits/*"))
    done = samewise("export", found, "--bare", "--to", "pt2,onnx", "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    pt2, onnx = json.loads(done.stdout)["formats"]
    assert pt2["same"]
    assert onnx["same"] or onnx["apart"]["relative"] < 1e-5
    weights, vectors = read_tensors(tmp_path / "out" / "weights.safetensors"), read_tensors(tmp_path / "out" / "vectors.safetensors")
    model = package.load(found, trust=True).model
    with torch.no_grad():
        assert torch.equal(model(*(tensor for name, tensor in vectors.items() if name.startswith("input/"))), vectors["output/output"])
        assert torch.equal(model.conv1.weight, weights["conv1.weight"])
    plain = package.load(run, trust=True).model
    plain.load_state_dict(weights)
    for name in ("pt2", "onnx"):
        assert FORMATS[name].weights(tmp_path / "out" / FORMATS[name].file).keys() & weights.keys() >= {"conv1.weight", "layer3.0.conv1.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", [pytest.param("wav2letter_spoken_digits", marks=pytest.mark.long), "conv_tasnet_spoken_digits", "gan_digits"])
def test_models_of_other_recipes_are_exported(samewise: Callable[..., Any], tmp_path: Path, experiment: str) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    assert samewise("train", f"experiment={experiment}", *TINY, f"run_root={tmp_path}").returncode == 0
    done = samewise("export", next(tmp_path.glob(f"{experiment}/*")), "--to", "pt2,onnx", "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    pt2, onnx = json.loads(done.stdout)["formats"]
    assert pt2["same"]
    assert onnx["same"] or onnx["apart"]["relative"] < 1e-5
