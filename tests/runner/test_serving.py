"""A logged model answers over HTTP like `samewise predict` for the same file; a logged export answers like its file."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from samewise_runner_small_runs import EXPERIMENTS, overrides_of

from samewise.runner.records.tensor_file import read_tensors, write_tensors


def file_for(recipe: str, folder: Path) -> Path:
    draw = torch.Generator().manual_seed(3)
    if recipe in ("classification", "detection"):
        size = (8, 8) if recipe == "classification" else (64, 48, 3)
        Image.fromarray(torch.randint(256, size, dtype=torch.uint8, generator=draw).numpy()).save(folder / "seen.png")
        return folder / "seen.png"
    soundfile.write(folder / "heard.wav", (0.1 * torch.randn(900, generator=draw)).numpy(), 8000)
    return folder / "heard.wav"


class Server:
    """`mlflow models serve` of a model, as a person starts it in an activated environment."""

    def __init__(self, model: str, store: str, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        tools = Path(sys.executable).parent
        environment = {**os.environ, "MLFLOW_TRACKING_URI": store, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = [str(tools / "mlflow"), "models", "serve", "-m", model, "--env-manager", "local", "--port", str(port)]
        self.said = home / "served.log"
        with open(self.said, "w") as said:
            self._process = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/ping", timeout=2):
                    return self
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise AssertionError(self.said.read_text()[-3000:])

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(30)

    def ask(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.address}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["predictions"]
        except urllib.error.HTTPError as error:
            return json.load(error)


SERVED_OFTEN = ("classification", "detection", "vocoder")
"""One array, several arrays, and several models: the others are served by the long tests."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param(one, marks=() if one in SERVED_OFTEN else pytest.mark.long) for one in EXPERIMENTS])
def test_a_logged_model_of_each_recipe_answers_like_samewise_predict(samewise, recipe: str, tmp_path: Path) -> None:
    given = overrides_of(recipe)
    trained = samewise("train", *given, "tracking.log_model=true", "tracking.register_model=tried", "tracking.flush_timeout_s=120", f"run_root={tmp_path}")
    assert trained.returncode == 0, trained.stderr
    (run,) = (file.parent for file in tmp_path.glob("*/*/summary.json"))
    known = json.loads((run / "tracking.json").read_text())
    assert known["registered"] == {"tried": "1"}, (run / "sender.log").read_text()
    (model,) = tmp_path.glob("mlartifacts/models/*/artifacts")
    assert not [file.name for file in model.rglob("*") if file.suffix in (".pkl", ".py")]

    file = file_for(recipe, tmp_path)
    said = samewise("predict", run, file, "--json", "--output", tmp_path / "out")
    expected = json.loads(said.stdout)
    written = [Path(one) for one in expected.pop("files")]
    del expected["file"]
    row = {"file": base64.b64encode(file.read_bytes()).decode(), "name": file.name}
    with Server("models:/tried/1", f"sqlite:///{tmp_path}/mlflow.db", tmp_path) as server:
        assert server.ask({"dataframe_records": [row]}) == [expected]
        both = server.ask({"dataframe_records": [row, {"file": row["file"]}], "params": {"files": True}})
        sounds = {one.name.replace(file.stem, "file"): one.read_bytes() for one in written if one.suffix == ".wav"}
        for answer in both:
            files = {name: base64.b64decode(content) for name, content in answer.pop("files").items()}
            assert len(files) == len(written)
            assert sounds.items() <= files.items()
            assert answer == expected
        refused = server.ask({"dataframe_records": [{"file": "AAAA", "name": "../../broken.x"}]})
        assert refused["error_code"] == "INVALID_PARAMETER_VALUE"
        assert "broken.x: " in refused["message"]
        example = json.loads((model / "serving_input_example.json").read_text())
        answer = server.ask(example)
        assert isinstance(answer, list) or "silence.wav" in answer["message"], answer


