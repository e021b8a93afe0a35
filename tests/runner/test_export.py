"""A model exported to other formats gives the same results, for other inputs too; a fault in a file is found and named."""

import json
import resource
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor
from samewise_runner_exported import TINY, trained_in, verified

from samewise.runner.errors import ConfigError
from samewise.runner.exports import formats
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
    done = samewise("export", run, "--out", tmp_path / "model", code=0)
    assert "the same bits" in done.stdout
    found = verified(samewise, tmp_path / "model", 0)
    assert list(found) == ["safetensors", "pt2"]
    assert found["pt2"]["same"]

    (tmp_path / "model" / "model.pt2").write_bytes(b"another's")
    found = verified(samewise, tmp_path / "model", 1)
    assert found["pt2"]["description"] == "model.pt2 was altered since the export, so it is only run with --trust"
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
    assert found["safetensors"]["description"] == "altered since the export: fc.bias"
    assert "model.onnx was altered since the export" in found["onnx"]["description"]
    assert "these weights differ from the model's: fc.weight" in found["onnx"]["description"]
    assert found["pt2"]["sound"]


def plant_in_onnx(folder: Path, fault: str) -> None:
    """An exporter that writes a weight transposed, or an operator with another epsilon."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(folder / "model.onnx"))
    if fault == "weight":
        weight = next(one for one in model.graph.initializer if one.name == "model.layer2.0.conv2.weight")
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).swapaxes(0, 1).copy(), weight.name))
    elif fault == "epsilon":
        norm = [node for node in model.graph.node if node.op_type == "BatchNormalization"][5]
        next(one for one in norm.attribute if one.name == "epsilon").f = 0.5
    else:
        last = next(node for node in model.graph.node if "output" in node.output)
        last.input[2] = "nothing"
        model.graph.initializer.append(numpy_helper.from_array(np.ones(10, np.float32), "nothing"))
    onnx.save(model, str(folder / "model.onnx"))


def plant_in_pt2(folder: Path, fault: str) -> None:
    program = torch.export.load(str(folder / "model.pt2"))
    if fault == "weight":
        program.state_dict["model.layer2.0.conv2.weight"].data = program.state_dict["model.layer2.0.conv2.weight"].transpose(0, 1).contiguous()
    elif fault == "epsilon":
        norm = [node for node in program.graph.nodes if node.target is torch.ops.aten.batch_norm.default][5]
        norm.args = (*norm.args[:7], 0.5, norm.args[8])
    else:
        last = [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default][-1]
        last.args = last.args[:2]
    torch.export.save(program, str(folder / "model.pt2"))


@pytest.mark.slow
@pytest.mark.parametrize(("format", "plant"), [("onnx", plant_in_onnx), ("pt2", plant_in_pt2)])
def test_a_planted_exporter_fault_is_found_and_a_wrong_weight_is_named(
    samewise: Callable[..., Any], exported: Path, tmp_path: Path, format: str, plant: Callable[[Path, str], None]
) -> None:
    for fault in ("weight", "epsilon", "last"):
        folder = Path(shutil.copytree(exported, tmp_path / fault))
        plant(folder, fault)
        result = verified(samewise, folder, 1, "--trust")[format]
        assert result["sound"] is False
        assert ("differ from the model's: layer2.0.conv2.weight" in result["description"]) == (fault == "weight")


@pytest.mark.slow
def test_an_unsigned_export_runs_only_if_trusted(samewise: Callable[..., Any], copy: Path) -> None:
    (copy / ".export.json.signature").unlink()
    done = samewise("verify", copy, code=2)
    assert "is not signed by you" in done.stderr
    assert "--trust" in done.stderr
    assert samewise("verify", copy, "--trust").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "torchscript"], "TorchScript is deprecated: pt2 is for Python and C++, onnx for other runtimes"),
        (["--to", "onx"], "did you mean 'onnx'?"),
        (["--tolerance", "2"], "--tolerance: is not a valid share"),
        (["--module", "layer9"], "did you mean 'layer3'?"),
        (["--weights", "other"], "the run does not have these weights"),
    ],
)
def test_impossible_exports_are_refused_with_the_reason(samewise: Callable[..., Any], run: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    done = samewise("export", run, *arguments, "--out", tmp_path / "out", code=2)
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
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))  # more than the weights take
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
@pytest.mark.parametrize("experiment", [pytest.param("wav2letter_spoken_digits", marks=pytest.mark.long), "conv_tasnet_spoken_digits", "gan_digits"])
def test_models_of_other_recipes_are_exported(samewise: Callable[..., Any], tmp_path: Path, experiment: str) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    assert samewise("train", f"experiment={experiment}", *TINY, f"run_root={tmp_path}").returncode == 0
    done = samewise("export", next(tmp_path.glob(f"{experiment}/*")), "--to", "pt2,onnx", "--out", tmp_path / "out", "--json", code=0)
    pt2, onnx = json.loads(done.stdout)["formats"]
    assert pt2["same"]
    assert onnx["same"] or onnx["difference"]["relative"] < 1e-5


def test_a_module_that_an_exporter_lacks_is_named_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "executorch").mkdir()
    (tmp_path / "executorch" / "exir.py").write_text("import flatbuffers_of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("executorch", "executorch.exir"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    call: Any = None
    with pytest.raises(ConfigError, match=r"No module named 'flatbuffers_of_nobody'; hint: pip install '\.\[executorch\]'"):
        formats.write(formats.FORMATS["executorch"], call, tmp_path / "model.pte")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_executorch_runs_a_model_with_both_kernels_and_its_needs_are_named(run: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    packages = next(tmp_path.glob("venv/lib/python3*/site-packages"))
    # This environment's torch and samewise (by its .pth file), without most of what executorch would bring
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({str(Path(torch.__file__).parents[1])!r})")
    wanted = ["executorch", "torchao<0.19", "ruamel.yaml", "tabulate", "expecttest", "kgb", "parameterized", "py-cpuinfo"]
    pip = [sys.executable, "-m", "pip", "install", "--retries=0", "--no-deps", "--only-binary=:all:", "--target", str(packages), *wanted]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"executorch cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    command = [str(tmp_path / "venv" / "bin" / "python"), "-m", "samewise", "export", str(run), "--to", "executorch,executorch_portable"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    for name, form in json.loads((tmp_path / "out" / "export.json").read_text())["formats"].items():
        # XNNPACK's part has the convolutions
        assert ("XnnpackBackend" in form["operators"], "aten::convolution.out" in form["operators"]) == (
            (True, False) if name == "executorch" else (False, True)
        )
        assert form["bytes"] == (tmp_path / "out" / form["file"]).stat().st_size
        # At least the input, which is planned for a whole batch
        assert form["memory"] >= 2 * 3 * 16 * 16
        needs = f"{form['memory'] / 1e6:.2f} MB of planned memory and {', '.join(form['operators'])}"
        assert f"{form['file']} needs {needs}\n" in done.stdout
        assert f"Needs {needs}." in card


DECODING = {
    "torch.export": """
