"""Draw settings at random, or spread them evenly at random."""

import abc
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

from samewise.runner.errors import ConfigError
from samewise.runner.sweepers.base import Setting, Sweeper
from samewise.runner.sweepers.space import Dimension, Space


class _RandomSweeper(Sweeper, abc.ABC):
    """Settings that are functions of the seed and their number.

    With more trials, the first settings stay the same.

    Args:
        trials: Number of settings to try.
        seed: Seed of the draws; another seed tries other settings.
    """

    def __init__(self, *, trials: int = 20, seed: int = 0) -> None:
        ConfigError.raise_if(trials < 1, "trials", "is too small", trials, "at least 1")
        self._trials, self._seed = trials, seed

    def open(self, space: Space, folder: Path, *, monitor: str, mode: str) -> None:
        space.require_dimensions()
        dimensions = space.dimensions
        rows = self._shares(dimensions)
        self._settings = [
            Setting(
                number,
                {
                    dimension.key: dimension.at(share)
                    for dimension, share in zip(dimensions, shares, strict=True)
                },
            )
            for number, shares in enumerate(rows)
        ]

    def settings(self) -> Iterable[Setting]:
        return self._settings

    @abc.abstractmethod
    def _shares(self, dimensions: Sequence[Dimension]) -> Iterable[Sequence[float]]:
        """Return a number in [0, 1) for each dimension, per trial."""


@final
class Random(_RandomSweeper):
    """Draws each value independently: uniformly from a list, or from an interval on its scale.

    Bergstra and Bengio, JMLR 13, 2012.

    Args:
        trials: Number of settings to try.
        seed: Seed of the draws; another seed tries other settings.

    Raises:
        ConfigError: `trials` is below 1.
    """

    def _shares(self, dimensions: Sequence[Dimension]) -> Iterable[Sequence[float]]:
        return [
            [_share(self._seed, number, dimension.key) for dimension in dimensions]
            for number in range(self._trials)
        ]


@final
class Sobol(_RandomSweeper):
    """Tries the points of a scrambled Sobol sequence, which leave smaller gaps than random draws.

    Owen 1998; SciPy's `qmc.Sobol`.

    Args:
        trials: Number of settings to try.
        seed: Seed of the scrambling; another seed tries other settings.

    Raises:
        ConfigError: `trials` is below 1.
    """

    def _shares(self, dimensions: Sequence[Dimension]) -> Iterable[Sequence[float]]:
        from scipy.stats import qmc

        ConfigError.raise_if(
            len(dimensions) > qmc.Sobol.MAXDIM,
            "sweeper",
            f"Sobol sequences have at most {qmc.Sobol.MAXDIM} dimensions",
            len(dimensions),
            hint="sweeper=random",
        )
        # The sequence is balanced at powers of two
        rounded = 1 << (self._trials - 1).bit_length()
        return (
            qmc.Sobol(len(dimensions), scramble=True, rng=self._seed)
            .random(rounded)[: self._trials]
            .tolist()
        )


def _share(seed: int, number: int, key: str) -> float:
    """Return a number in [0, 1) that is a function of the arguments."""
    digest = hashlib.blake2b(f"{seed}/{number}/{key}".encode(), digest_size=8).digest()
    # A float64 has 53 bits, so the quotient is exact and below 1
    return (int.from_bytes(digest, "big") >> 11) / 2**53
