"""Which generators samples draw from. Seeding all of them for each sample takes longer than making a small one, so only those are seeded that are drawn from.

Any other stands at a known place while a batch is made. If it has left that place afterwards, it was drawn from: the batch is made again, with it seeded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import torch

from samewise.runner.data.streams import SEEDERS
from samewise.runner.records.digest import value_digest

Make = Callable[[Collection[str]], Any]
"""Makes a batch, with these generators seeded for each sample."""

_FIRST, _SECOND = 1, 2
"""Seeds of the places where a generator stands that is not seeded for each sample."""


class Drawn:
    """Makes batches, and learns which generators that draws from; `make` may be called again for what it has made."""

    def __init__(self) -> None:
        self._seeded: tuple[str, ...] | None = None

    def __call__(self, make: Make, first: Make) -> Any:
        """What `make` gives with every generator seeded.

        `first` makes a part of it, to be looked at before anything is made: does it depend on a generator that it leaves as it was?
        """
        if self._seeded is None:
            self._seeded = _dependent(first)
        while True:
            others = [name for name in SEEDERS if name not in self._seeded]
            made, drawn = _watched(make, self._seeded, others)
            if not drawn:
                return made
            self._seeded = (*self._seeded, *drawn)


def _dependent(make: Make) -> tuple[str, ...]:
    """The generators that something depends on: those that it draws from; all of them where it reads a generator without drawing, or puts it back."""
    one, drawn = _watched(make, (), list(SEEDERS))
    if len(drawn) < len(SEEDERS):
        for name in _PROBES:
            SEEDERS[name](_FIRST if name in drawn else _SECOND)
        if value_digest(make(())) != value_digest(one):
            return tuple(SEEDERS)
    return tuple(drawn)


def _watched(make: Make, seeded: Collection[str], others: Collection[str]) -> tuple[Any, list[str]]:
    """What `make` gives, and which of the `others` it drew from."""
    for name in others:
        if name in _PROBES:
            SEEDERS[name](_FIRST)
    offsets = _offsets() if "cuda" in others else ()
    made = make(seeded)
    drawn = [name for name in others if name in _PROBES and _PROBES[name]() != _undrawn(name)]
    return made, [*drawn, *(["cuda"] if "cuda" in others and _offsets() != offsets else ())]


_PROBES: dict[str, Callable[[], Any]] = {
    "random": lambda: random.getrandbits(64),
    "numpy": lambda: np.random.random_sample(),
    "torch": lambda: torch.default_generator.get_state().numpy().tobytes(),
}
"""What each generator gives next, where that is quicker than to compare its state."""


@cache
def _undrawn(name: str) -> Any:
    """What is given by a generator that nothing was drawn from."""
    SEEDERS[name](_FIRST)
    return _PROBES[name]()


def _offsets() -> tuple[int, ...]:
    """How far each CUDA device's generator is: known without asking the device, and without seeding it."""
    return tuple(one.get_offset() for one in torch.cuda.default_generators) if torch.cuda.is_initialized() else ()
