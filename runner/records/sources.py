"""The code that an experiment reaches: which files, what each of their functions and classes says, and what of it is other now.

It is found and read as text: neither that code is imported, nor torch or mlflow.

A file is named by its top-level package and its place in that (`lab/models/net.py`), so it is the same file in another folder, on another machine, in a copy.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samewise.runner.records import shapes, syntax
from samewise.runner.records.files import read_json, read_mapping

Files = Mapping[str, Mapping[str, str]]
"""For each file the digests of its functions and classes, by qualified name."""
_STDLIB = Path(sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True)
class Code:
    """What is reached.

    Args:
        files: By name, with the digests of what they define. An installed package is not taken apart: its files have a digest of their bytes.
        libraries: The top-level names of the installed packages that those import.
        declined: The modules that were not gone into, as was asked.
    """

    files: Files = field(default_factory=dict[str, Mapping[str, str]])
    libraries: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Module:
    """A module's own file, its name among files, and the folders of its submodules; no file: a namespace package."""

    name: str
    file: Path | None
    label: str
    places: tuple[str, ...] = ()


def is_library(file: Path) -> bool:
    """Whether a file is Python's own, or installed: what is edited lies elsewhere. An editable install's files do."""
    return any(part in ("site-packages", "dist-packages") for part in file.parts) or file.is_relative_to(_STDLIB)


def reach(names: Iterable[str], packages: Sequence[str], *, follows: Callable[[str], bool] = lambda name: True) -> Code:
    """The code that some classes and functions reach by imports, Python's own, samewise's and that of libraries left out.

    Args:
        names: Dotted names of classes, functions or modules.
        packages: Whose files count even where they are installed.
        follows: Whether to go into a module of that name.
    """
    todo, seen, files, libraries, declined = list(names), set[str](), dict[str, Mapping[str, str]](), set[str](), set[str]()
    known = dict[str, _Module | None]()
    while todo:
        for module in _along(todo.pop(), known):
            if not follows(module.name):
                declined.add(module.name)
            if module.name in seen or module.name in declined:
                continue
            seen.add(module.name)
            top, is_declared = module.name.partition(".")[0], _is_within(module.name, packages)
            at = module.file or Path(next(iter(module.places), ""))
            if is_library(at) and not is_declared:
                libraries.add(top)
            elif _is_opaque(at):
                files.update({label: digests for label, file in _all_files(module) if (digests := digests_of(file)) is not None})
            elif module.file is not None:
                files[module.label] = digests_of(module.file) or {}
                todo += _imported(module)
    return Code(dict(sorted(files.items())), tuple(sorted(libraries)), tuple(sorted(declined)))


def digests_of(file: Path) -> Mapping[str, str] | None:
    """Of what a file defines; of its bytes where it is installed, or no Python. None where it cannot be read."""
    try:
        if file.suffix != ".py" or _is_opaque(file):
            return {"": syntax.raw_digest(str(file))[:16]}
        return syntax.read(str(file)).digests
    except OSError:
        return None
    except (SyntaxError, ValueError, RecursionError):
        return {"": syntax.raw_digest(str(file))[:16]}


def files_in(record: Path) -> Files:
    """What a run's or sweep's `sources.json` holds; empty where there is none, a ConfigError where it is damaged."""
    return (read_json(record, shapes.SOURCES) or {}).get("files", {})


def list_changes(record: Path) -> list[str]:
    """What is other now in the code that was recorded, as sentences; a ConfigError where the record is damaged."""
    before = files_in(record)
    now = present(before)
    gone = [f"{label} {'no longer exists' if place(label) is None else 'cannot be read'}" for label in before if label not in now]
    return gone + describe_changes({label: before[label] for label in now}, now)


def describe_changes(before: Files, now: Files) -> list[str]:
    """Where two states of code differ: sentences that name files, and their functions and classes."""
    said = [f"{label} has changed{_in_words(before[label], now[label])}" for label in before if label in now and before[label] != now[label]]
    said += [f"{label} is no longer used" for label in before if label not in now]
    return said + [f"{label} was not used" for label in now if label not in before]


def differences(first: Path, second: Path) -> list[str]:
    """The files that two runs used and that were not the same, each with the functions and classes that differ."""
    one, two = files_in(first), files_in(second)
    return [f"{label}{_in_words(one[label], two[label], ' (', ')')}" for label in one if label in two and one[label] != two[label]]


def warn_of_changes(record: Path) -> None:
    """Say what is other now in the code of a run that is used all the same."""
    for told in list_changes(record):
        print(f"warning: {told}; the run was trained with the earlier version", file=sys.stderr)


def earlier(folder: Path, config: str, files: Files) -> Path | None:
    """The folder, beside this one, of the run of the same config whose code is most like `files`, of several the latest; None if there is none."""
    beside = [path for path in folder.parent.glob("*/sources.json") if path.parent != folder and config_in(path) == config]
    if beside:
        return min(beside, key=lambda path: (_unlike(files_in(path), files), -path.stat().st_mtime)).parent
    before_code_counted = folder.with_name(config[:12])  # its name, to versions that left the code out of a run's identity
    return before_code_counted if before_code_counted != folder and before_code_counted.is_dir() else None


def _unlike(one: Files, two: Files) -> int:
    """How many files, functions and classes are not in both alike."""
    here, there = ({(label, name, digest) for label, digests in files.items() for name, digest in digests.items()} for files in (one, two))
    return len(here ^ there)


def not_shown(code: Code, packages: Sequence[str]) -> list[str]:
    """Modules of these packages that have been imported, and that no text which was read names."""
    loaded = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()) if _is_within(name, packages)]
    known = dict[str, _Module | None]()
    return [name for name, file in loaded if file and (found := _module(name, known)) and found.label not in code.files]


