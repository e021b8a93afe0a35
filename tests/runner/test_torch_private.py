"""What samewise needs of torch's private parts is in one list, and is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from samewise.runner import torch_private

ROOT = Path(__file__).resolve().parents[2]


def missing(names: list[str]) -> Iterator[str]:
    for name in names:
        try:
            getattr(torch_private, name)
        except ImportError as error:
            yield str(error)


def test_torch_has_every_part() -> None:
    assert list(missing(list(torch_private.NEEDED))) == []


def private_names(code: str) -> Iterator[str]:
    """The names below torch with a part that begins with `_`: what is imported, and what is reached by dots."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        yield from (name for name in names if re.fullmatch(r"(torch|nn|dist)(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*", name))


def test_nothing_else_reaches_for_them() -> None:
    files = [file for folder in ("runner", "recipes", "datasets") for file in (ROOT / folder).rglob("*.py")]
    found = {f"{file.relative_to(ROOT)}: {name}" for file in files for name in private_names(file.read_text())}
    assert found == {"runner/torchaudio_import.py: torch.ops._torchaudio"}  # torchaudio's
