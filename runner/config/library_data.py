"""Limits what data sets of the libraries and of samewise may do while they are created: download known files into their folder, and write nowhere else."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
import re
import sys
import tarfile
from collections.abc import Callable, Generator, Mapping
from typing import Any

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.processes.memory import require_few

LIBRARIES = ("torchvision.datasets", "torchaudio.datasets")
"""Their classes may download from the addresses they know, and from no other."""
PACKAGES = (*LIBRARIES, "samewise.datasets")

_WITH_SCHEME = re.compile(r"<?[^/:]+:")
"""`file:/etc/passwd`, `data:;base64,...`, `URL:...`: what urllib opens without a `//`."""
_WRITES = {"open": 0, "os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "shutil.rmtree": 0}
"""Events of the interpreter's audit, and which of their arguments is the place that is written."""
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_IMPORTS = "<frozen importlib._bootstrap_external>"

if hasattr(tarfile, "data_filter"):  # from Python 3.11.4; earlier versions end the write hook
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)  # they extract downloads without a filter of their own

_watched = contextvars.ContextVar[tuple[str, list[str]] | None]("watched", default=None)
"""The config path of the data set that this thread is creating, and where it may write."""
_hooks = list[Callable[..., None]]()


def make_within_root(made: Callable[..., Any], path: str, /, *positional: Any, **named: Any) -> Any:
    """Create a data set that writes only below its `root`: links and archives in someone else's folder may lead to any file of the user's.

    ConfigError if it would write elsewhere, has an address to download from, or asks for thousands of processes.
    """
    try:
        given = inspect.signature(made).bind_partial(*positional, **named).arguments
    except TypeError:  # creating it will report this more clearly
        given = named
    root = given.get("root")
    _require_harmless(made, path, given)
    with _writing_below([os.path.realpath(os.path.expanduser(root))] if isinstance(root, str | os.PathLike) else [], path):
        return made(*positional, **named)


def _require_harmless(made: Callable[..., Any], path: str, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if isinstance(value, int) and key.endswith("workers"):
            require_few(f"{path}.{key}", value)
        is_address = isinstance(value, str) and ("://" in value or _WITH_SCHEME.match(value.strip()))
        if is_address and str(made.__module__).startswith(LIBRARIES):
            raise ConfigError(Problem(f"{path}.{key}", "a config may not choose where to download from", value, "a name that the data set knows"))


@contextlib.contextmanager
def _writing_below(places: list[str], path: str) -> Generator[None]:
    if not _hooks:
        _hooks.append(_hook)
        sys.addaudithook(_hook)
    before = _watched.set((path, [*places, os.path.realpath(os.path.expanduser("~/.cache/gdown"))]))  # by which torchvision asks Google Drive
    try:
        yield
    finally:
        _watched.reset(before)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if (place := _WRITES.get(event)) is None and event != "tempfile.mkdtemp":
        return
    if (watched := _watched.get()) is None:
        return
    path, places = watched
    if place is None:
        places.append(os.path.realpath(arguments[0]))
        return
    file = arguments[place]
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _FLAGS):
        return
    if not isinstance(file, str | bytes | os.PathLike) or os.fspath(file) == os.devnull or _is_import():
        return
    real = os.path.realpath(os.fsdecode(file))
    if not any(real == one or real.startswith(f"{one.rstrip('/')}/") for one in places):
        hint = "a link in the data set's folder may lead there: if it is yours, give the folder that it leads to as the root"
        raise ConfigError(Problem(path, f"would write outside of the data set's folder: {real}", expected="a folder without links to others", hint=hint))


def _is_import() -> bool:
    """Whether a module is being compiled for its first import."""
    return sys._getframe(2).f_code.co_filename == _IMPORTS  # pyright: ignore[reportPrivateUsage]
