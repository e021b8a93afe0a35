"""Checkpoints as Hugging Face's libraries and timm write them: in folders, or by name in their cache. Nothing is downloaded, no pickle is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.initialise import initialise
from samewise.runner.records.files import sha256
from samewise.runner.records.tensor_file import write_tensors

COMMITS = ("a" * 40, "b" * 40)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))


def other() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(value) for name, value in network().state_dict().items()}


def loads(weights: str | Path, **more: Any) -> bool:
    model = network()
    initialise(model, {"weights": str(weights), **more})
    return all(torch.equal(value, other()[name]) for name, value in model.state_dict().items())


def problem(weights: str | Path, **more: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        initialise(network(), {"weights": str(weights), **more})
    (one,) = caught.value.problems
    assert isinstance(one, Problem)
    return one


def write_in_parts(folder: Path) -> list[Path]:
    folder.mkdir()
    files = [folder / f"model-{number}-of-2.safetensors" for number in (1, 2)]
    parts = [{name: value for name, value in other().items() if name.startswith(f"{number}.")} for number in (0, 1)]
    for file, tensors in zip(files, parts, strict=True):
        write_tensors(file, tensors)
    listed = {name: file.name for file, tensors in zip(files, parts, strict=True) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache with two commits of someone/net; the second is main."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--someone--net"
    for commit in COMMITS:
        state = {name: value + (commit == COMMITS[0]) for name, value in other().items()}
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        write_tensors(folder / "new", state)
        (folder / "new").rename(blob := folder / "blobs" / sha256(folder / "new"))
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "model.safetensors").symlink_to(blob)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMITS[1])
    (folder / "refs" / "v1").write_text(COMMITS[0])
    return folder


def test_a_folder_is_read_from_one_file_or_several(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    write_tensors(tmp_path / "whole" / "model.safetensors", other())
    (tmp_path / "whole" / "pytorch_model.bin").write_bytes(b"never read")
    assert loads(tmp_path / "whole", sha256=sha256(tmp_path / "whole" / "model.safetensors"))
    files = write_in_parts(tmp_path / "parts")
    assert loads(tmp_path / "parts")
    files[1].unlink()
    told = problem(tmp_path / "parts")
    assert (told.message, told.expected) == ("model.safetensors.index.json lists files that do not exist, or none", "model-2-of-2.safetensors")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "state.pt", "..safetensors"])
def test_an_index_may_only_name_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.weight": name}}))
    assert "0.weight" in problem(tmp_path).message


def test_a_folder_with_only_a_pickle_is_refused_with_how_to_read_its_tensors(tmp_path: Path) -> None:
    torch.save(other(), tmp_path / "pytorch_model.bin")
    told = problem(tmp_path)
    assert told.message == "the folder contains no weights"
    assert str(told.hint).endswith(f"name the file itself: {tmp_path / 'pytorch_model.bin'}")
    assert loads(tmp_path / "pytorch_model.bin")


def test_a_cached_file_that_does_not_match_its_checksum_is_refused(cache: Path) -> None:
    blob = (cache / "snapshots" / COMMITS[1] / "model.safetensors").resolve()
    write_tensors(blob, {name: value + 1 for name, value in other().items()})
    told = problem("hf:someone/net")
    assert (told.message.partition(":")[0], told.expected) == ("the file in Hugging Face's cache does not match its checksum", blob.name)