@pytest.mark.slow
def test_a_model_logged_by_another_user_is_served_only_if_trusted(samewise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    trained = samewise("train", *overrides_of("classification"), "tracking=none", f"run_root={tmp_path}")
    assert trained.returncode == 0, trained.stderr
    (run,) = (file.parent for file in tmp_path.glob("*/*/summary.json"))
    logged = samewise("sync", run, "--log-model", "--uri", f"sqlite:///{tmp_path}/mlflow.db", "--json")
    assert logged.returncode == 0, logged.stderr
    (model,) = tmp_path.glob("mlartifacts/models/*/artifacts")
    assert json.loads(logged.stdout)["model"] == model.parent.name
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    with pytest.raises(Exception, match="is not signed by you"):
        mlflow.pyfunc.load_model(str(model))
    monkeypatch.setenv("SAMEWISE_TRUST_MODEL", "1")
    import pandas

    file = file_for("classification", tmp_path)
    asked = pandas.DataFrame({"file": [file.read_bytes()], "name": [file.name]})
    served = mlflow.pyfunc.load_model(str(model))
    likeliest = next(iter(served.predict(asked)[0]["probabilities"].values()))
    assert served.predict(asked, params={"threshold": min(1.0, likeliest + 0.01)})[0]["label"] is None


def test_an_export_logged_to_mlflow_keeps_its_files_and_has_a_signature(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    import mlflow
    from onnx import TensorProto, helper

    from samewise.runner.exports.mlflow_model import write

    export = tmp_path / "export"
    export.mkdir()
    forms = [("x_0", TensorProto.UINT8, ["batch", 3]), ("scale", TensorProto.FLOAT, [1]), ("y", TensorProto.FLOAT, ["batch", 3])]
    values = [helper.make_tensor_value_info(*one) for one in forms]
    nodes = [helper.make_node("Cast", ["x_0"], ["real"], to=TensorProto.FLOAT), helper.make_node("Mul", ["real", "scale"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "made", values[:2], values[2:]), opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, str(export / "model.onnx"))
    given = {"input/scale": torch.tensor([0.5]), "input/x.0": torch.tensor([[1, 2, 3]], dtype=torch.uint8)}
    write_tensors(export / "vectors.safetensors", given | {"output/y": torch.tensor([[0.5, 1.0, 1.5]])})
    write(tmp_path / "model", export=export)

    assert all((tmp_path / "model" / file.name).read_bytes() == file.read_bytes() for file in export.iterdir())
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    said = json.loads((tmp_path / "model" / "serving_input_example.json").read_text())
    assert said == {"inputs": {"x_0": [[1, 2, 3]], "scale": [0.5]}}
    assert [(one.name, one.type, one.shape) for one in served.metadata.signature.inputs] == [("x_0", np.uint8, (-1, 3)), ("scale", np.float32, (1,))]
    assert [(one.name, one.type, one.shape) for one in served.metadata.signature.outputs] == [("y", np.float32, (-1, 3))]
    two = {"x_0": np.array([[1, 2, 3], [4, 5, 255]], np.uint8), "scale": np.array([0.25], np.float32)}
    assert served.predict(two)["y"].tolist() == [[0.25, 0.5, 0.75], [1.0, 1.25, 63.75]]
    with pytest.raises(mlflow.MlflowException, match="x_0"):
        served.predict(two | {"x_0": np.zeros((1, 4), np.uint8)})


GENERATOR = ["experiment=gan_digits", "debug=tiny", "max_steps=2", "evaluate.pictures=false"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param(one, marks=() if one == "classification" else pytest.mark.long) for one in (*EXPERIMENTS, "adversarial")])
def test_a_logged_export_answers_with_the_bits_of_onnxruntime(samewise, recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    given = GENERATOR if recipe == "adversarial" else overrides_of(recipe)
    assert samewise("train", *given, f"run_root={tmp_path}").returncode == 0
    (run,) = (file.parent for file in tmp_path.glob("*/*/summary.json"))
    done = samewise("export", run, "--to", "onnx,pt2", "--out", tmp_path / "out", "--register", "tried", "--json")
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["models"]
    assert [one["registered"] for one in models.values()] == (["tried-conditioning", "tried-step"] if recipe == "vocoder" else ["tried"])
    for place, known in models.items():
        folder = tmp_path / "mlartifacts" / "models" / known["model"] / "artifacts"
        assert samewise("verify", folder).returncode == 0
        vectors = read_tensors(folder / "vectors.safetensors")
        inputs = {name.removeprefix("input/"): tensor.numpy() for name, tensor in vectors.items() if name.startswith("input/")}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(tmp_path / "out" / place / "model.onnx"), options, providers=["CPUExecutionProvider"])
        expected = dict(zip([one.name for one in session.get_outputs()], session.run(None, inputs), strict=True))
        with Server(f"models:/{known['registered']}/{known['version']}", f"sqlite:///{tmp_path}/mlflow.db", tmp_path) as server:
            asked = {"inputs": {name: tensor.tolist() for name, tensor in inputs.items()}}
            assert json.loads((folder / "serving_input_example.json").read_text()) == asked
            found = {name: np.array(one, expected[name].dtype) for name, one in server.ask(asked).items()}
            assert {name: one.tobytes() for name, one in found.items()} == {name: one.tobytes() for name, one in expected.items()}
            for name, one in found.items():
                assert np.allclose(one, vectors[f"output/{name}"].numpy(), rtol=1e-4, atol=1e-4 * np.abs(one).max())
            refused = server.ask({"inputs": {name: [[0]] * 7 for name in inputs}})
            assert refused["error_code"] in ("BAD_REQUEST", "INVALID_PARAMETER_VALUE"), refused


WITHOUT_SAMEWISE = """
import sys
sys.modules["samewise"] = None
import mlflow, numpy
model = mlflow.pyfunc.load_model(sys.argv[1])
print(model.predict(model.input_example)["output"].shape)
"""


@pytest.mark.slow
def test_a_logged_export_needs_neither_samewise_nor_trust_and_gets_new_versions(samewise, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    assert samewise("train", *overrides_of("classification"), "tracking=none", f"run_root={tmp_path}", "name=v1.2").returncode == 0
    (run,) = (file.parent for file in tmp_path.glob("*/*/summary.json"))
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert samewise("sync", run, "--uri", uri, "--log-model", "--register", "digits").returncode == 0
    versions = list[str]()
    for count in range(2):
        done = samewise("export", run, "--to", "onnx", "--out", tmp_path / f"out{count}", "--register", "digits", "--uri", uri, "--json")
        assert done.returncode == 0, done.stderr
        known = json.loads(done.stdout)["models"][""]
        versions.append(known["version"])
    assert versions == ["2", "3"]
    folder = tmp_path / "mlartifacts" / "models" / known["model"] / "artifacts"
    assert not [file.name for file in folder.rglob("*") if file.suffix in (".pkl", ".py")]
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "another")}
    said = subprocess.run([sys.executable, "-c", WITHOUT_SAMEWISE, str(folder)], env=environment, capture_output=True, text=True, check=False)
    assert said.stdout.strip() == "(2, 10)", said.stderr