import torch
from torchvision.io import decode_jpeg, encode_jpeg

class Decoder(torch.nn.Module):
    def forward(self, file):
        return decode_jpeg(file)

file = encode_jpeg(torch.zeros(3, 8, 8, dtype=torch.uint8))
assert decode_jpeg(file).shape == (3, 8, 8)
print("decoded")
torch.export.export(Decoder(), (file,))
""",
    "onnxruntime": """
import onnx, onnxruntime

byte, helper = onnx.TensorProto.UINT8, onnx.helper
ends = [helper.make_tensor_value_info(*end) for end in (("file", byte, ["n"]), ("image", byte, ["h", "w", 3]))]
graph = helper.make_graph([helper.make_node("ImageDecoder", ["file"], ["image"], pixel_format="RGB")], "decoder", ends[:1], ends[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
onnx.checker.check_model(model)
print("decoded")
onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("runtime", DECODING)
def test_no_format_can_decode_a_jpeg_as_the_page_says(runtime: str) -> None:
    if runtime == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    # In a process of its own, since torch.export crashes
    done = subprocess.run([sys.executable, "-c", DECODING[runtime]], capture_output=True, text=True, check=False)
    assert done.stdout == "decoded\n", done.stderr
    assert done.returncode != 0, f"{runtime} can decode a JPEG: put it into the format, and correct docs/export.md"
