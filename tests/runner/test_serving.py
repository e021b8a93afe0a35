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

import pytest
import soundfile
import torch
from PIL import Image
from samewise_runner_small_runs import EXPERIMENTS, overrides_of


def file_for(recipe: str, folder: Path) -> Path:
    draw = torch.Generator().manual_seed(3)
    if recipe == "regression":
        (folder / "seen.csv").write_text("a,b,c,d\n1,2,3,4\n5,6,7,8\n")
        return folder / "seen.csv"
    if recipe in ("classification", "detection", "autoencoder"):
        size = (64, 48, 3) if recipe == "detection" else (8, 8)
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
    samewise("train", *given, "tracking.log_model=true", "tracking.register_model=tried", "tracking.flush_timeout_s=120", f"run_root={tmp_path}", code=0)
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
        if recipe == "regression":
            return  # samewise knows no column of a table to give as an example
        example = json.loads((model / "serving_input_example.json").read_text())
        answer = server.ask(example)
        assert isinstance(answer, list) or "silence.wav" in answer["message"], answer