def place(label: str) -> Path | None:
    """Where a file of that name is now; None if it is not there."""
    top, _, rest = label.partition("/")
    found = _top(top.partition(".")[0])
    if found is None or not rest:
        return found.file if found else None
    return next((file for folder in found.places if os.path.lexists(file := Path(folder, rest))), None)


_IMPORTED = dict[str, tuple[Any, Mapping[str, str]]]()
"""What files said when this process had imported them, with what it imported them by: a module that is reloaded has another."""


def note_imported(code: Code) -> None:
    """Remember what the files say that this process has imported."""
    for label, digests in code.files.items():
        spec = _imported_by(label)
        if spec is not None and _IMPORTED.get(label, (None,))[0] is not spec:
            _IMPORTED[label] = (spec, digests)


def edited_since_import(code: Code) -> list[str]:
    """The files that say something else than when this process imported them: it would run the earlier version."""
    known = {label: _IMPORTED[label] for label in code.files if label in _IMPORTED}
    return [label for label, (spec, digests) in known.items() if spec is _imported_by(label) and digests != code.files[label]]


def _imported_by(label: str) -> Any:
    return getattr(sys.modules.get(_module_name(label)), "__spec__", None)


def _module_name(label: str) -> str:
    return label.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def present(labels: Iterable[str]) -> Files:
    """Those of the files of these names that are there now."""
    found = {label: digests_of(file) for label in labels if (file := place(label)) is not None}
    return {label: digests for label, digests in found.items() if digests is not None}


def raw_state(labels: Iterable[str]) -> str:
    """One digest of the bytes of the files of these names: where it is as it was, nothing needs to be parsed."""
    files = [place(label) for label in labels]
    return hashlib.sha256(" ".join(syntax.raw_digest(str(file)) if file and file.is_file() else "-" for file in files).encode()).hexdigest()[:16]


def config_in(record: Path) -> str | None:
    """What the recorded code belongs to: a run's config, by its fingerprint, or a sweep. None where there is no sound record."""
    return read_mapping(record, shapes.SOURCES).get("config")


def _in_words(before: Mapping[str, str], now: Mapping[str, str], opening: str = ": ", closing: str = "") -> str:
    names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    named = [name for name in names if name] + (["its top level"] if "" in names and len(before) + len(now) > 2 else [])
    return f"{opening}{', '.join(named)}{closing}" if named else ""


def _is_opaque(file: Path) -> bool:
    """Whether a file is taken as bytes: an installed package may be large, and nobody formats it. samewise is read in one way wherever it lies."""
    return is_library(file) and "samewise" not in file.parts


def _is_within(name: str, packages: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def _along(dotted: str, known: dict[str, _Module | None]) -> Iterator[_Module]:
    """The modules that a dotted name leads through, as far as it names any."""
    parts = dotted.split(".")
    for end in range(1, len(parts) + 1):
        module = _module(".".join(parts[:end]), known)
        if module is None:
            return
        yield module


def _module(name: str, known: dict[str, _Module | None]) -> _Module | None:
    """Where a module lies. None for one of Python's own, and for one that is not there."""
    if name not in known:
        parent, _, last = name.rpartition(".")
        above = _module(parent, known) if parent else None
        known[name] = _submodule(above, last) if above else None if parent else _top(name)
    return known[name]


def _top(name: str) -> _Module | None:
    if name in sys.stdlib_module_names or name == "__main__":
        return None
    try:
        spec = importlib.util.find_spec(name)  # of a top-level package: imports nothing
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = tuple(spec.submodule_search_locations or ())
    file = Path(spec.origin) if spec.origin and spec.has_location else None
    return _Module(name, file, f"{name}/{file.name}" if file and places else file.name if file else name, places)


def _submodule(parent: _Module, last: str) -> _Module | None:
    name, base = f"{parent.name}.{last}", parent.name.replace(".", "/")
    for folder in parent.places:
        for suffix in importlib.machinery.all_suffixes():
            if (file := Path(folder, last, f"__init__{suffix}")).is_file():
                return _Module(name, file, f"{base}/{last}/{file.name}", (str(file.parent),))
            if (file := Path(folder, f"{last}{suffix}")).is_file():
                return _Module(name, file, f"{base}/{file.name}")
    folders = tuple(str(inner) for folder in parent.places if (inner := Path(folder, last)).is_dir())
    return _Module(name, None, f"{base}/{last}", folders) if folders else None


def _imported(module: _Module) -> Iterator[str]:
    """What a module's text imports: modules, and perhaps names in them; all of its package's where it imports what its text does not name."""
    try:
        found = syntax.read(str(module.file))
    except (OSError, SyntaxError, ValueError, RecursionError):  # compiled, or unfit to be imported
        return
    parts = module.name.split(".")
    package = parts if module.places else parts[:-1]
    for dots, base, names in found.imports:
        whole = ".".join([*package[: len(package) - dots + 1], *([base] if base else [])]) if dots else base
        if whole:
            yield whole
            yield from (f"{whole}.{name}" for name in names)
    if found.hides and parts[0] != "samewise" and (top := _top(parts[0])) is not None:
        yield from (_module_name(label) for label, _ in _all_files(top))


def _all_files(module: _Module) -> Iterator[tuple[str, Path]]:
    """A package's files, or the one of a module, by name."""
    if not module.places and module.file:
        yield module.label, module.file
    for folder in module.places:
        for at, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
            yield from (
                (f"{module.name.replace('.', '/')}/{(file := Path(at, name)).relative_to(folder).as_posix()}", file) for name in names if _is_code(name)
            )


def _is_code(name: str) -> bool:
    return any(name.endswith(suffix) for suffix in importlib.machinery.all_suffixes()) and not name.endswith(".pyc")
