"""The digest of a batch covers every value in it, whatever holds it; what has no digest is an error that names it."""

from __future__ import annotations

import datetime
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from samewise.runner.data.dataset import differing_entry
from samewise.runner.errors import ConfigError
from samewise.runner.records.digest import begin_value, digests, tensor_bytes, value_digest


@dataclass
class Fields:
    image: Any
    label: int = 3


@dataclass
class Hidden:
    label: int = field(repr=False)


class Attributes:
    def __init__(self, image: Any) -> None:
        self.image = image


class Slots:
    __slots__ = ("image",)

    def __init__(self, image: Any) -> None:
        self.image = image


class Written(Attributes):
    def __repr__(self) -> str:
        return f"Written({self.image})"


class Colour(Enum):
    RED = 1


def sparse(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.view(40, 50).to_sparse(layout=layout)


def nested(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.nested.nested_tensor([tensor, tensor[:4]], layout=layout)


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Fields,
    "attributes": Attributes,
    "slots": Slots,
    "own repr": Written,
    "UserDict": lambda tensor: UserDict(image=tensor),
    "MappingProxyType": lambda tensor: MappingProxyType({"image": tensor}),
    "inside another": lambda tensor: [Attributes(Fields({"image": tensor}))],
    "objects": lambda tensor: tensor.numpy().astype(object),
    "times": lambda tensor: (tensor * 1e9).long().numpy().astype("datetime64[ns]"),
    "records": lambda tensor: tensor.numpy().view([("x", "f4")]),
    "conjugate": lambda tensor: tensor.to(torch.complex64).conj(),
    "negative": lambda tensor: torch.complex(tensor, tensor).conj().imag,
    "picture": lambda tensor: Image.fromarray((tensor.numpy() * 1e7 % 256).astype("u1").reshape(40, 50)),
    "float8": lambda tensor: (tensor * 1e7 % 256).to(torch.float8_e4m3fn),
    **{str(layout): sparse(layout) for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)},
    **{f"nested {layout}": nested(layout) for layout in (torch.strided, torch.jagged)},
}


@pytest.mark.filterwarnings("ignore")  # torch's, that these tensors are prototypes
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_value_that_differs_in_the_middle_has_another_digest(holder: str) -> None:
    one = torch.linspace(0.5, 1.5, 2000)
    other = one.clone()
    other[1000] += 1e-3 if holder == "float8" else 1e-6
    first, same, changed = (HOLDERS[holder](tensor) for tensor in (one, one.clone(), other))
    assert value_digest(first) == value_digest(same) != value_digest(changed)
    assert begin_value(first)() == begin_value(same)() != begin_value(changed)()


def test_the_digests_of_plain_values_stay_as_they_were() -> None:
    """They are in the traces of earlier runs. Whatever is written whole is digested as it is written."""
    alike = [{1, 2}, torch.float32, datetime.datetime(2026, 1, 2), Path("a/b"), Colour.RED, range(3), Fields(1), Fields("x", 4), UserDict(a=1), Written(1)]
    assert [value_digest(one) for one in alike] == [value_digest(WrittenAs(repr(one))) for one in alike]
    batch = {"image": torch.arange(6.0).view(2, 3), "label": [1, 2.5, "x", None, True], "name": np.array(["a", "bc"]), "size": (np.float32(1.5), np.arange(3))}
    assert f"{value_digest(batch):016x}" == "b098c85ce0b7e239"
    assert f"{begin_value(batch)():016x}" == "9b9794474493e92b"


class WrittenAs(str):
    def __repr__(self) -> str:
        return str(self)


def test_a_field_that_is_not_written_counts() -> None:
    assert value_digest(Hidden(1)) != value_digest(Hidden(2))
    assert differing_entry(Fields(torch.zeros(2)), Fields(torch.ones(2))) == ", image"
    assert differing_entry(Fields(torch.zeros(2)), {"image": torch.zeros(2), "label": 4}) == ", label"


def test_a_conjugate_or_negative_has_the_digest_of_its_values() -> None:
    values = torch.randn(3, 4, dtype=torch.complex64)
    for one in (values.conj(), values.conj().imag, values.conj().T):
        assert one.is_conj() or one.is_neg()
        held = one.resolve_conj().resolve_neg().contiguous()
        assert digests([one.contiguous()]) == digests([held])
        assert begin_value(one.contiguous())() == begin_value(held)()
        assert tensor_bytes(one) == tensor_bytes(held)


class Circle:
    def __init__(self) -> None:
        self.own = self


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"rule": max.__call__}, "'rule' in a sample or batch is of type method-wrapper"),
        ({"rng": [torch.Generator()]}, "'rng' in a sample or batch is of type Generator"),
        ({"boxes": {torch.ones(2)}}, "'boxes' in a sample or batch is of type set"),
        (Circle(), "a sample or batch is a Circle that contains itself"),
        ({"codes": torch.ones(2).to_mkldnn()}, "'codes' in a sample or batch is a _mkldnn tensor"),
    ],
)
def test_what_cannot_be_compared_is_named(batch: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^dataset, recipe: {words}, whose content cannot be compared bit by bit; expected: tensors, arrays"):
        value_digest(batch)
