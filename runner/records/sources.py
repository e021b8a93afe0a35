"""The user's code that an experiment reaches: its files, a digest of each function and class, and
what has changed.

It is found and read as text: neither that code is imported, nor torch or mlflow.

A file is named by its top-level package and its place in that (`lab/models/net.py`), so it is the
same file in another folder, on another machine, in a copy.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from samewise.runner.records import shapes, syntax
from samewise.runner.records.files import read_json, read_mapping

Files = Mapping[str, Mapping[str, str]]
"""For each file the digests of its functions and classes, by qualified name."""
_STDLIB = Path(sysconfig.get_paths()["stdlib"])


@dataclass(frozen=True)
class Code:
    """The code that an experiment reaches.

    Args:
        files: By name, with the digests of what they define. An installed package is not taken
            apart: its files have a digest of their bytes.
        libraries: The top-level names of the installed packages that those import.
        declined: The modules that were not gone into, as was asked.
    """

    files: Files = field(default_factory=dict[str, Mapping[str, str]])
    libraries: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Module:
    """A module's file, its name among files, and the folders of its submodules.

    A namespace package has no file.
    """

    name: str
    file: Path | None
    label: str
    places: tuple[str, ...] = ()


def is_library(file: Path) -> bool:
    """Whether a file belongs to Python or an installed package, as opposed to code that is being
    edited, such as an editable install.
    """
    return any(
        part in ("site-packages", "dist-packages") for part in file.parts
    ) or file.is_relative_to(_STDLIB)


def reach(
    names: Iterable[str],
    packages: Sequence[str],
    *,
    follows: Callable[[str], bool] = lambda name: True,
) -> Code:
    """The code that classes and functions reach by imports and names, without Python's, samewise's
    and that of libraries.

    Importing a file runs all that is not a definition. A function, class or constant counts if code
    that counts uses its name, in its file or where that is imported, or has an attribute or a
    string of that name. All in a module count if code uses the module as a value, and all in a
    package if code in it finds things by computed names.

    Args:
        names: Dotted names of classes, functions or modules.
        packages: Packages whose files count even if they are installed.
        follows: Whether to go into a module of that name.
    """
    walk = _Walk(frozenset(names), packages, follows)
    walk.finish()
    files = {label: dict(sorted(digests.items())) for label, digests in sorted(walk.files.items())}
    return Code(files, tuple(sorted(walk.libraries)), tuple(sorted(walk.declined)))


class _Walk:
    """What `reach` has found so far."""

    def __init__(
        self, roots: frozenset[str], packages: Sequence[str], follows: Callable[[str], bool]
    ) -> None:
        self.files, self.libraries, self.declined = (
            dict[str, dict[str, str]](),
            set[str](),
            set[str](),
        )
        self._packages, self._follows = packages, follows
        self._whole, self._attributes, self._values = set(roots), set[str](), set[str]()
        self._names = defaultdict[str, set[str]](set)
        for above, last in (
            (name[:dot], name[dot + 1 :].partition(".")[0])
            for name in roots
            for dot in range(len(name))
            if name[dot] == "."
        ):
            self._names[above].add(last)
        self._modules, self._opened = dict[str, _Module | None](), set[str]()
        self._rest = list[tuple[_Module, dict[str, syntax.Definition], Mapping[str, set[str]]]]()

    def finish(self) -> None:
        """Open modules and take their parts until nothing more is reached."""
        wanted, done = set(self._whole), set[str]()
        while wanted:
            done |= wanted
            for name in sorted(wanted):
                self._open(name)
            wanted = {name for name in self._take_parts() if name not in done}

    def _open(self, name: str) -> None:
        """Open the modules on the path of a dotted name."""
        along = list(_modules_along(name, self._modules))
        self.declined.update(
            [module.name for module in along if not self._follows(module.name)][-1:]
        )
        for module in along:
            if module.name in self._opened or not self._follows(module.name):
                continue
            self._opened.add(module.name)
            at = module.file or Path(next(iter(module.places), ""))
            if is_library(at) and not _is_within(module.name, self._packages):
                self.libraries.add(module.name.partition(".")[0])
            elif _is_opaque(at):
                self.files.update(
                    {
                        label: dict(digests)
                        for label, file in _all_files(module)
                        if (digests := digests_of(file)) is not None
                    }
                )
            elif module.file is not None and (parts := _parts(module.file)) is not None:
                self.files[module.label] = {}
                self._rest.append((module, dict(parts), _bindings(module, parts)))
            elif module.file is not None:
                # Compiled, or cannot be imported
                self.files[module.label] = dict(digests_of(module.file) or {})

    def _take_parts(self) -> set[str]:
        """Take the parts that what was taken before names, until there are none.

        Return what they import.
        """
        imported, before = set[str](), (-1, -1)
        while before != (
            before := (
                sum(map(len, self._names.values())),
                sum(len(parts) for _, parts, _ in self._rest),
            )
        ):
            for module, parts, bindings in self._rest:
                is_whole = module.name in self._whole or not self._values.isdisjoint(
                    accumulate(module.name.split("."), "{}.{}".format)
                )
                names = self._names[module.name] | self._attributes
                for name in [
                    name for name, part in parts.items() if part.is_run or is_whole or name in names
                ]:
                    part = parts.pop(name)
                    self.files[module.label] |= part.digests
                    self._attributes |= part.attributes
                    self._names[module.name] |= part.names
                    self._values |= _values(part, bindings)
                    if part.computes and _is_within(module.name, ["samewise"]):
                        self._whole.add(module.name)
                    elif part.computes:
                        self._values.add(module.name.partition(".")[0])
                    imported |= set(_find_imports(module, part))
                for name in bindings.keys() if is_whole else bindings.keys() & names:
                    for above, _, last in (target.rpartition(".") for target in bindings[name]):
                        self._names[above].add(last)
                for above in bindings.get("*", ()):
                    self._names[above.removesuffix(".*")] |= {"__all__", *self._names[module.name]}
        return imported


def digests_of(file: Path) -> Mapping[str, str] | None:
    """The digests of what a file defines.

    Of its bytes if it is installed or not Python. None if it cannot be read.
    """
    try:
        if file.suffix != ".py" or _is_opaque(file):
            return {"": syntax.raw_digest(str(file))[:16]}
        return {
            name: digest
            for part in syntax.read(str(file)).values()
            for name, digest in part.digests.items()
        }
    except OSError:
        return None
    except (SyntaxError, ValueError, RecursionError):
        return {"": syntax.raw_digest(str(file))[:16]}


def files_in(record: Path) -> Files:
    """The content of a run's or sweep's `sources.json`.

    Empty if there is none, a ConfigError if it is damaged.
    """
    return (read_json(record, shapes.SOURCES) or {}).get("files", {})


def list_changes(record: Path) -> list[str]:
    """What has changed in the recorded code, as sentences.

    A ConfigError if the record is damaged.
    """
    before = files_in(record)
    now = files_present(before)
    gone = [
        f"{label} {'no longer exists' if place(label) is None else 'cannot be read'}"
        for label in before
        if label not in now
    ]
    return gone + describe_changes({label: before[label] for label in now}, now)


def describe_changes(before: Files, now: Files) -> list[str]:
    """The differences between two states of code: sentences that name files, functions and classes."""
    said = [
        f"{label} has changed{_describe_change(before[label], now[label])}"
        for label in before
        if label in now and before[label] != now[label]
    ]
    said += [f"{label} is no longer used" for label in before if label not in now]
    return said + [f"{label} was not used" for label in now if label not in before]


def code_name(record: Path) -> str:
    """A short name for the recorded code.

    Empty if there is none or, with a warning, it is damaged.
    """
    files = read_mapping(record, shapes.SOURCES).get("files")
    text = json.dumps(files, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:7] if files else ""


def warn_of_changes(record: Path) -> None:
    """Warn that the code of a run that is used has changed."""
    for told in list_changes(record):
        print(f"warning: {told}; the run was trained with another version", file=sys.stderr)


def earlier(folder: Path, config: str, files: Files) -> Path | None:
    """The folder, beside this one, of the run of the same config with the most similar code, the
    latest of several; None if there is none.
    """
    beside = [
        path
        for path in folder.parent.glob("*/sources.json")
        if path.parent != folder and config_in(path) == config
    ]
    if beside:
        return min(
            beside,
            key=lambda path: (_count_differences(files_in(path), files), -path.stat().st_mtime),
        ).parent
    # It was only the config's name in versions that left code out of a run's identity
    before_code_counted = folder.with_name(config[:12])
    return (
        before_code_counted
        if before_code_counted != folder and before_code_counted.is_dir()
        else None
    )


def _count_differences(one: Files, two: Files) -> int:
    """The number of files, functions and classes that differ."""
    here, there = (
        {
            (label, name, digest)
            for label, digests in files.items()
            for name, digest in digests.items()
        }
        for files in (one, two)
    )
    return len(here ^ there)


_EARLIER = dict[str, Any]()
"""The modules that were loaded before samewise began to train, in a notebook."""


def note_loaded() -> None:
    """Record the modules that are loaded now: the experiment that is trained next has not imported
    them.
    """
    _EARLIER.clear()
    _EARLIER.update(sys.modules)


def hidden_imports(code: Code, packages: Sequence[str]) -> list[str]:
    """Modules of these packages that have been imported, by the experiment's code, although no text
    that was read names them.
    """
    some = [
        (name, module)
        for name, module in list(sys.modules.items())
        if _is_within(name, packages) and _EARLIER.get(name) is not module
    ]
    loaded = [(name, getattr(module, "__file__", None)) for name, module in some]
    known = dict[str, _Module | None]()
    return [
        name
        for name, file in loaded
        if file and (found := _module(name, known)) and found.label not in code.files
    ]


def place(label: str) -> Path | None:
    """The path of a file of that name; None if it does not exist."""
    top, _, rest = label.partition("/")
    found = _top(top.partition(".")[0])
    if found is None or not rest:
        return found.file if found else None
    return next(
        (file for folder in found.places if os.path.lexists(file := Path(folder, rest))), None
    )


_IMPORTED = dict[str, tuple[Any, Mapping[str, str]]]()
"""What files said when this process had imported them, with what it imported them by: a module that
is reloaded has another."""


def note_imported(code: Code) -> None:
    """Record the digests of all that the files define that this process has imported."""
    for label, digests in code.files.items():
        spec = _spec_of(label)
        if spec is not None and _IMPORTED.get(label, (None,))[0] is not spec:
            file = place(label)
            _IMPORTED[label] = (spec, (digests_of(file) if file else None) or digests)


def edited_since_import(code: Code) -> list[str]:
    """The files that have changed since this process imported them: it would run the old version."""
    imported = {label: _IMPORTED[label] for label in code.files if label in _IMPORTED}
    return [
        label
        for label, (spec, digests) in imported.items()
        if spec is _spec_of(label)
        and any(digests.get(name) != digest for name, digest in code.files[label].items())
    ]


def _spec_of(label: str) -> Any:
    return getattr(sys.modules.get(_module_name(label)), "__spec__", None)


def _module_name(label: str) -> str:
    return label.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def files_present(before: Files) -> Files:
    """Those of the recorded files that exist now, with what was recorded of them."""
    found = {label: digests_of(file) for label in before if (file := place(label)) is not None}
    return {
        label: {name: digest for name, digest in digests.items() if name in before[label]}
        for label, digests in found.items()
        if digests is not None
    }


def raw_state(labels: Iterable[str]) -> str:
    """One digest of the named files' bytes: if it is unchanged, nothing needs to be parsed."""
    files = [place(label) for label in labels]
    return hashlib.sha256(
        " ".join(
            syntax.raw_digest(str(file)) if file and file.is_file() else "-" for file in files
        ).encode()
    ).hexdigest()[:16]


