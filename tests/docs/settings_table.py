"""The table of typed keys in docs/configs.md, made from the schema: its keys, types, defaults and docstrings.

python tests/docs/settings_table.py            print it
python tests/docs/settings_table.py --write    put it into the page
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from samewise.runner.config import schema
from samewise.runner.config.catalogue import field_summaries

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configs.md"
BEGIN, END = "<!-- settings: python tests/docs/settings_table.py --write -->\n", "<!-- /settings -->"


def table() -> str:
    """The table in Markdown: a row for each key, with the settings of a group by their path."""
    rows = [f"| `{path}` | {kind} | {default} | {about} |" for path, kind, default, about in _rows(schema.Experiment, "")]
    return "\n".join(["| key | type | default | what it is |", "|---|---|---|---|", *rows, ""])


def _rows(kind: type, under: str) -> list[tuple[str, str, str, str]]:
    about = field_summaries(kind)
    rows: list[tuple[str, str, str, str]] = []
    nested: list[tuple[str, str, str, str]] = []
    for field in fields(kind):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if is_dataclass(default):
            nested += _rows(type(default), f"{under}{field.name}.")
        elif field.name in about:
            rows.append((under + field.name, _type(field), _shown(default), about[field.name].replace("|", "\\|")))
    return rows + nested


def _type(field: Field[Any]) -> str:
    name = str(field.type)
    named = getattr(schema, name, None)
    if isinstance(named, type) and issubclass(named, Enum):
        return " / ".join(str(one.value) for one in named)
    if field.name == "monitor":
        return "str or list[str]"
    mappings = {"dict[str, Mode]": "names to min or max", "dict[str, Any]": "by name", "dict[str, str]": "names to text"}
    return ({"Any": "component"} | mappings).get(name, name).replace(" | None", " or null")


def _shown(value: Any) -> str:
    if value == "???":
        return "by group"
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool):  # as YAML writes them
        return f"`{'null' if value is None else str(value).lower()}`"
    return f"`{value}`"


def written(page: str) -> str:
    """The page's text with the table in its place."""
    head, _, rest = page.partition(BEGIN)
    return head + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(table())
