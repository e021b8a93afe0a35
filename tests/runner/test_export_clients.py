"""The programs in docs/examples run an export, and give what the model gives."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_exported import TINY

from samewise.runner.records.tensor_file import read_tensors, write_tensors

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"

MODEL = """\
# As few operators as a compiler can show its work on
_target_: torch.nn.Sequential
_args_:
  - {_target_: torch.nn.Conv2d, in_channels: "${dataset.channels}", out_channels: 4, kernel_size: 3}
  - {_target_: torch.nn.BatchNorm2d, num_features: 4}
  - {_target_: torch.nn.ReLU}
  - {_target_: torch.nn.AdaptiveAvgPool2d, output_size: 1}
  - {_target_: torch.nn.Flatten}
  - {_target_: torch.nn.Linear, in_features: 4, out_features: "${dataset.num_classes}"}
"""


def export(formats: str, folder: Path) -> Path:
    from samewise.runner.cli import main

    (folder / "configs" / "model").mkdir(parents=True)
    (folder / "configs" / "model" / "few_operators.yaml").write_text(MODEL)
    given = [*TINY, "model=few_operators", f"run_root={folder / 'runs'}", "--config-dir", str(folder / "configs")]
    assert main(["train", "experiment=resnet18_digits", *given]) == 0
    assert main(["export", str(next(folder.glob("runs/resnet18_digits/*"))), "--to", formats, "--out", str(folder / "model")]) == 0
    return folder / "model"


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})


def alter_vectors(folder: Path, to: Path, by: float) -> Path:
    """A copy with vectors that expect other outputs of the model."""
    vectors = read_tensors(folder / "vectors.safetensors")
    held = (folder / "vectors.safetensors").read_bytes()
    about = json.loads(held[8 : 8 + int.from_bytes(held[:8], "little")])["__metadata__"]
    shutil.copytree(folder, to)
    write_tensors(to / "vectors.safetensors", vectors | {"output/output": vectors["output/output"] * (1 + by)}, about)
    return to


def check_client(command: list[str], folder: Path, tmp_path: Path) -> None:
    """Assert that a program predicts what the model does, and finds what is wrong."""
    said = run(command, folder)
    assert said.returncode == 0, said.stderr
    classes = json.loads((folder / "export.json").read_text())["classes"]
    best = read_tensors(folder / "vectors.safetensors")["output/output"].argmax(1)
    assert [f"sample {place}: {classes[one]}" for place, one in enumerate(best)] == said.stdout.splitlines()[:-1]
    apart = said.stdout.splitlines()[-1]
    assert apart == "output the same bits" or float(apart.split()[3]) < 1e-5, apart

    wrong = run(command, alter_vectors(folder, tmp_path / "wrong", 0.5))
    assert wrong.returncode == 1
    assert wrong.stdout.splitlines()[-1].startswith("output differs by ")
    assert float(wrong.stdout.splitlines()[-1].split()[3]) == pytest.approx(0.33, abs=0.01)
    assert int(wrong.stdout.rpartition("(")[2].partition(" ulps")[0].replace(",", "")) > 1_000_000

    cut = Path(shutil.copytree(folder, tmp_path / "cut"))
    (cut / "vectors.safetensors").write_bytes((folder / "vectors.safetensors").read_bytes()[:-8])
    ended = run(command, cut)
    assert ended.returncode == 2
    assert "cut short" in ended.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_aotinductor_package_runs_in_cpp(tmp_path: Path) -> None:
    if missing := [program for program in ("cmake", "g++") if not shutil.which(program)]:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    folder = export("aoti", tmp_path)
    clients = tmp_path / "examples"
    shutil.copytree(EXAMPLES / "cpp", clients / "cpp", ignore=shutil.ignore_patterns("build"))
    torch_folder = Path(torch.__file__).parent
    for command in (["cmake", "-S", ".", "-B", "build", f"-DTORCH={torch_folder}"], ["cmake", "--build", "build"]):
        subprocess.run(command, cwd=clients / "cpp", check=True, capture_output=True)
    check_client([str(clients / "cpp" / "build" / "verify")], folder, tmp_path)


@pytest.mark.timeout(900)
def test_an_onnx_model_runs_in_node(samewise: Callable[..., Any], tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    clients = tmp_path / "examples"
    shutil.copytree(EXAMPLES / "node", clients / "node", ignore=shutil.ignore_patterns("node_modules", "package-lock.json"))
    try:  # the package's own script would only install CUDA
        npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0"]
        done = subprocess.run(npm, cwd=clients / "node", capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not answer")
    if done.returncode:
        pytest.skip(f"onnxruntime-node cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    folder = export("onnx", tmp_path)
    program = ["node", str(clients / "node" / "verify.mjs")]
    check_client(program, folder, tmp_path)

    assert samewise("train", "experiment=wavernn_spoken_digits", *TINY, f"run_root={tmp_path / 'runs'}").returncode == 0
    speaker = next(tmp_path.glob("runs/wavernn_spoken_digits/*"))
    assert samewise("export", speaker, "--to", "onnx", "--out", tmp_path / "speaker").returncode == 0
    said = subprocess.run(["node", str(clients / "node" / "speak.mjs"), str(tmp_path / "speaker")], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "spoken " in said.stdout

    (folder / "model.onnx").write_bytes(b"not a model")
    ended = run(program, folder)
    assert ended.returncode == 2
    assert "    at " not in ended.stderr  # no stack trace


WITHOUT_SAMEWISE = """
import runpy, sys
sys.modules["samewise"] = sys.modules["torch"] = None
sys.path.insert(0, sys.argv[1])
sys.argv = ["verify.py", sys.argv[2]]
runpy.run_path(sys.path[0] + "/verify.py", run_name="__main__")
"""


def test_an_onnx_model_runs_in_python_without_samewise_or_torch(tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = export("onnx", tmp_path)

    def verify(folder: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_SAMEWISE, str(EXAMPLES / "python"), str(folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    said = verify(folder)
    assert said.returncode == 0, said.stderr
    classes = json.loads((folder / "export.json").read_text())["classes"]
    best = read_tensors(folder / "vectors.safetensors")["output/output"].argmax(1)
    assert [f"sample {place}: {classes[one]}" for place, one in enumerate(best)] == said.stdout.splitlines()[:-1]
    wrong = verify(alter_vectors(folder, tmp_path / "wrong", 0.5))
    assert wrong.returncode == 1
    assert wrong.stdout.splitlines()[-1] == "output differs by 0.33 of its largest number"
    (folder / "vectors.safetensors").write_bytes((folder / "vectors.safetensors").read_bytes()[:-8])
    ended = verify(folder)
    assert ended.returncode == 2
    assert "cut short" in ended.stderr


JAVA_API = {
    "OrtException": "class OrtException extends Exception {}",
    "OnnxJavaType": "enum OnnxJavaType {FLOAT, DOUBLE, INT8, INT16, INT32, INT64, BOOL, STRING, UINT8, FLOAT16, BFLOAT16, UNKNOWN}",
    "OnnxValue": "interface OnnxValue extends AutoCloseable {void close();}",
    "TensorInfo": """class TensorInfo {
  public final OnnxJavaType type; final long[] shape;
  TensorInfo(OnnxJavaType type, long[] shape) {this.type = type; this.shape = shape;}
  public long[] getShape() {return shape;}
}""",
    "OnnxTensor": """class OnnxTensor implements OnnxValue {
  final TensorInfo info; final java.nio.ByteBuffer bytes;
  OnnxTensor(TensorInfo info, java.nio.ByteBuffer bytes) {this.info = info; this.bytes = bytes;}
  public static OnnxTensor createTensor(OrtEnvironment environment, java.nio.ByteBuffer bytes, long[] shape, OnnxJavaType type) throws OrtException {
    return new OnnxTensor(new TensorInfo(type, shape), bytes);
  }
  public TensorInfo getInfo() {return info;}
  public java.nio.ByteBuffer getByteBuffer() {return bytes.duplicate();}
  public void close() {}
}""",
    "OrtEnvironment": """class OrtEnvironment {
  public static OrtEnvironment getEnvironment() {return new OrtEnvironment();}
  public OrtSession createSession(String path, OrtSession.SessionOptions options) throws OrtException {return new OrtSession(path);}
}""",
    "OrtSession": """class OrtSession implements AutoCloseable {
  final String path;
  OrtSession(String path) {this.path = path;}
  public java.util.Set<String> getInputNames() {return java.util.Set.of("image");}
  public Result run(java.util.Map<String, OnnxTensor> feeds) throws OrtException {
    if (!feeds.keySet().equals(getInputNames())) throw new IllegalArgumentException(feeds.toString());
    return new Result();
  }
  public void close() throws OrtException {}
  public static class SessionOptions implements AutoCloseable {
    public void setIntraOpNumThreads(int number) throws OrtException {}
    public void setInterOpNumThreads(int number) throws OrtException {}
    public void close() {}
  }
  public class Result implements AutoCloseable {
    public java.util.Optional<OnnxValue> get(String name) {
      try {
        var bytes = java.nio.ByteBuffer.wrap(java.nio.file.Files.readAllBytes(java.nio.file.Path.of(path + "." + name)));
        return java.util.Optional.of(new OnnxTensor(new TensorInfo(OnnxJavaType.FLOAT, new long[] {bytes.capacity() / 40, 10}), bytes));
      } catch (java.io.IOException error) {throw new RuntimeException(error);}
    }
    public void close() {}
  }
}""",
}
"""The part of onnxruntime's Java API that the client uses, with onnxruntime's results from a file."""


def test_the_java_client_reads_an_export_and_compares_results(tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    if not shutil.which("javac"):
        pytest.skip("no JDK is installed")
    import onnxruntime

    folder = export("onnx", tmp_path)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    (output,) = session.run(["output"], {"image": read_tensors(folder / "vectors.safetensors")["input/image"].numpy()})
    (folder / "model.onnx.output").write_bytes(output.tobytes())
    sources = tmp_path / "ai" / "onnxruntime"
    sources.mkdir(parents=True)
    for name, code in JAVA_API.items():
        (sources / f"{name}.java").write_text(f"package ai.onnxruntime;\n\npublic {code}\n")
    files = [*map(str, sources.iterdir()), str(EXAMPLES / "java" / "Verify.java")]
    subprocess.run(["javac", "--release", "17", "-d", str(tmp_path / "classes"), *files], check=True)
    check_client(["java", "-cp", str(tmp_path / "classes"), "Verify"], folder, tmp_path)
