"""Randomness as a function: a stream has a name and is keyed by numbers, so it has no state.

Seeds come from hashing, never from adding: `seed + rank` makes neighbours share streams.
"""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from hashlib import blake2b
from struct import pack
from typing import Any

import numpy as np
import torch


def key(seed: int, name: str, *numbers: int) -> int:
    """Return a 64-bit seed for the stream `name` at `numbers` (an epoch, a step, a sample, ...)."""
    digest = blake2b(name.encode(), digest_size=8, key=pack("<q", seed))
    digest.update(pack(f"<{len(numbers)}q", *numbers))
    return int.from_bytes(digest.digest(), "little")


def generator(seed: int, name: str, *numbers: int) -> torch.Generator:
    """Make a CPU generator for the stream, for code that takes one."""
    result = torch.Generator()
    result.manual_seed(key(seed, name, *numbers))
    return result


def enter(seed: int, name: str, *numbers: int) -> None:
    """Seed Python's, NumPy's and torch's global generators for the stream, without restoring them.

    Takes 7 microseconds, so that each sample can enter its own stream.
    """
    number = key(seed, name, *numbers)
    random.seed(number)
    # The legacy generator takes 32 bits; two words cost 7 microseconds more
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def next_draws() -> tuple[float, float, int]:
    """Draw a value from each of Python's, NumPy's and torch's global generators of the CPU.

    From the same seeds, equal values mean that the same amount was drawn before.
    """
    return random.random(), np.random.random_sample(), int(_DRAWN.random_())


_DRAWN = torch.empty((), dtype=torch.int64)


def draws(make: Callable[[], Any]) -> bool:
    """Return whether a call draws from a global generator of the CPU."""
    with preserve_generators():
        enter(0, "draws")
        make()
        drawn = next_draws()
        enter(0, "draws")
        return next_draws() != drawn


@contextmanager
def scope(seed: int, name: str, *numbers: int) -> Generator[None]:
    """Seed the generators for the stream, and restore them afterwards."""
    with preserve_generators():
        enter(seed, name, *numbers)
        yield


@contextmanager
def preserve_generators() -> Generator[None]:
    """Restore Python's, NumPy's and torch's generators at the end, also after an error."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
