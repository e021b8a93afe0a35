"""Counts what was started, copied and waited for, and by which lines."""

from collections import Counter
from collections.abc import Mapping

from pretended_cuda.places import Place, here

KINDS: Mapping[str, str] = {
    "launches": "operators that start work on the device; one may be several kernels",
    "waits": "times that the host waits for the device: a value is read, a shape depends on values, a copy blocks",
    "copies_in": "copies from the host to the device",
    "blocking_copies_in": "those of them that wait",
    "bytes_in": "of the copies from the host",
    "copies_out": "copies from the device to the host, single values included",
    "blocking_copies_out": "those of them that wait",
    "bytes_out": "of the copies to the host",
}


class Counts:
    """Sums over the events of a part of a program, by kind and by place."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[Place]] = {kind: Counter() for kind in KINDS}

    def add(self, place: Place, **amounts: int) -> None:
        for kind, amount in amounts.items():
            if amount:
                self._found[kind][place] += amount

    def __getattr__(self, kind: str) -> int:
        if kind not in KINDS:
            raise AttributeError(kind)
        return self._found[kind].total()

    def totals(self) -> dict[str, int]:
        """Every kind's sum."""
        return {kind: found.total() for kind, found in self._found.items()}

    def functions(self, kind: str) -> dict[str, int]:
        """The amount of each function, largest first, which stays comparable when lines move."""
        found: Counter[str] = Counter()
        for place, amount in self._found[kind].items():
            found[f"{place.file} {place.function}"] += amount
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def lines(self, kind: str, function: str = "") -> dict[str, int]:
        """The amount of each line, in the order of files; `function`: only those of one, as `functions` names it."""
        found = sorted(self._found[kind].items())
        return {str(place): amount for place, amount in found if function in ("", f"{place.file} {place.function}")}


class Recorder:
    """Tells every `Counts` that is open what happens."""

    def __init__(self) -> None:
        self.open: list[Counts] = []
        self.waited = 0
        """How often the host has waited, counted or not."""

    def _add(self, **amounts: int) -> None:
        self.waited += amounts.get("waits", 0)
        if self.open:
            place = here()
            for counts in self.open:
                counts.add(place, **amounts)

    def launch(self) -> None:
        self._add(launches=1)

    def wait(self, times: int = 1) -> None:
        self._add(waits=times)

    def copy_in(self, size: int, *, blocking: bool) -> None:
        self._add(copies_in=1, bytes_in=size, blocking_copies_in=blocking, waits=blocking)

    def copy_out(self, size: int, *, blocking: bool) -> None:
        self._add(copies_out=1, bytes_out=size, blocking_copies_out=blocking, waits=blocking)


RECORDER = Recorder()
