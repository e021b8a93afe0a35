"""The conditioning and step of a WaveRNN in other runtimes, in a loop of a separate program, speak what the model speaks for the same random numbers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from samewise_runner_exported import TINY

from samewise.runner.records.tensor_file import read_tensors, write_tensors

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
