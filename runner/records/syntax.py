"""Reads a Python file as parts, without comments, docstrings and formatting.

Each part has a digest of its code, the names it uses, and its imports. The file is not imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_UNSAID = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields of a syntax tree that repeat what the others say."""
_HIDING = frozenset(
    {
        "import_module",
        "iter_modules",
        "walk_packages",
        "spec_from_file_location",
        "run_path",
        "run_module",
        "entry_points",
    }
)
_HIDING_BUILTINS = frozenset({"__import__", "exec", "eval"})
_COMPUTING = frozenset(
    {
        "globals",
        "f_globals",
        "__globals__",
        "__subclasses__",
        "__init_subclass__",
        "metaclass",
        "resolve_name",
        "locate",
    }
)
"""Names by which code finds functions and classes that no text names; `sys.modules` is another."""
_NAME = re.compile(r"[^\W\d][\w.:]*")
"""A string that may name something, such as `lab.models:Net`."""


@dataclass(frozen=True)
class Import:
    """One imported name: `from base import name as alias`, or `import base as alias`.

    `dots` is the level of a relative import.
    """

    dots: int
    base: str
    name: str = ""
    alias: str = ""


@dataclass
class Definition:
    """A function, a class or a plain assignment at the top level of a file.

    The definition with the empty name has all other statements.

    Args:
        digests: Its digest, and those of the functions and classes in a class, by qualified name.
        is_run: Whether importing the file runs it, other than to define it: a decorator may
            register it.
        names: Plain names in it: of the file's other definitions and imports, and of variables.
        attributes: Names of attributes in it, and names in strings.
        values: Dotted names that it uses for more than an attribute.
        imports: Its imports.
        computes: Whether it may find functions or classes by names that its text does not have.
        hides: Whether it may import modules that its text does not name.
    """

    digests: dict[str, str] = field(default_factory=dict[str, str])
    is_run: bool = False
    names: set[str] = field(default_factory=set[str])
    attributes: set[str] = field(default_factory=set[str])
    values: set[str] = field(default_factory=set[str])
    imports: list[Import] = field(default_factory=list[Import])
    computes: bool = False
    hides: bool = False


Syntax = Mapping[str, Definition]
"""Parts of a file by name."""


def read(file: str) -> Syntax:
    """Read a file's syntax.

    Raises:
        OSError: It cannot be read.
        SyntaxError, ValueError: It is not Python.
    """
    return _read(file, *_state(file))


def raw_digest(file: str) -> str:
    """Return the SHA-256 of a file's bytes."""
    return _raw_digest(file, *_state(file))


def _state(file: str) -> tuple[int, int, int]:
    facts = os.stat(file)
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


# The file's state is part of the key, so that an edited file is read again; all points of a sweep
# share the result
@functools.lru_cache(4096)
def _read(file: str, *state: int) -> Syntax:
    with open(file, "rb") as handle:
        tree = ast.parse(handle.read())
    parts, contents = dict[str, Definition](), dict[str, dict[str, list[str]]]()
    for node in tree.body:
        if (
            isinstance(node, ast.If)
            and _callee_name(node.test) == "TYPE_CHECKING"
            and not node.orelse
        ):
            continue
        name = _bound_name(node)
        part = parts.setdefault(name, Definition())
        part.is_run |= (
            not name
            or bool(getattr(node, "decorator_list", ()))
            # Python itself calls a module's `__getattr__`, which no text names
            or (isinstance(node, _DEFINITIONS) and name.startswith("__"))
        )
        _collect(node, name, contents.setdefault(name, {}), _Writer(part))
    for name, texts in contents.items():
        parts[name].digests = {
            # String literals may contain lone surrogates
            inner: hashlib.sha256("\n".join(x).encode("utf-8", "surrogatepass")).hexdigest()[:16]
            for inner, x in texts.items()
        }
    return parts


@functools.lru_cache(4096)
def _raw_digest(file: str, *state: int) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _bound_name(node: ast.stmt) -> str:
    """Return the name that a statement binds, or "" if it does anything else."""
    if isinstance(node, _DEFINITIONS):
        return node.name
    target = (
        node.targets[0]
        if isinstance(node, ast.Assign) and len(node.targets) == 1
        else node.target
        if isinstance(node, ast.AnnAssign)
        else None
    )
    calls = any(isinstance(inner, ast.Call | ast.NamedExpr) for inner in ast.walk(node))
    return target.id if isinstance(target, ast.Name) and not calls else ""


