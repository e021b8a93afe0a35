"""Streams of the pretended device. All is computed at once; what is checked is that nothing is used before it is there, or after its memory is gone."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from pretended_cuda.counts import RECORDER
from pretended_cuda.tensor import DeviceError, PretendedTensor


class Stream:
    """A queue of the device's work."""

    def __init__(self, device: Any = None) -> None:
        self.started = 0
        self._waits_for: dict[Stream, int] = {}

    def wait_event(self, event: Event) -> None:
        self._waits_for[event.stream] = max(event.moment, self._waits_for.get(event.stream, 0))

    def use(self, tensors: Sequence[PretendedTensor]) -> None:
        """Refuse tensors of another stream that this one has not waited for, or whose memory that one may give away."""
        for stream, moment, used_on in (one.origin for one in tensors if one.origin is not None and one.origin[0] is not self):
            if self._waits_for.get(stream, 0) < moment:
                raise DeviceError("a tensor is used on a stream that has not waited for the one on which it is made")
            if self not in used_on:
                raise DeviceError("a tensor is used on another stream than the one on which it is made, which may give its memory away: record_stream")


class Event:
    """A moment of a stream. Who waits for anything later has waited for it."""

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.moment = self.stream.started
        self._waited = RECORDER.waited

    def synchronize(self) -> None:
        if RECORDER.waited == self._waited:
            RECORDER.wait()


_CURRENT = [Stream()]


def current_stream(device: Any = None) -> Stream:
    """The one on which operators are started."""
    return _CURRENT[-1]


@contextmanager
def stream(chosen: Stream) -> Generator[None]:
    """Within it operators are started on this one."""
    _CURRENT.append(chosen)
    try:
        yield
    finally:
        _CURRENT.pop()


def begun(made: Any) -> Any:
    """What an operator makes is of the current stream from now on, where it is another than the first: tensors of that one need no care."""
    at_work = current_stream()
    at_work.started += 1
    for one in made if type(made) in (list, tuple) else [made]:
        if isinstance(one, PretendedTensor):
            one.origin = None if at_work is _CURRENT[0] else (at_work, at_work.started, set[Any]())
    return made
