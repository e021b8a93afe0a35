"""The user's code that an experiment reaches: its files, and a digest of each function and class.

It is found and read as text: neither that code is imported, nor torch or mlflow.

A file is named by its top-level package and its place in that (`lab/models/net.py`), so it is the
same file in another folder, on another machine, in a copy.
"""

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
"""Digests of each file's functions and classes, by qualified name."""
_STDLIB = Path(sysconfig.get_paths()["stdlib"])
_SUFFIXES = tuple(x for x in importlib.machinery.all_suffixes() if x != ".pyc")


@dataclass(frozen=True)
class Code:
    """The code that an experiment reaches.

    Args:
        files: By name, with the digests of their definitions. A file of an installed package has
            one digest, that of its bytes.
        libraries: Top-level names of the installed packages that the files import.
        declined: Modules that `follows` excluded.
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
    """Whether a file belongs to Python or an installed package, and is not being edited.

    An editable install is no library.
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
    """Find the code that classes and functions reach by imports and names.

    Python's code, samewise's and that of libraries is left out. Importing a file runs all that is
    not a definition. A function, class or constant counts if code that counts uses its name, in its
    file or where that is imported, or has an attribute or a string of that name. All definitions of
    a module count if code uses the module as a value, and all of a package if code in it finds
    names by computation.

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
    """The state of `reach`: modules, names and files so far."""

    def __init__(
        self, roots: frozenset[str], packages: Sequence[str], follows: Callable[[str], bool]
    ) -> None:
        self.files = dict[str, dict[str, str]]()
        self.libraries, self.declined = set[str](), set[str]()
        self._packages, self._follows = packages, follows
        self._whole, self._attributes, self._values = set(roots), set[str](), set[str]()
        self._names = defaultdict[str, set[str]](set)
        for parent, last in (
            (name[:dot], name[dot + 1 :].partition(".")[0])
            for name in roots
            for dot in range(len(name))
            if name[dot] == "."
        ):
            self._names[parent].add(last)
        self._modules, self._opened = dict[str, _Module | None](), set[str]()
        self._rest = list[tuple[_Module, dict[str, syntax.Definition], Mapping[str, set[str]]]]()

    def finish(self) -> None:
        """Open modules and take their parts until nothing more is reached."""
        pending, opened = set(self._whole), set[str]()
        while pending:
            opened |= pending
            for name in sorted(pending):
                self._open(name)
            pending = {name for name in self._take_parts() if name not in opened}

    def _open(self, name: str) -> None:
        """Open the modules on the path of a dotted name."""
        modules = list(_modules_along(name, self._modules))
        self.declined.update(
            [module.name for module in modules if not self._follows(module.name)][-1:]
        )
        for module in modules:
            if module.name in self._opened or not self._follows(module.name):
                continue
            self._opened.add(module.name)
            path = module.file or Path(next(iter(module.places), ""))
            if is_library(path) and not _is_within(module.name, self._packages):
                self.libraries.add(module.name.partition(".")[0])
            elif _is_opaque(path):
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
                # A compiled file, or one with a syntax error: its bytes count
                self.files[module.label] = dict(digests_of(module.file) or {})

    def _take_parts(self) -> set[str]:
        """Take the parts that parts taken before use, until none is left; return their imports."""
        imported, progress = set[str](), (-1, -1)
        while progress != (
            progress := (
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
                        # Which names are computed is unknown, so the whole package counts
                        self._values.add(module.name.partition(".")[0])
                    imported |= set(_find_imports(module, part))
                for name in bindings.keys() if is_whole else bindings.keys() & names:
                    for parent, _, last in (target.rpartition(".") for target in bindings[name]):
                        self._names[parent].add(last)
                # A star import may bind any name that this module uses
                for star in bindings.get("*", ()):
                    self._names[star.removesuffix(".*")] |= {"__all__", *self._names[module.name]}
        return imported


def digests_of(file: Path) -> Mapping[str, str] | None:
    """Return the digests of a file's definitions; None if it cannot be read.

    An installed file, or one that is not Python, has a single digest of its bytes.
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
    """Return the files in a run's or sweep's `sources.json`; empty without the file.

    Raises:
        ConfigError: It is damaged.
    """
    return (read_json(record, shapes.SOURCES) or {}).get("files", {})


