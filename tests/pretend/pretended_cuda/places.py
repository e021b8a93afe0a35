"""Which line of a project's own code is running: neither torch's, nor any other package's, nor Python's."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType
from typing import NamedTuple

HERE = str(Path(__file__).parent)
ROOT = Path(__file__).resolve().parents[3]
OTHERS = (HERE, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<")


class Place(NamedTuple):
    """A line of code. `file` is relative to the repository where it lies in it."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


NOWHERE = Place("nowhere", "a thread of torch", 0)


def here() -> Place:
    """The innermost line of a project's own code on this thread's stack."""
    frame = sys._getframe(1)
    while frame is not None:
        file = _own(frame.f_code)
        if file:
            return Place(file, _function(frame.f_code.co_qualname), frame.f_lineno)
        frame = frame.f_back
    return NOWHERE


@cache
def _function(name: str) -> str:
    """The function's name in its module, without those inside it that Python names, as `<listcomp>`: not every version of it makes functions of them."""
    inner = [part for part in name.split(".") if not part.startswith("<")]
    return ".".join(inner) or name


@cache
def _own(code: CodeType) -> str:
    """The name of the file, empty where it is someone else's."""
    name = code.co_filename
    _, installed, inside = name.rpartition("/samewise/")
    if installed and inside.partition("/")[0] in ("runner", "recipes", "datasets"):
        return inside
    if name.startswith(OTHERS) or "/site-packages/" in name:
        return ""
    path = Path(name)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else name