def config_in(record: Path) -> str | None:
    """What the recorded code belongs to: a run's config, identified by its fingerprint, or a sweep.

    None without an intact record.
    """
    return read_mapping(record, shapes.SOURCES).get("config")


def _describe_change(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    named = [name for name in names if name] + (
        ["its top level"] if "" in names and len(before) + len(now) > 2 else []
    )
    return f": {', '.join(named)}" if named else ""


def _is_opaque(file: Path) -> bool:
    """Whether a file is compared by its bytes: installed packages may be large, and are not
    reformatted. samewise is always parsed.
    """
    return is_library(file) and "samewise" not in file.parts


def _is_within(name: str, packages: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def _modules_along(dotted: str, known: dict[str, _Module | None]) -> Iterator[_Module]:
    """The modules on the path of a dotted name."""
    parts = dotted.split(".")
    for end in range(1, len(parts) + 1):
        module = _module(".".join(parts[:end]), known)
        if module is None:
            return
        yield module


def _module(name: str, known: dict[str, _Module | None]) -> _Module | None:
    """Find a module. None if it is Python's own or missing."""
    if name not in known:
        parent, _, last = name.rpartition(".")
        above = _module(parent, known) if parent else None
        known[name] = _submodule(above, last) if above else None if parent else _top(name)
    return known[name]


def _top(name: str) -> _Module | None:
    if name in sys.stdlib_module_names or name == "__main__":
        return None
    try:
        # Of a top-level package: imports nothing
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = tuple(spec.submodule_search_locations or ())
    file = Path(spec.origin) if spec.origin and spec.has_location else None
    return _Module(
        name,
        file,
        f"{name}/{file.name}" if file and places else file.name if file else name,
        places,
    )


def _submodule(parent: _Module, last: str) -> _Module | None:
    name, base = f"{parent.name}.{last}", parent.name.replace(".", "/")
    for folder in parent.places:
        for suffix in importlib.machinery.all_suffixes():
            if (file := Path(folder, last, f"__init__{suffix}")).is_file():
                return _Module(name, file, f"{base}/{last}/{file.name}", (str(file.parent),))
            if (file := Path(folder, f"{last}{suffix}")).is_file():
                return _Module(name, file, f"{base}/{file.name}")
    folders = tuple(
        str(inner) for folder in parent.places if (inner := Path(folder, last)).is_dir()
    )
    return _Module(name, None, f"{base}/{last}", folders) if folders else None


def _parts(file: Path) -> syntax.Syntax | None:
    try:
        return syntax.read(str(file)) if file.suffix == ".py" else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _base(module: _Module, imported: syntax.Import) -> str:
    """The absolute name of what a module imports, or imports something from."""
    parts = module.name.split(".")
    package = parts if module.places else parts[:-1]
    above = package[: len(package) - imported.dots + 1] if imported.dots else []
    return ".".join([*above, *([imported.base] if imported.base else [])])


def _find_imports(module: _Module, part: syntax.Definition) -> Iterator[str]:
    """The modules, and possibly names in them, that a part of a module imports.

    Its whole package if it imports by computed names.
    """
    for imported in part.imports:
        if base := _base(module, imported):
            yield f"{base}.{imported.name}" if imported.name else base
    if (
        part.hides
        and not _is_within(module.name, ["samewise"])
        and (top := _top(module.name.partition(".")[0])) is not None
    ):
        yield from (_module_name(label) for label, _ in _all_files(top))


def _bindings(module: _Module, parts: syntax.Syntax) -> Mapping[str, set[str]]:
    """The absolute names that a module's imports bind to each name."""
    bound = dict[str, set[str]]()
    for imported in (imported for part in parts.values() for imported in part.imports):
        target = ".".join(filter(None, (_base(module, imported), imported.name)))
        name = imported.alias or imported.name or target.partition(".")[0]
        bound.setdefault(name, set()).add(target if imported.alias or imported.name else name)
    return bound


def _values(part: syntax.Definition, bindings: Mapping[str, set[str]]) -> set[str]:
    """The absolute names of what a part uses as a value, if it was imported."""
    found = {target for value in part.values for target in bindings.get(value, ())}
    for first, dot, rest in (value.partition(".") for value in part.values):
        found |= {f"{target}{dot}{rest}" for target in bindings.get(first, ())}
    return found


def _all_files(module: _Module) -> Iterator[tuple[str, Path]]:
    """The files of a package, or a module's file, by name."""
    if not module.places and module.file:
        yield module.label, module.file
    for folder in module.places:
        for at, folders, names in os.walk(folder):
            folders[:] = sorted(
                name for name in folders if name != "__pycache__" and not name.startswith(".")
            )
            yield from (
                (
                    f"{module.name.replace('.', '/')}/{(file := Path(at, name)).relative_to(folder).as_posix()}",
                    file,
                )
                for name in names
                if _is_code(name)
            )


def _is_code(name: str) -> bool:
    return any(
        name.endswith(suffix) for suffix in importlib.machinery.all_suffixes()
    ) and not name.endswith(".pyc")