def list_changes(record: Path) -> list[str]:
    """Describe what has changed in the recorded code, a sentence each.

    Raises:
        ConfigError: The record is damaged.
    """
    before = files_in(record)
    now = files_present(before)
    missing = [
        f"{label} {'no longer exists' if place(label) is None else 'cannot be read'}"
        for label in before
        if label not in now
    ]
    return missing + describe_changes({label: before[label] for label in now}, now)


def describe_changes(before: Files, now: Files) -> list[str]:
    """Describe the differences between two states of code, a sentence for each file."""
    sentences = [
        f"{label} {_describe_change(before[label], now[label])}"
        for label in before
        if label in now and before[label] != now[label]
    ]
    sentences += [f"{label} is no longer used" for label in before if label not in now]
    return sentences + [f"{label} was not used" for label in now if label not in before]


def code_name(record: Path) -> str:
    """Return a short name for the recorded code.

    Empty if there is no record or, with a warning, it is damaged.
    """
    files = read_mapping(record, shapes.SOURCES).get("files")
    text = json.dumps(files, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:7] if files else ""


def warn_of_changes(record: Path) -> None:
    """Warn of each change in the code of a run since its training."""
    for change in list_changes(record):
        print(f"warning: {change}; the run was trained with another version", file=sys.stderr)


def earlier(folder: Path, config: str, files: Files) -> Path | None:
    """Return the folder, beside this one, of the run of the same config with the most similar code.

    The latest of several; None without such a run.
    """
    records = [
        path
        for path in folder.parent.glob("*/sources.json")
        if path.parent != folder and config_in(path) == config
    ]
    if records:
        return min(
            records,
            key=lambda path: (_count_differences(files_in(path), files), -path.stat().st_mtime),
        ).parent
    # It was only the config's name in versions that left code out of a run's identity
    before_code_counted = folder.with_name(config[:12])
    return (
        before_code_counted
        if before_code_counted != folder and before_code_counted.is_dir()
        else None
    )


def _count_differences(before: Files, now: Files) -> int:
    """Count the files, functions and classes that differ."""
    old_digests, new_digests = (
        {
            (label, name, digest)
            for label, digests in files.items()
            for name, digest in digests.items()
        }
        for files in (before, now)
    )
    return len(old_digests ^ new_digests)


_EARLIER = dict[str, Any]()
"""Modules that were loaded before samewise began to train, in a notebook."""


def note_loaded() -> None:
    """Record the loaded modules, which the experiment that is trained next has not imported."""
    _EARLIER.clear()
    _EARLIER.update(sys.modules)


def hidden_imports(code: Code, packages: Sequence[str]) -> list[str]:
    """List the modules of these packages that are imported although no text names them."""
    loaded = [
        (name, getattr(module, "__file__", None))
        for name, module in list(sys.modules.items())
        if _is_within(name, packages) and _EARLIER.get(name) is not module
    ]
    cache = dict[str, _Module | None]()
    return [
        name
        for name, file in loaded
        if file and (module := _module(name, cache)) and module.label not in code.files
    ]


def place(label: str) -> Path | None:
    """Return the path of a file by its name among files, or None if it does not exist."""
    top, _, rest = label.partition("/")
    module = _top(top.partition(".")[0])
    if module is None or not rest:
        return module.file if module else None
    return next(
        (file for folder in module.places if os.path.lexists(file := Path(folder, rest))), None
    )


_IMPORTED = dict[str, tuple[Any, Mapping[str, str]]]()
"""Digests of files as this process imported them, each with the module's spec.

A reloaded module has another spec.
"""


def note_imported(code: Code) -> None:
    """Record the digests of the files that this process has imported."""
    for label, digests in code.files.items():
        spec = _spec_of(label)
        if spec is not None and _IMPORTED.get(label, (None,))[0] is not spec:
            file = place(label)
            _IMPORTED[label] = (spec, (digests_of(file) if file else None) or digests)


