"""Tells whether a value's repr is complete: then the value's digest is that of its repr."""

from array import array
from collections import UserDict
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, IntFlag, StrEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import EllipsisType, NoneType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch

PLAIN = frozenset((int, float, str, bool, bytes, complex, NoneType))

WRITTEN = PLAIN | {
    *(
        bytearray,
        array,
        range,
        Decimal,
        Fraction,
        UUID,
        datetime,
        date,
        time,
        timedelta,
        timezone,
        ZoneInfo,
        EllipsisType,
    ),
    *(
        type(Path()),
        PurePosixPath,
        PureWindowsPath,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    ),
}
"""Types whose repr is complete if those of their contents are."""

_REPRS = {kind.__repr__ for kind in WRITTEN}
_ENUM_REPRS = {kind.__repr__ for kind in (Enum, Flag, IntEnum, IntFlag, StrEnum)}


def is_written_whole(value: Any) -> bool:
    """Whether a value's repr is complete: its type and its contents' types are known for that.

    A class's own `__repr__` is not trusted.
    """
    kind = type(value)
    if (
        kind in WRITTEN
        or isinstance(value, type | np.generic | np.dtype)
        or getattr(kind, "repr_is_whole", False)
    ):
        return True
    if isinstance(value, Enum):
        return kind.__repr__ in _ENUM_REPRS
    if kind in (dict, UserDict):
        return all(map(is_written_whole, (*value.keys(), *value.values())))
    if kind in (list, tuple, torch.Size):
        return all(map(is_written_whole, value))
    if kind is slice:
        return all(map(is_written_whole, (value.start, value.stop, value.step)))
    if is_dataclass(value):
        # The code of a repr that @dataclass has generated is in no file
        generated = getattr(kind.__repr__, "__wrapped__", None)
        if getattr(getattr(generated, "__code__", None), "co_filename", "") != "<string>":
            return False
        return all(x.repr and is_written_whole(getattr(value, x.name)) for x in fields(value))
    return kind.__repr__ in _REPRS and not object.__getstate__(value)


def written_set(value: Any) -> str:
    """Return the repr of a set or frozenset with its elements in order."""
    try:
        # The order of a set depends on the hash seed
        reprs = list(map(repr, sorted(value)))
    except TypeError:
        reprs = sorted(map(repr, value))
    if not reprs:
        return repr(value)
    text = f"{{{', '.join(reprs)}}}"
    return text if type(value) is set else f"frozenset({text})"
