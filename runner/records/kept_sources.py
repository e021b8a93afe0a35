"""The text of the user's code, kept once for all runs and sweeps of a run root.

`RUN_ROOT/.code/abcdef...` has that SHA-256, by which their `sources.json` names it.
Imports neither torch nor mlflow, nor that code.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from pathlib import Path

from samewise.runner.records import locks, shapes, sources
from samewise.runner.records.files import (
    read_json,
    read_text,
    require_no_link,
    write_atomically,
    write_json,
)

HOME = ".code"
LARGEST = 1 << 20
"""Bytes of the largest file that is kept."""
NOT_KEPT = "its source was not kept"

_NAME = re.compile(r"[0-9a-f]{64}")


def write_record(record: Path, config: str, files: sources.Files) -> None:
    """Write the `sources.json` of a run or sweep, and keep the text of its files.

    Files that are larger than `LARGEST` or not text are recorded by their digests alone.

    Args:
        record: The file to write.
        config: What the code belongs to, as in `sources.config_in`.
        files: The code, as it was found.
    """
    home = _home(record.resolve().parents[2])
    home.mkdir(exist_ok=True)
    with locks.hold(home / ".lock", wait=True, sign=False):
        texts = dict[str, str]()
        for label, digests in files.items():
            text = _present_text(label)
            if text is None or sources.files_present({label: digests}) != {
                label: digests
            }:  # edited since
                continue
            texts[label] = digest = _sha256(text)
            if not (kept := home / digest).exists():
                write_atomically(kept, text)
        write_json(record, {"config": config, "files": files, "texts": texts})


def texts_of(record: Path) -> dict[str, str | None]:
    """The text of each recorded file; None if it was not kept. ConfigError if that is damaged."""
    content, home = read_json(record, shapes.SOURCES) or {}, _home(record.resolve().parents[2])
    texts = dict[str, str | None].fromkeys(content.get("files", {}))
    for label, digest in content.get("texts", {}).items():
        text = read_text(home / digest)
        texts[label] = text if text is not None and _sha256(text) == digest else None
    return texts


def line_differences(before: Path, now: Path | None = None) -> dict[str, str]:
    """The files in which the code of two runs differs, each with a unified diff, or `NOT_KEPT`.

    Args:
        before: The record of one.
        now: That of the other; None: the files as they are now.
    """
    one = sources.files_in(before)
    two = sources.files_in(now) if now else sources.files_present(one)
    texts = texts_of(before)
    others = texts_of(now) if now else {label: _present_text(label) for label in two}
    labels = [label for label in {**one, **two} if one.get(label) != two.get(label)]
    return {label: _unified(label, texts.get(label, ""), others.get(label, "")) for label in labels}


def remove_unnamed(run_root: Path) -> None:
    """Remove what no run or sweep of a run root names any longer."""
    if not (home := _home(run_root)).is_dir():
        return
    with locks.hold(home / ".lock", wait=True, sign=False):
        paths = run_root.glob("*/*/sources.json")
        named = set(_NAME.findall("\n".join(path.read_text("utf-8", "replace") for path in paths)))
        for path in home.iterdir():
            if path.name not in named and _NAME.fullmatch(path.name):
                path.unlink()


def _home(run_root: Path) -> Path:
    require_no_link(home := run_root / HOME)
    return home


def _present_text(label: str) -> str | None:
    """The text of a file as it is now; None if it is missing, too large or not text."""
    try:
        with open(str(sources.place(label)), "rb") as handle:
            raw = handle.read(LARGEST + 1)
        return raw.decode() if len(raw) <= LARGEST else None
    except (OSError, UnicodeDecodeError):
        return None


def _unified(label: str, one: str | None, two: str | None) -> str:
    if one is None or two is None:
        return NOT_KEPT
    names = f"a/{label}", f"b/{label}"
    return "\n".join(difflib.unified_diff(one.splitlines(), two.splitlines(), *names, lineterm=""))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