def edited_since_import(code: Code) -> list[str]:
    """List the files that have changed since this process imported them.

    The process would run the old version.
    """
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
    """Return the digests, as they are now, of the recorded definitions in the files that exist."""
    contents = {label: digests_of(file) for label in before if (file := place(label)) is not None}
    return {
        label: {name: digest for name, digest in digests.items() if name in before[label]}
        for label, digests in contents.items()
        if digests is not None
    }


def raw_state(labels: Iterable[str]) -> str:
    """Return one digest of the named files' bytes: if it is unchanged, no file must be parsed."""
    files = [place(label) for label in labels]
    return hashlib.sha256(
        " ".join(
            syntax.raw_digest(str(file)) if file and file.is_file() else "-" for file in files
        ).encode()
    ).hexdigest()[:16]


def config_in(record: Path) -> str | None:
    """Return the name of what the recorded code belongs to; None without an intact record.

    That is a run's config, identified by its fingerprint, or a sweep.
    """
    return read_mapping(record, shapes.SOURCES).get("config")


def _describe_change(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    parts = [name for name in names if name] + (
        ["its top level"] if "" in names and len(before) + len(now) > 2 else []
    )
    is_edited = any(name in before and name in now for name in names)
    reason = "has changed" if is_edited else "has changed, or other parts of it are used"
    return f"{reason}: {', '.join(parts)}" if parts else reason


def _is_opaque(file: Path) -> bool:
    """Whether a file is compared by its bytes, as installed files except samewise's are."""
    # Installed packages may be large, and nobody reformats them
    return is_library(file) and "samewise" not in file.parts


def _is_within(name: str, packages: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def _modules_along(dotted: str, cache: dict[str, _Module | None]) -> Iterator[_Module]:
    """Yield the modules on the path of a dotted name."""
    parts = dotted.split(".")
    for end in range(1, len(parts) + 1):
        module = _module(".".join(parts[:end]), cache)
        if module is None:
            return
        yield module


def _module(name: str, cache: dict[str, _Module | None]) -> _Module | None:
    """Find a module; None if it is Python's own or missing."""
    if name not in cache:
        parent, _, last = name.rpartition(".")
        package = _module(parent, cache) if parent else None
        cache[name] = _submodule(package, last) if package else None if parent else _top(name)
    return cache[name]


def _top(name: str) -> _Module | None:
    if name in sys.stdlib_module_names or name == "__main__":
        return None
    try:
        # find_spec of a top-level name imports nothing
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
    """Return the absolute name of the module that an import names."""
    parts = module.name.split(".")
    package = parts if module.places else parts[:-1]
    parents = package[: len(package) - imported.dots + 1] if imported.dots else []
    return ".".join([*parents, *([imported.base] if imported.base else [])])


def _find_imports(module: _Module, part: syntax.Definition) -> Iterator[str]:
    """Yield the modules, and possibly names in them, that a part of a module imports.

    All modules of its package if it imports by computed names.
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
    """Return the absolute names that a module's imports bind to each name."""
    bound = dict[str, set[str]]()
    for imported in (imported for part in parts.values() for imported in part.imports):
        target = ".".join(filter(None, (_base(module, imported), imported.name)))
        name = imported.alias or imported.name or target.partition(".")[0]
        bound.setdefault(name, set()).add(target if imported.alias or imported.name else name)
    return bound


def _values(part: syntax.Definition, bindings: Mapping[str, set[str]]) -> set[str]:
    """Return the absolute names of the imported values that a part uses."""
    targets = {target for value in part.values for target in bindings.get(value, ())}
    for first, dot, rest in (value.partition(".") for value in part.values):
        targets |= {f"{target}{dot}{rest}" for target in bindings.get(first, ())}
    return targets


def _all_files(module: _Module) -> Iterator[tuple[str, Path]]:
    """Yield the files of a package, or a module's file, by name."""
    if not module.places and module.file:
        yield module.label, module.file
    for folder in module.places:
        for at, folders, names in os.walk(folder):
            # In place: os.walk goes only into the folders that are left in its list
            folders[:] = sorted(
                name for name in folders if name != "__pycache__" and not name.startswith(".")
            )
            base = module.name.replace(".", "/")
            for file in (Path(at, name) for name in names if name.endswith(_SUFFIXES)):
                yield f"{base}/{file.relative_to(folder).as_posix()}", file
