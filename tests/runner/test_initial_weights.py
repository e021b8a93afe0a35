"""Initial weights from files: whole or in part, by name, and errors about what does not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_runner_initialised import network, other_weights, same
from torch import nn

from samewise.runner.errors import ConfigError
from samewise.runner.optim.initialise import initialise

WRAPPED: list[Callable[[dict[str, Any]], Any]] = [
    lambda state: state,
    lambda state: {"model": state, "epoch": 3, "optimizer": {"state": {}}},
    lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
    lambda state: {"state_dict": {f"model.{name}": value for name, value in state.items()}},
    lambda state: {"n_averaged": torch.tensor(4), **{f"module._orig_mod.{name}": value for name, value in state.items()}},
    lambda state: {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")},
]


@pytest.mark.parametrize("wrap", WRAPPED)
def test_weights_load_from_the_usual_wrappers(tmp_path: Path, wrap: Callable[[dict[str, Any]], Any]) -> None:
    state = other_weights()
    torch.save(wrap(state), tmp_path / "weights.pt")
    model = network()
    initialise(model, {"weights": str(tmp_path / "weights.pt")})
    assert same(dict(model.state_dict()), state)


def test_weights_load_from_a_checkpoint_folder(tmp_path: Path) -> None:
    torch.save({"step": 3, "model": other_weights(), "optimizers": {}}, tmp_path / "state.pt")
    model = network()
    initialise(model, {"weights": str(tmp_path)})
    assert same(dict(model.state_dict()), other_weights())


def test_an_excluded_part_stays_as_initialised(tmp_path: Path) -> None:
    state = other_weights()
    state["3.weight"], state["3.bias"] = torch.zeros(1000, 8), torch.zeros(1000)
    torch.save(state, tmp_path / "weights.pt")
    model = network()
    head = model[3].weight.clone()
    initialise(model, {"weights": str(tmp_path / "weights.pt"), "exclude": ["3.*"]})
    assert torch.equal(model[3].weight, head)
    assert torch.equal(model[0].weight, state["0.weight"])


def test_a_backbone_can_be_loaded_into_a_part_of_the_model(tmp_path: Path) -> None:
    torch.save(other_weights(), tmp_path / "weights.pt")
    model = nn.ModuleDict({"backbone": nn.ModuleDict({"body": network()}), "head": nn.Linear(4, 2)})
    initialise(model, {"weights": str(tmp_path / "weights.pt"), "into": "backbone.body"})
    assert same(dict(model["backbone"]["body"].state_dict()), other_weights())


def test_without_strict_only_matching_names_are_loaded(tmp_path: Path) -> None:
    state = {name: value for name, value in other_weights().items() if not name.startswith("1.")} | {"extra": torch.zeros(1)}
    torch.save(state, tmp_path / "weights.pt")
    model = network()
    initialised = model[1].weight.clone()
    initialise(model, {"weights": str(tmp_path / "weights.pt"), "strict": False})
    assert torch.equal(model[3].weight, state["3.weight"])
    assert torch.equal(model[1].weight, initialised)


class Anything:
    """Something that is not a tensor."""


FILES: list[tuple[Callable[[Path], Any], dict[str, Any], str, str]] = [
    (lambda path: path.write_bytes(b"no weights at all"), {}, "initialise.weights", "damaged|cannot be read"),
    (lambda path: torch.save(Anything(), path), {}, "initialise.weights", "was not loaded: it names .*Anything"),
    (lambda path: torch.save(other_weights(), path), {"exclude": ["4.*"]}, "initialise.exclude", "matches nothing"),
    (lambda path: torch.save(other_weights(), path), {"into": "33"}, "initialise.into", "not a module"),
    (lambda path: torch.save(other_weights(), path), {"sha256": "0123456789"}, "initialise.sha256", "does not match"),
    (lambda path: torch.save({"w": torch.zeros(1)}, path), {"strict": False}, "initialise.weights", "no name in common"),
    (
        lambda path: torch.save(other_weights() | {"0.weight": torch.zeros(8, 1, 3, 3)}, path),
        {"strict": False},
        "initialise.weights",
        r"'0.weight' differs; hint: .*\n.*\[8, 1, 3, 3\]\n.*\[8, 3, 3, 3\]",
    ),
    (
        lambda path: torch.save({("3.wieght" if name == "3.weight" else name): value for name, value in other_weights().items()}, path),
        {},
        "initialise.weights",
        "'3.weight' is not in the file; hint: did you mean '3.wieght'",
    ),
]


@pytest.mark.parametrize(("write", "settings", "path", "message"), FILES)
def test_a_file_that_does_not_fit_is_reported_and_changes_nothing(
    tmp_path: Path, write: Callable[[Path], Any], settings: dict[str, Any], path: str, message: str
) -> None:
    write(tmp_path / "weights.pt")
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message) as caught:
        initialise(model, {"weights": str(tmp_path / "weights.pt"), **settings})
    assert {problem.path for problem in caught.value.problems} == {path}
    assert same(dict(model.state_dict()), before)


def test_a_truncated_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(other_weights(), file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ConfigError, match="cannot be read: it is cut short or damaged"):
        initialise(network(), {"weights": str(file)})


def safetensors(tensors: dict[str, tuple[str, torch.Tensor]]) -> bytes:
    """A file as specified at huggingface.co/docs/safetensors: eight bytes with the length of the header, the header as JSON, the numbers."""
    numbers, header = b"", {"__metadata__": {"format": "pt"}}
    for name, (kind, value) in tensors.items():
        raw = bytes(value.contiguous().flatten().view(torch.uint8).tolist())
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(numbers), len(numbers) + len(raw)]}
        numbers += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


def test_safetensors_are_read_and_a_damaged_file_is_reported(tmp_path: Path) -> None:
    file, given = tmp_path / "weights.safetensors", other_weights()
    held = {name: ("F32" if value.is_floating_point() else "I64", value.reshape(-1) if not value.dim() else value) for name, value in given.items()}
    held["1.num_batches_tracked"] = ("I64", given["1.num_batches_tracked"].reshape(1))
    content = safetensors(held).replace(b'"shape": [1], "data_offsets"', b'"shape": [ ], "data_offsets"')
    file.write_bytes(content)
    model = network()
    initialise(model, {"weights": str(file)})
    assert same(dict(model.state_dict()), given)
    half = {"weight": ("BF16", torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)), "bias": ("F16", torch.tensor([0.25], dtype=torch.float16))}
    file.write_bytes(safetensors(half))
    layer = nn.Linear(2, 1)
    initialise(layer, {"weights": str(file)})
    assert (layer.weight.tolist(), layer.bias.tolist()) == ([[1.5, -2.0]], [0.25])
    for damaged in (b"", content[:-1], content[:100], content.replace(b"F32", b"F3?"), (2**62).to_bytes(8, "little"), b"\x02" + bytes(7) + b"[]"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"cannot be read|is empty"):
            initialise(network(), {"weights": str(file)})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("left_out", ["", "embed.weight", "head.weight"])
def test_a_tied_tensor_is_loaded_from_either_name(tmp_path: Path, left_out: str) -> None:
    value = torch.arange(15.0).view(5, 3)
    torch.save({name: value for name in ("embed.weight", "head.weight") if name != left_out}, tmp_path / "weights.pt")
    model = Tied()
    initialise(model, {"weights": str(tmp_path / "weights.pt")})
    assert torch.equal(model.embed.weight, value)
    assert model.head.weight is model.embed.weight


def test_several_values_for_a_tied_tensor_are_refused(tmp_path: Path) -> None:
    torch.save({"embed.weight": torch.zeros(5, 3), "head.weight": torch.ones(5, 3)}, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"ties embed\.weight and head\.weight to one tensor.*\n?.*initialise\.exclude=\['head\.weight'\]"):
        initialise(Tied(), {"weights": str(tmp_path / "weights.pt")})
    model = Tied()
    initialise(model, {"weights": str(tmp_path / "weights.pt"), "exclude": ["head.weight"]})
    assert not model.head.weight.any()


def test_a_tied_tensor_is_frozen_by_either_name() -> None:
    for name in ("embed.*", "head.*"):
        model = Tied()
        initialise(model, {"frozen": [name]})
        assert not model.embed.weight.requires_grad
