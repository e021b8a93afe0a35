"""The digest of a batch covers every value in it, whatever holds it; what has no digest is an error that names it."""

import datetime
import re
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

from samewise.runner.errors import ConfigError
from samewise.runner.records.digest import begin_value, digests, tensor_bytes, value_digest


@dataclass
class Fields:
    image: Any
    label: int = 3


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
    alike = [{1, 2}, torch.float32, datetime.datetime(2026, 1, 2), Path("a/b"), Colour.RED, range(3), Fields(1), Fields("x", 4), UserDict(a=1)]
    assert [value_digest(one) for one in alike] == [value_digest(WrittenAs(repr(one))) for one in alike]
    batch = {"image": torch.arange(6.0).view(2, 3), "label": [1, "x", 2.5, None, True], "count": 3}
    batch |= {"image_id": [1, 17, 123], "boxes": [torch.ones(2, 4)], "name": np.array(["a", "bc"]), "size": (np.float32(1.5), np.arange(3))}
    assert f"{value_digest(batch):016x}" == "b48f1010fd782360"
    assert f"{begin_value(batch)():016x}" == "cea4398d9d91cc96"


class Rounded:
    """Written with less than it has, as are many samples: `Sample(3)`."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Rounded({self.number:.1f})"


@dataclass(repr=False)
class RoundedFields:
    number: float

    __repr__ = Rounded.__repr__


class RoundedFloat(float):
    def __repr__(self) -> str:
        return f"{float(self):.1f}"


class Listed(list[int]):
    def __init__(self, elements: list[int], number: float = 0) -> None:
        super().__init__(elements)
        self.number = number


class Titled(str):
    pass


class Point(NamedTuple):
    x: int
    y: int


class Hue(Enum):
    RED = 1.01
    PINK = 1.02

    def __repr__(self) -> str:
        return "Hue"


def masked(*mask: int) -> Any:
    return np.ma.array([1, 2], mask=mask)  # pyright: ignore[reportUnknownMemberType]


def picture(mode: str, palette: int = 0) -> Image.Image:
    made = Image.new(mode, (4, 4))
    if mode == "P":
        made.putpalette([palette] * 768)
    return made


LONG = torch.linspace(0.5, 1.5, 5000)
OTHER = LONG.index_fill(0, torch.tensor(2500), 0)

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "numbers": ([1, 11], [11, 1]),
    "entries": ({"label": [1, 23, 4]}, {"label": [12, 3, 4]}),
    "int and float": ([1, 12.5], [11, 2.5]),
    "nested lists": ([1, [1, 2]], [1, [12], []]),
    "number before a list": ([1, [], 11], [11, [], 1]),
    "keys": ({1: 2}, {"1": 2}),
    "keys with brackets": ({(1,): 2}, {"(1,)": 2}),
    "own repr": (Rounded(1.01), Rounded(1.02)),
    "own repr inside": ([Fields(Rounded(1.01))], [Fields(Rounded(1.02))]),
    "dataclass with its own repr": (RoundedFields(1.01), RoundedFields(1.02)),
    "subclass of float": (RoundedFloat(1.01), RoundedFloat(1.02)),
    "key with its own repr": (Fields({Rounded(1.01): 1}), Fields({Rounded(1.02): 1})),
    "enum with its own repr": (Hue.RED, Hue.PINK),
    "deque": (deque([LONG]), deque([OTHER])),
    "values": ({"a": LONG}.values(), {"a": OTHER}.values()),
    "items": ({"a": LONG}.items(), {"a": OTHER}.items()),
    "pattern": (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
    "flags": (re.compile("a"), re.compile("a", re.IGNORECASE)),
    "mask": (masked(0, 1), masked(1, 0)),
    "palette": (picture("P", 1), picture("P", 2)),
    "mode": (picture("RGBA"), picture("CMYK")),
    "attribute of a list": (Listed([1], 2), Listed([1], 3)),
    "columns": (pd.DataFrame({"a": [1]}), pd.DataFrame({"b": [1]})),
    "index": (pd.DataFrame({"a": [1]}, index=[1]), pd.DataFrame({"a": [1]}, index=[2])),
    "nanoseconds": (pd.Timestamp("2026-01-01 00:00:00.000000001"), pd.Timestamp("2026-01-01 00:00:00.000000002")),
    "set": (Fields({1}), Fields({2})),
    "slice": (slice(1), slice(2)),
}

EQUAL: dict[str, tuple[Any, Any]] = {
    "sets": ({8, 0, "a"}, {"a", 0, 8}),
    "sets of texts": (set("abcdefgh"), set("hgfedcba")),
    "own repr": (Rounded(1.01), Rounded(1.01)),
    "values": ({"a": LONG}.values(), {"b": LONG}.values()),
    "deque": (deque([LONG]), deque([LONG.clone()])),
    "pattern": (re.compile("a" * 300), re.compile("a" * 300)),
    "palette": (picture("P", 1), picture("P", 1)),
    "text as written": (Titled("a"), "a"),
    "table": (pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [1]})),
    "named tuple": (Point(1, 2), (1, 2)),
    "OrderedDict": (OrderedDict(a=1), {"a": 1}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_has_another_digest(name: str) -> None:
    one, other = DIFFERENT[name]
    assert value_digest(one) != value_digest(other)
    assert begin_value(one)() != begin_value(other)()


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_the_same_has_the_same_digest(name: str) -> None:
    one, other = EQUAL[name]
    assert value_digest(one) == value_digest(other)
    assert begin_value(one)() == begin_value(other)()


class WrittenAs(str):
    repr_is_whole = True

    def __repr__(self) -> str:
        return str(self)


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
        (reduce(lambda inner, _: Fields(inner), range(400), torch.ones(2)), "a sample or batch is of type Fields, nested too deeply or containing itself"),
        ({object(): 1}, "a sample or batch is of type object"),
        (Circle(), "a sample or batch is of type Circle, nested too deeply or containing itself"),
        ({"codes": torch.ones(2).to_mkldnn()}, "'codes' in a sample or batch is a _mkldnn tensor"),
    ],
)
def test_what_cannot_be_compared_is_named(batch: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^dataset, recipe: {words}, whose content cannot be compared bit by bit; expected: tensors, arrays"):
        value_digest(batch)
