"""A flame graph of a torch.profiler trace: calls nested by caller, with widths by duration. An SVG without scripts."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from samewise.runner.errors import number_of

_KINDS = {"user_annotation": "#e4a03c", "python_function": "#8fb4d9", "cpu_op": "#d9765f"}
"""What is drawn, by the profiler's category: ranges, Python, operators."""
_WIDTH, _ROW, _LEAST = 1400, 17, 0.7
"""Pixels; what is narrower than the last is left out."""
_SLACK = 1.0
"""Microseconds by which a call may seem to outlast its caller."""


@dataclass
class Frame:
    """A function, all its calls from one place together; `us` is their total duration in microseconds, including calls inside."""

    name: str
    kind: str
    us: float = 0.0
    calls: int = 0
    inner: dict[tuple[str, str], Frame] = field(default_factory=dict[tuple[str, str], "Frame"])


def write(trace: Path, file: Path) -> None:
    """Draw a Chrome trace (`.json.gz`)."""
    with gzip.open(trace, "rt", encoding="utf-8") as handle:
        events = json.load(handle)["traceEvents"]
    file.write_text(draw(frames(events)), encoding="utf-8")


def frames(events: Sequence[Mapping[str, Any]]) -> list[Frame]:
    """The calls of each thread, nested by time, without the frames above the first range.

    A range begins within the call that enters it and outlasts that, so it is taken for what follows it.
    """
    threads = dict[Any, list[Mapping[str, Any]]]()
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _KINDS and float(event.get("dur", 0)) > 0:
            threads.setdefault(event["tid"], []).append(event)
    found = list[Frame]()
    for number, some in enumerate(threads.values()):
        root = Frame(f"thread {number + 1}", "")
        open_ = list[tuple[float, Frame]]()
        for event in sorted(some, key=lambda one: (one["ts"], -one["dur"])):
            begins, lasts = float(event["ts"]), float(event["dur"])
            while open_ and (begins >= open_[-1][0] or begins + lasts > open_[-1][0] + _SLACK):
                open_.pop()
            above = open_[-1][1] if open_ else root
            name, kind = re.sub(r"^step \d+$", "step", str(event["name"])), str(event["cat"])
            one = above.inner.setdefault((kind, name), Frame(name, kind))
            one.us, one.calls = one.us + lasts, one.calls + 1
            open_.append((begins + lasts, one))
        found.append(_skip_start(root))
    return sorted(found, key=lambda one: -one.us)


def _skip_start(root: Frame) -> Frame:
    """A thread from the first point at which it branches or enters a range."""
    inner = list(root.inner.values())
    while len(inner) == 1 and inner[0].kind == "python_function" and inner[0].inner:
        inner = list(inner[0].inner.values())
    inner = [one for one in inner if one.kind != "python_function"] or inner  # without the profiler's own start and end
    return Frame(root.name, "", sum(one.us for one in inner), 1, {(one.kind, one.name): one for one in inner})


def draw(threads: Sequence[Frame]) -> str:
    """The SVG. A frame's title, shown by browsers as a tooltip, has its time and share."""
    whole = max((one.us for one in threads), default=0.0) or 1.0
    rows, top = list[str](), 24
    for thread in threads:
        scale = _WIDTH / whole
        if thread.us * scale < 20:
            continue
        depth = 0
        for level, left, one in _place_frames(thread, 0, 0.0, scale):
            depth = max(depth, level)
            rows.append(_box(one, left, top + level * _ROW, one.us * scale, one.us / thread.us))
        top += (depth + 2) * _ROW
    words = "Of the steps that the profiler watched, which slows Python down; the true shares are in profile.json. Amber: ranges; blue: Python; red: operators"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" font-family="monospace" font-size="11">',
            f'<text x="4" y="15">{words}</text>',
            *rows,
            "</svg>",
            "",
        ]
    )


def _place_frames(frame: Frame, level: int, left: float, scale: float) -> Iterator[tuple[int, float, Frame]]:
    """The frames that are wide enough, each with its row and left edge."""
    pending = [(level, left, frame)]
    while pending:
        level, left, one = pending.pop()
        yield level, left, one
        for inner in sorted(one.inner.values(), key=lambda one: -one.us):
            if inner.us * scale >= _LEAST:
                pending.append((level + 1, left, inner))
                left += inner.us * scale


def _box(one: Frame, left: float, top: float, width: float, share: float) -> str:
    name = "".join(letter if letter.isprintable() else "?" for letter in one.name)
    title = f"{name}: {one.us / 1000:,.2f} ms, {share:.1%}, {number_of(one.calls, 'call')}"
    shown = name if len(name) * 6.7 < width - 4 else name[: max(0, int((width - 10) / 6.7))]
    text = f'<text x="{left + 2:.1f}" y="{top + 12}">{escape(shown)}</text>' if len(shown) > 2 else ""
    fill = _KINDS.get(one.kind, "#cccccc")
    return f'<g><title>{escape(title)}</title><rect x="{left:.1f}" y="{top}" width="{max(width - 0.3, 0.3):.1f}" height="{_ROW - 1}" fill="{fill}"/>{text}</g>'
