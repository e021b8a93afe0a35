"""docs/coming_from.md: the words of other tools, and what to write here, from docs/coming_from.yaml.

python tests/docs/coming_from.py --write    write the page
"""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE, SOURCE = ROOT / "docs" / "coming_from.md", ROOT / "docs" / "coming_from.yaml"

HEAD = """# Coming from another tool

The words of other tools, and what to write here. Each row of "works" names the test that shows it.
`python tests/docs/coming_from.py --write` makes this page from `docs/coming_from.yaml`.
[A Lightning project, line by line](coming_from_lightning.md) shows a whole port.

"""

KINDS = {"own": "With a few lines of your own", "refused": "Refused by design", "absent": "Not there"}


def tables() -> list[dict[str, Any]]:
    return yaml.safe_load(SOURCE.read_text(encoding="utf-8"))


def test_file(name: str) -> str:
    """The file, below tests/, that defines a test."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    files = [path for path, text in texts.items() if re.search(rf"\bdef test_{name}\(", text)]
    if not files:
        raise SystemExit(f"{SOURCE.name}: no test is named {name}")
    return str(files[0].relative_to(ROOT / "tests"))


def words(row: list[str]) -> int:
    """How many options of the other tool a row has; `-j, --workers` is one."""
    parts = row[0].split(", ")
    return sum(part.startswith("--") for part in parts) or len(parts)


def cells(*values: str) -> str:
    return f"| {' | '.join(value.replace('|', chr(92) + '|') for value in values)} |\n"


def link(page: str, text: str) -> str:
    return f"[{text}]({page})"


def name_of(page: str) -> str:
    return page.partition(".md")[0].replace("_", " ")


def page() -> str:
    text = HEAD
    for table in tables():
        counts = {kind: sum(map(words, table[kind])) for kind in ("works", *KINDS)}
        text += f"## {table['title']}\n\nFrom {table['source']}: {counts['works']} of "
        text += f"{sum(counts.values())} work, {counts['own']} need a few lines of your own. "
        text += f"The settings are tried with `{' '.join(table['experiment'])}`.\n\n"
        text += cells("word", "here", "more", "shown by") + cells(*["---"] * 4)
        for word, ours, target, test in table["works"]:
            text += cells(f"`{word}`", ours, link(target, name_of(target)), f"`{test_file(test)}`")
        for kind, title in KINDS.items():
            if not table[kind]:
                continue
            text += f"\n{title}:\n\n" + cells("word", "instead") + cells("---", "---")
            for word, ours, *target in table[kind]:
                text += cells(f"`{word}`", ours + (f": {link(target[0], name_of(target[0]))}" if target else ""))
        text += "\n"
    return text.rstrip("\n") + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())
