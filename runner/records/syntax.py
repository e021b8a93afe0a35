"""A Python file without comments, docstrings and formatting: a digest for each function and class, and its imports. The file is not imported."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_UNSAID = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields of a syntax tree that say nothing that the others do not."""
_HIDING = frozenset({"import_module", "iter_modules", "walk_packages", "spec_from_file_location", "run_path", "run_module", "entry_points"})
_HIDING_BUILTINS = frozenset({"__import__", "exec", "eval"})


@dataclass
class Syntax:
    """The content of one file.

    Args:
        digests: Of each function and class by its qualified name; of what stands outside all of them, and of their order, under the empty name.
        imports: What it imports: (dots, module, names in it).
        hides: Whether it imports what its text does not name.
    """

    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    imports: list[tuple[int, str, tuple[str, ...]]] = field(default_factory=list[tuple[int, str, tuple[str, ...]]])
    hides: bool = False


def read(file: str) -> Syntax:
    """Read a file's syntax; OSError if it cannot be read, SyntaxError or ValueError if it is not Python."""
    return _read(file, *_state(file))


def raw_digest(file: str) -> str:
    """The SHA-256 of a file's bytes."""
    return _raw_digest(file, *_state(file))


def _state(file: str) -> tuple[int, int, int]:
    facts = os.stat(file)
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


@functools.lru_cache(4096)
def _read(file: str, *state: int) -> Syntax:
    """Cached for all points of a sweep."""
    with open(file, "rb") as handle:
        tree = ast.parse(handle.read())
    writer = _Writer()
    said = dict[str, list[str]]()
    _collect(tree.body, "", "", said, writer)
    writer.syntax.digests = {name: hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16] for name, parts in sorted(said.items())}
    return writer.syntax


@functools.lru_cache(4096)
def _raw_digest(file: str, *state: int) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _collect(body: list[ast.stmt], name: str, head: str, said: dict[str, list[str]], writer: _Writer) -> None:
    """Store a module's or class's content under its name, with placeholders for its functions and classes, which have entries of their own."""
    own = [head]
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{node.name}" if name else node.name
            own.append(f"def {node.name}")
            if isinstance(node, ast.ClassDef):
                _collect(node.body, inner, writer.write([node.bases, node.keywords, node.decorator_list, getattr(node, "type_params", [])]), said, writer)
            else:
                said.setdefault(inner, []).append(writer.write(node))
        elif text := writer.write(node):
            own.append(text)
    said.setdefault(name, []).extend(own)


class _Writer:
    """Writes syntax trees as text, identical in every Python version, and collects their imports."""

    def __init__(self) -> None:
        self.syntax = Syntax()
        self._for_types = False

    def write(self, node: Any) -> str:
        """A node, a list of nodes or a plain value; empty for code without effect."""
        kind = type(node)
        if kind is ast.Name:  # these three are most of a tree
            return f"Name(id={node.id!r})"
        if kind is ast.Attribute:
            return f"Attribute(value={self.write(node.value)},attr={node.attr!r})"
        if kind is ast.Constant:
            return f"Constant({node.value!r})"
        if kind is list:
            return f"[{','.join([text for one in node if (text := self.write(one))])}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return ""  # including docstrings
        if not self._for_types:
            self._note(node)
        is_for_types, self._for_types = self._for_types, self._for_types or (isinstance(node, ast.If) and _callee_name(node.test) == "TYPE_CHECKING")
        parts = [f"{name}={self.write(value)}" for name in _fields(kind) if (value := getattr(node, name, None)) is not None and value != []]
        self._for_types = is_for_types
        return f"{kind.__name__}({','.join(parts)})"

    def _note(self, node: ast.AST) -> None:
        imports = self.syntax.imports
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Call) and _callee_name(node.func) == "import_module" and (name := _literal(node)):
            imports.append((0, name, ()))
        elif isinstance(node, ast.Call) and (_callee_name(node.func) in _HIDING or (isinstance(node.func, ast.Name) and node.func.id in _HIDING_BUILTINS)):
            self.syntax.hides = True


@functools.cache
def _fields(kind: type[ast.AST]) -> list[str]:
    return [name for name in kind._fields if name not in _UNSAID]


def _callee_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _literal(call: ast.Call) -> str:
    """The only argument of a call, if it is a literal absolute name."""
    first = call.args[0] if len(call.args) == 1 and not call.keywords else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) and not first.value.startswith(".") else ""