def _collect(node: ast.stmt, name: str, contents: dict[str, list[str]], writer: _Writer) -> None:
    """Store a statement's content under its name.

    The functions and classes in a class have entries of their own, and leave placeholders in it.
    """
    if not isinstance(node, ast.ClassDef):
        if text := writer.write(node):
            contents.setdefault(name, []).append(text)
        return
    own = contents.setdefault(name, [])
    own.append(
        writer.write(
            # Python 3.11 has no type parameters
            [node.bases, node.keywords, node.decorator_list, getattr(node, "type_params", [])]
        )
    )
    for inner in node.body:
        own += [f"def {inner.name}"] if isinstance(inner, _DEFINITIONS) else []
        inner_name = f"{name}.{inner.name}" if isinstance(inner, _DEFINITIONS) else name
        _collect(inner, inner_name, contents, writer)


class _Writer:
    """Writes syntax trees as text, the same in every Python version; notes names and imports."""

    def __init__(self, part: Definition) -> None:
        self._part = part
        self._for_types = False

    def write(self, node: Any, *, is_base: bool = False) -> str:
        """Return the text of a node, a list of nodes or a plain value.

        Empty for code without effect. `is_base`: whether the text takes an attribute of it.
        """
        kind = type(node)
        # Names, attributes and constants come first, since they are most of a tree
        if kind is ast.Name or kind is ast.Attribute:
            if not self._for_types:
                self._note_name(node, is_base=is_base)
            return (
                f"Name(id={node.id!r})"
                if kind is ast.Name
                else f"Attribute(value={self.write(node.value, is_base=True)},attr={node.attr!r})"
            )
        if kind is ast.Constant:
            if not self._for_types and isinstance(node.value, str) and _NAME.fullmatch(node.value):
                self._part.attributes.update(re.split("[.:]", node.value))
            return f"Constant({node.value!r})"
        if kind is list:
            return f"[{','.join([text for x in node if (text := self.write(x))])}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Pass) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            # Such an expression may be a docstring
            return ""
        if not self._for_types:
            self._note(node)
        is_for_types, self._for_types = (
            self._for_types,
            self._for_types
            or (isinstance(node, ast.If) and _callee_name(node.test) == "TYPE_CHECKING"),
        )
        parts = [
            f"{name}={self.write(value)}"
            for name in _fields(kind)
            if (value := getattr(node, name, None)) is not None and value != []
        ]
        self._for_types = is_for_types
        return f"{kind.__name__}({','.join(parts)})"

    def _note_name(self, node: ast.Name | ast.Attribute, *, is_base: bool) -> None:
        name, dotted = node.id if isinstance(node, ast.Name) else node.attr, _dotted(node)
        (self._part.names if isinstance(node, ast.Name) else self._part.attributes).add(name)
        self._part.computes |= name in _COMPUTING or dotted == "sys.modules"
        if not is_base:
            self._part.values.add(dotted.removesuffix(".__dict__"))

    def _note(self, node: ast.AST) -> None:
        part = self._part
        if isinstance(node, ast.Import):
            part.imports += [
                Import(0, alias.name, alias=alias.asname or "") for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            part.imports += [
                Import(node.level, node.module or "", alias.name, alias.asname or "")
                for alias in node.names
            ]
            part.computes |= node.module == "sys" and any(
                alias.name == "modules" for alias in node.names
            )
        elif (
            isinstance(node, ast.Call)
            and _callee_name(node.func) == "import_module"
            and (name := _literal(node))
        ):
            part.imports.append(Import(0, name, alias=name))
            part.values.add(name)
        elif isinstance(node, ast.Call) and (
            _callee_name(node.func) in _HIDING
            or (isinstance(node.func, ast.Name) and node.func.id in _HIDING_BUILTINS)
        ):
            part.hides = part.computes = True
        elif isinstance(node, ast.keyword | ast.FunctionDef):
            part.computes |= (
                node.arg if isinstance(node, ast.keyword) else node.name
            ) in _COMPUTING


@functools.cache
def _fields(kind: type[ast.AST]) -> list[str]:
    return [name for name in kind._fields if name not in _UNSAID]


def _dotted(node: ast.expr) -> str:
    """Return the text of a name with attributes.

    It begins with a dot if it is an attribute of an expression.
    """
    return (
        f"{_dotted(node.value)}.{node.attr}"
        if isinstance(node, ast.Attribute)
        else _callee_name(node)
    )


def _callee_name(node: ast.expr) -> str:
    return (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )


def _literal(call: ast.Call) -> str:
    """Return the only argument of a call, if it is a literal absolute name."""
    argument = call.args[0] if len(call.args) == 1 and not call.keywords else None
    return (
        argument.value
        if isinstance(argument, ast.Constant)
        and isinstance(argument.value, str)
        and not argument.value.startswith(".")
        else ""
    )
