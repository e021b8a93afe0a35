"""Try all combinations of the values."""

from collections.abc import Iterable
from pathlib import Path
from typing import final

from samewise.runner.sweepers.base import Setting, Sweeper
from samewise.runner.sweepers.space import Space


@final
class Grid(Sweeper):
    """Tries all combinations; the last key on the command line changes fastest."""

    def open(self, space: Space, folder: Path, *, monitor: str, mode: str) -> None:
        self._settings = [Setting(number, values) for number, values in enumerate(space.grid())]

    def settings(self) -> Iterable[Setting]:
        return self._settings
