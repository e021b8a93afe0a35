"""Reads the documents: their fenced blocks, commands, files and links.

In a `console` or `bash` block a line that begins with `$ ` is a command, the lines below it are what it prints, `...` stands for lines left out, and
`# exit code: N` at a command's end says that it fails. A comment `<!-- not run: REASON -->` before a block keeps it from being run. A line that
is only a bold file name before a block says what the file holds that a user makes; after `<!-- in the project of PAGE -->` the user also has the files of
that page. The page of an example has its files beside it.
"""

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "examples").glob("*/README.md"))}
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "decisions").glob("*.md")),
        ROOT / "examples" / "README.md",
        *EXAMPLES.values(),
    )
    if path.name != "CHANGELOG.md"
}

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
_REASON = re.compile(r"<!-- not run: ((?:(?!-->).)*) -->\n*\Z", re.S)
_FILE = re.compile(r"^\*\*`([^`]+)`\*\*\n\n\Z", re.M)
_EXIT_CODE = re.compile(r"#\s*exit code: (\d+)\s*$")


@dataclass
class Command:
    """A command in a page, and the lines that the page shows as its output."""

    text: str
    shown: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        found = _EXIT_CODE.search(self.text)
        return int(found[1]) if found else 0


@dataclass
class Block:
    """A fenced block: its language and text, the reason why it is not run, and the name of the file that it shows."""

    language: str
    text: str
    reason: str | None
    file: str | None

    @property
    def commands(self) -> list[Command]:
        found: list[Command] = []
        if self.language in ("console", "bash"):
            for line in self.text.splitlines():
                if line.startswith("$ "):
                    found.append(Command(line[2:]))
                elif found:
                    found[-1].shown.append(line)
        return found


def blocks(text: str) -> list[Block]:
    """The page's fenced blocks, in order."""
    found: list[Block] = []
    for fence in _FENCE.finditer(text):
        before = text[: fence.start()]
        reason, file = _REASON.search(before), _FILE.search(before)
        found.append(Block(fence[1], fence[2], reason[1] if reason else None, file[1] if file else None))
    return found


def links(text: str) -> list[str]:
    """Relative targets of links and pictures, outside of fenced blocks."""
    found = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text))
    return [target for target in found if "://" not in target]


def make_files(text: str, folder: Path) -> list[str]:
    """Write the files that the page tells its reader to create; return their names."""
    made = [block for block in blocks(text) if block.file]
    for block in made:
        assert block.file is not None
        path = folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    return [block.file or "" for block in made]


def make_folder(page: str, folder: Path) -> None:
    """Put into `folder` what the page's reader has there: a copy of the example, or the files that the page tells its reader to create."""
    if page in EXAMPLES:
        kept = shutil.ignore_patterns("__pycache__", "runs")
        shutil.copytree(EXAMPLES[page].parent, folder, dirs_exist_ok=True, ignore=kept)
    else:
        text = PAGES[page].read_text()
        for earlier in re.findall(r"^<!-- in the project of (\S+) -->$", text, re.M):
            make_folder(earlier, folder)
        make_files(text, folder)


def alike(line: str) -> str:
    """A line of output without the parts that differ between machines: numbers, digests, and which evaluation was the best."""
    line = re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b", "#", line.replace("(best)", ""))
    return " ".join(re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", line).split())


def first_not_printed(shown: list[str], printed: str) -> str | None:
    """The first line of `shown` that is missing from `printed`, in the order shown; None if all are present."""
    lines = iter(alike(line) for line in printed.splitlines())
    return next((line for line in shown if line.strip() and line.strip() != "..." and alike(line) not in lines), None)
