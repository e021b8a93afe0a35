"""Files of weights: what is reported if a file does not fit, and what is taken from it if it does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.initialise import initialise
from samewise.runner.records.files import sha256
from samewise.runner.records.tensor_file import write_tensors


def layers(count: int, width: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def problems(model: nn.Module, file: Path, **settings: Any) -> tuple[Problem | str, ...]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        initialise(model, {"weights": str(file), **settings})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return tuple(caught.value.problems)


def test_a_file_of_another_model_is_reported_with_three_names_of_each(tmp_path: Path) -> None:
    torch.save({f"other.{number}": torch.zeros(1) for number in range(5)}, tmp_path / "weights.pt")
    (problem,) = problems(layers(5), tmp_path / "weights.pt")
    assert problem.value == ["other.0", "other.1", "other.2"]
    assert problem.expected == "such as 0.weight, 1.weight, 2.weight"


@pytest.mark.parametrize(
    ("content", "message", "value"),
    [
        ({}, "is not a state_dict", "dict"),
        ({"epoch": 3, "name": "a"}, "is not a state_dict: 'epoch' is not a tensor", "int"),
        ({"weight": torch.zeros(1), "epoch": 3, "name": "a"}, "is not a state_dict: 'epoch' is not a tensor", "int"),
        ({"model": {"epoch": 3}}, "is not a state_dict: 'epoch' is not a tensor", "int"),
    ],
)
def test_a_file_that_is_not_a_state_dict_is_reported_by_its_first_entry(tmp_path: Path, content: Any, message: str, value: str) -> None:
    torch.save(content, tmp_path / "weights.pt")
    (problem,) = problems(layers(1), tmp_path / "weights.pt")
    assert (problem.message, problem.value) == (message, value)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda weight: weight.to(torch.int8), "int8"),
        (lambda weight: weight > 0, "bool"),
        (lambda weight: weight.to(torch.complex64), "complex64"),
        (lambda weight: weight.to_sparse(), "float32 and sparse_coo"),
        (lambda weight: weight.to_sparse_csr(), "float32 and sparse_csr"),
        (lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), "qint8"),
        (lambda weight: weight.to("meta"), "float32 without values (device meta)"),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_of_another_kind_is_refused_unless_it_is_left_out(tmp_path: Path, change: Any, kind: str, normed: bool) -> None:
    file, model = tmp_path / "weights.pt", layers(2)
    torch.save({**layers(2).state_dict(), "1.weight": change(torch.eye(2))}, file)
    if normed:
        nn.utils.parametrizations.weight_norm(model[1])
    (problem,) = problems(model, file)
    assert (problem.path, problem.message) == (f"initialise.weights={file}", f"'1.weight' is {kind}")
    assert problem.expected.startswith("float32")
    initialise(layers(2), {"weights": str(file), "exclude": ["1.*"]})


def test_other_floats_are_converted_and_an_averaged_count_of_batches_too(tmp_path: Path) -> None:
    given, made = nn.BatchNorm1d(2).double(), nn.BatchNorm1d(2)
    given.num_batches_tracked = torch.tensor(7.0)
    given.running_mean.fill_(0.1)
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    initialise(made, {"weights": str(tmp_path / "weights.pt")})
    assert (made.num_batches_tracked.item(), made.running_mean.tolist()) == (7, torch.tensor([0.1, 0.1]).tolist())
    given.num_batches_tracked = torch.tensor(0.7)
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    assert [problem.message for problem in problems(made, tmp_path / "weights.pt")] == ["'num_batches_tracked' is float32"]


@pytest.mark.parametrize("file", ["weights.pt", "weights.safetensors", "folder/model.safetensors"])
@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("", "is empty", ""),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "is a Git LFS pointer", "git lfs pull"),
        ("\n<!DOCTYPE html>\n<html><title>Sign in</title></html>\n", "is a web page", "download it again"),
        ('<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "is a web page", "download it again"),
    ],
)
def test_what_a_download_left_in_the_place_of_weights_is_named(tmp_path: Path, file: str, content: str, message: str, hint: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / file).write_text(content)
    place = tmp_path / file
    (problem,) = problems(layers(1), place.parent if "folder" in file else place, sha256="0123456789")
    assert problem.path == str(place)
    assert message in problem.message
    assert hint in problem.hint


def test_a_missing_file_or_folder_is_reported_as_such(tmp_path: Path) -> None:
    (problem,) = problems(layers(1), tmp_path / "weights.pt")
    assert (problem.message, problem.hint) == ("the file does not exist", f"samewise looked for it at {tmp_path / 'weights.pt'}")
    (problem,) = problems(layers(1), tmp_path / "missing" / "weights.pt")
    assert problem.hint == f"the folder {tmp_path / 'missing'} does not exist"
    (tmp_path / "weights.pth").touch()
    (problem,) = problems(layers(1), tmp_path / "weights.pt")
    assert problem.hint == f"did you mean '{tmp_path / 'weights.pth'}'?"


def test_a_pattern_that_matches_nothing_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    torch.save({f"layer{number}.conv.weight": torch.zeros(1) for number in range(3)}, tmp_path / "weights.pt")
    told = problems(layers(1), tmp_path / "weights.pt", exclude=["layer4.*", "layer1.*", "layer0.conv.wieght"])
    assert [(problem.value, problem.hint) for problem in told] == [
        ("layer4.*", "did you mean 'layer2.*'?"),
        ("layer0.conv.wieght", "did you mean 'layer0.conv.weight'?"),
    ]


def test_a_module_named_like_a_wrapper_keeps_its_name(tmp_path: Path) -> None:
    given = nn.ModuleDict({"model": layers(2)})
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    made = nn.ModuleDict({"model": layers(2)})
    initialise(made, {"weights": str(tmp_path / "weights.pt")})
    assert torch.equal(made["model"][1].weight, given["model"][1].weight)


class Counting(nn.Module):
    """Has state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.seen = nn.Linear(2, 2), {"count": 0}

    def get_extra_state(self) -> dict[str, int]:
        return self.seen

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state


