"""An export from someone else, or one of your own that was altered since: nothing in it runs without consent, and any damage is reported."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from samewise.runner.records import trust
from samewise.runner.records.digest import tensor_bytes
from samewise.runner.records.files import write_json
from samewise.runner.records.tensor_file import write_tensors


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """A signed folder as `samewise export` writes it, except for the model in it, which no test here gets as far as running."""
    folder = tmp_path / "export"
    folder.mkdir()
    weight = torch.ones(3)
    write_tensors(folder / "weights.safetensors", {"weight": weight})
    write_tensors(folder / "vectors.safetensors", {"input/image": weight, "output/output": weight})
    (folder / "model.pt2").write_bytes(b"a program")
    described = {
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()},
        "inputs": {"image": {"dtype": "float32", "shape": [3]}},
        "outputs": {"output": {"dtype": "float32", "shape": [3]}},
        "tolerance": 1e-4,
        "weights": {"weight": hashlib.sha256(bytes(tensor_bytes(weight))).hexdigest()},
    }
    write_json(folder / "export.json", described)
    trust.sign(folder / "export.json")
    return folder


DAMAGED = {
    "nothing in it": "{}",
    "empty": "",
    "a list": "[]",
    "deep": "[" * 100_000,
    "no digests": '{"files": {"model.pt2": 5}, "inputs": {}, "outputs": {}, "tolerance": 0.1, "weights": {}}',
    "a tolerance in words": '{"files": {}, "inputs": {}, "outputs": {}, "tolerance": "all", "weights": {}}',
    "an average that is no name": '{"average": 5, "files": {}, "inputs": {}, "outputs": {}, "tolerance": 0.1, "weights": {}}',
}


@pytest.mark.parametrize("way", DAMAGED)
def test_a_damaged_description_is_named_and_not_signed(samewise, export, way) -> None:
    (export / "export.json").write_text(DAMAGED[way])
    (export / ".export.json.signature").unlink()
    done = samewise("verify", export, "--trust")
    assert done.returncode == 2
    assert f"{export / 'export.json'}: is damaged: " in done.stderr
    assert not (export / ".export.json.signature").exists()


def test_an_altered_model_is_not_run_even_in_your_own_export(samewise, export) -> None:
    """An AOTInductor package is machine code; any bytes will do here, since they are not examined."""
    (export / "model.pt2").write_bytes(b"altered")
    done = samewise("verify", export)
    assert done.returncode == 1
    assert "model.pt2 was altered since the export, so it is only run with --trust" in done.stdout


def test_a_received_export_runs_nothing_until_it_is_trusted(samewise, export) -> None:
    said = json.loads((export / "export.json").read_text())
    (export / "export.json").write_text(json.dumps({**said, "tolerance": 0.5}))  # a stranger's own, whose digests all agree
    done = samewise("verify", export)
    assert done.returncode == 2
    assert "runs the models in the folder" in done.stderr
    for more in (["--trust"], []):  # which is remembered
        done = samewise("verify", export, *more)
        assert done.returncode == 1
        assert "torch.export cannot run it" in done.stdout
