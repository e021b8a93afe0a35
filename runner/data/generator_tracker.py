"""Finds out which generators samples draw from.

Seeding all generators takes longer than making a small sample, so only these are seeded.

Any other stands at a known place while a batch is made. If it has left that place afterwards, it
was drawn from; and whoever reads its seed or its state without drawing is noticed by a stand-in for
what gives it. Either way the batch is made again, with the generator seeded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, nullcontext
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
    """Makes batches and finds out which generators they draw from.

    `make` may be called again for the same batch.
    """

    def __init__(self) -> None:
        self._seeded: tuple[str, ...] | None = None

    def __call__(self, make: Make, first: Make) -> Any:
        """The result of `make` as if every generator had been seeded.

        `first` makes a part of it, to be looked at before anything is made: does it depend on a
        generator that it leaves as it was?
        """
        if self._seeded is None:
            self._seeded = _find_drawn(first)
        while True:
            others = [name for name in SEEDERS if name not in self._seeded]
            made, drawn = make_and_probe(make, self._seeded, others)
            if not drawn:
                return made
            self._seeded = (*self._seeded, *drawn)

    def seed_all(self) -> None:
        """From now on all generators are seeded, and none of the libraries' functions is replaced."""
        self._seeded = tuple(SEEDERS)


def next_draws() -> list[Any]:
    """The next value of each generator: two that are equal in all of them have been drawn from
    equally.
    """
    return [probe() for probe in _PROBES.values()]


def _find_drawn(make: Make) -> tuple[str, ...]:
    """The generators that a result depends on: those drawn from or read.

    All of them if it depends on another's state in a way that is not noticed.
    """
    one, drawn = make_and_probe(make, (), list(SEEDERS))
    if len(drawn) < len(SEEDERS):
        for name in _PROBES:
            SEEDERS[name](_FIRST if name in drawn else _SECOND)
        if value_digest(make(())) != value_digest(one):
            return tuple(SEEDERS)
    return tuple(drawn)


def draws(make: Callable[[], Any]) -> bool:
    """Whether making something draws from a generator, or reads one."""
    return bool(make_and_probe(lambda seeded: make(), (), list(SEEDERS))[1])


def make_and_probe(
    make: Make, seeded: Collection[str], others: Collection[str]
) -> tuple[Any, list[str]]:
    """The result of `make`, and which of the `others` it drew from, or read."""
    for name in others:
        if name in _PROBES:
            SEEDERS[name](_FIRST)
    offsets = _offsets() if "cuda" in others else ()
    try:
        with _notice_reads(others) if others else nullcontext(set[str]()) as read:
            made = make(seeded)
    except TypeError:  # perhaps an operator of torch was given the stand-in
        made, read = make(seeded), {"torch"}
    drawn = [
        name
        for name in others
        if name in read or (name in _PROBES and _PROBES[name]() != _first_draw(name))
    ]
    return made, [
        *drawn,
        *(["cuda"] if "cuda" in others and "cuda" not in drawn and _offsets() != offsets else ()),
    ]


_READ = set[str]()
"""The names of the generators whose seed or state was read since `_notice_reads` was entered."""


@contextmanager
def _notice_reads(generators: Collection[str]) -> Generator[set[str]]:
    """Yields the names of those of the generators whose seed or state is read meanwhile, as by
    `torch.initial_seed`.
    """
    _READ.clear()
    kept = list[tuple[Any, str, Any, Any]]()
    for place, name, generator, stand_in in _readers():
        if generator in generators:
            real = getattr(place, name)
            kept.append((place, name, real, noted := stand_in(generator, real)))
            setattr(place, name, noted)
    try:
        yield _READ
    finally:
        for place, name, real, noted in kept:
            if getattr(place, name) is noted:
                setattr(place, name, real)


class _Noted:
    """A function, or torch's default generator, that notes when it gives a seed or a state.

    Torch's operators refuse it as an argument.
    """

    def __init__(self, generator: str, real: Any) -> None:
        vars(self).update(_generator=generator, _real=real)

    def __call__(self, *args: Any, **given: Any) -> Any:
        _READ.add(self._generator)
        return self._real(*args, **given)

    def __getattr__(self, name: str) -> Any:
        if name in ("initial_seed", "get_state", "clone_state", "graphsafe_get_state", "state"):
            _READ.add(self._generator)
        return getattr(self._real, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _READ.add(self._generator)
        return self._real.__reduce_ex__(protocol)


class _NotedBits(_Noted):
    """The bits of NumPy's global generator, which asks them for its state whatever name it is
    called by.
    """

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (np.random.seed asks for it)
        return type(self._real)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


class _NotedRandom(random.Random):
    """The class of Python's global generator meanwhile: who gives its state, whatever name it is
    called by, looks up VERSION.
    """

    @property
    def VERSION(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        _READ.add("random")
        return random.Random.VERSION

    def __reduce__(self) -> Any:
        return random.Random, (), self.getstate()


_READERS: list[tuple[Any, str, str, Callable[[str, Any], Any]]] = [
    (random._inst, "__class__", "random", lambda generator, real: _NotedRandom),  # pyright: ignore
    (np.random.mtrand._rand, "_bit_generator", "numpy", _NotedBits),  # pyright: ignore
    (torch, "default_generator", "torch", _Noted),
    (torch.random, "default_generator", "torch", _Noted),
]
_CUDA_READERS = [
    (place, name, "cuda", _Noted)
    for place in (torch.cuda, torch.cuda.random)
    for name in ("initial_seed", "get_rng_state")
]


def _readers() -> list[tuple[Any, str, str, Callable[[str, Any], Any]]]:
    """What gives a generator's seed or state: where it is, its name there, the generator, and what
    makes a stand-in for it.
    """
    return [*_READERS, *_CUDA_READERS] if torch.cuda.is_initialized() else _READERS


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
    """The offset of each CUDA device's generator, known without a wait for the device and without
    seeding.
    """
    return (
        tuple(one.get_offset() for one in torch.cuda.default_generators)
        if torch.cuda.is_initialized()
        else ()
    )