def test_the_extra_state_of_a_module_is_loaded(tmp_path: Path) -> None:
    given, made = Counting(), Counting()
    given.seen = {"count": 3}
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    initialise(made, {"weights": str(tmp_path / "weights.pt")})
    assert made.seen == {"count": 3}
    assert torch.equal(made.head.weight, given.head.weight)


def test_the_count_of_batches_may_be_missing_on_either_side(tmp_path: Path) -> None:
    with_count: dict[str, Tensor] = nn.Sequential(nn.BatchNorm2d(3)).state_dict()
    torch.save(with_count, tmp_path / "weights.pt")
    initialise(nn.Sequential(FrozenBatchNorm2d(3)), {"weights": str(tmp_path / "weights.pt")})
    torch.save(FrozenBatchNorm2d(3).state_dict(), tmp_path / "weights.pt")
    initialise(nn.BatchNorm2d(3), {"weights": str(tmp_path / "weights.pt")})


def test_a_part_that_only_the_file_has_is_reported_once_with_how_to_exclude_it(tmp_path: Path) -> None:
    """For example the auxiliary output of Inception, or the quantizer of wav2vec 2.0."""
    torch.save({**layers(2).state_dict(), **{f"quantizer.{name}": torch.zeros(1) for name in ("weight", "bias", "codes")}}, tmp_path / "weights.pt")
    (problem,) = problems(layers(2), tmp_path / "weights.pt")
    assert (problem.message, problem.hint) == ("the file's 'quantizer.*' is not in the model: 3 names", "leave it out: initialise.exclude=[quantizer.*]")
    initialise(layers(2), {"weights": str(tmp_path / "weights.pt"), "exclude": ["quantizer.*"]})


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
