"""Finds out which generators samples draw from. Seeding all generators takes longer than making a small sample, so only these are seeded.

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
"""Seeds for the states of generators that are not seeded for each sample."""


class GeneratorTracker:
    """Makes batches and finds out which generators they draw from; `make` may be called again for the same batch."""

    def __init__(self) -> None:
        self._seeded: tuple[str, ...] | None = None
        self.unlike: tuple[Any, Any] | None = None
        """What `first` made twice from the same seeds, if the two differ."""

    def __call__(self, make: Make, first: Make) -> Any:
        """The result of `make` as if every generator had been seeded.

        `first` makes a part of it, to be looked at before anything is made: does it depend on a generator that it leaves as it was?
        """
        if self._seeded is None:
            self._seeded, is_plain = _find_drawn(first)
            if not is_plain:
                one, two = first(self._seeded), first(self._seeded)
                self.unlike = (one, two) if value_digest(one) != value_digest(two) else None
        while True:
            others = [name for name in SEEDERS if name not in self._seeded]
            made, drawn = _make_and_probe(make, self._seeded, others)
            if not drawn:
                return made
            self._seeded = (*self._seeded, *drawn)


def _find_drawn(make: Make) -> tuple[tuple[str, ...], bool]:
    """The generators that a result depends on: those drawn from; all of them if a generator is read without drawing, or restored.

    Also whether it depends on nothing else than those drawn from.
    """
    one, drawn = _make_and_probe(make, (), list(SEEDERS))
    if len(drawn) < len(SEEDERS):
        for name in _PROBES:
            SEEDERS[name](_FIRST if name in drawn else _SECOND)
        if value_digest(make(())) != value_digest(one):
            return tuple(SEEDERS), False
    return tuple(drawn), True


def _make_and_probe(make: Make, seeded: Collection[str], others: Collection[str]) -> tuple[Any, list[str]]:
    """The result of `make`, and which of the `others` it drew from."""
    for name in others:
        if name in _PROBES:
            SEEDERS[name](_FIRST)
    offsets = _offsets() if "cuda" in others else ()
    made = make(seeded)
    drawn = [name for name in others if name in _PROBES and _PROBES[name]() != _first_draw(name)]
    return made, [*drawn, *(["cuda"] if "cuda" in others and _offsets() != offsets else ())]


_DRAWN = torch.empty((), dtype=torch.int64)
_PROBES: dict[str, Callable[[], Any]] = {
    "random": lambda: random.getrandbits(64),
    "numpy": lambda: np.random.random_sample(),
    "torch": lambda: _DRAWN.random_().item(),
}
"""The next value of each generator, which is faster than comparing its state."""


@cache
def _first_draw(name: str) -> Any:
    """The first value of a freshly seeded generator."""
    SEEDERS[name](_FIRST)
    return _PROBES[name]()


def _offsets() -> tuple[int, ...]:
    """The offset of each CUDA device's generator, known without a wait for the device and without seeding."""
    return tuple(one.get_offset() for one in torch.cuda.default_generators) if torch.cuda.is_initialized() else ()
