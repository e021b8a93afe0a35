"""The text of the user's code, stored once for all runs and sweeps of a run root.

`RUN_ROOT/.code/abcdef...` has that SHA-256, by which their `sources.json` names it.
Imports neither torch nor mlflow, nor the user's code.
"""

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
"""Maximum size in bytes of a file whose text is stored."""
NOT_KEPT = "its source was not kept"

_NAME = re.compile(r"[0-9a-f]{64}")


def write_record(record: Path, config: str, files: sources.Files) -> None:
    """Write the `sources.json` of a run or sweep, and store the text of its files.

    Files that are larger than `LARGEST` or not text are recorded by their digests alone.

    Args:
        record: The file to write.
        config: Name of what the code belongs to, as in `sources.config_in`.
        files: The digests that the run or sweep started with.
    """
    home = _home(record.resolve().parents[2])
    home.mkdir(exist_ok=True)
    # Until the record names its texts, `remove_unnamed` must not run
    with locks.hold(home / ".lock", wait=True, sign=False):
        texts = dict[str, str]()
        for label, digests in files.items():
            text = _present_text(label)
            # A file that was edited since has another text than its digests say
            if text is None or sources.files_present({label: digests}) != {label: digests}:
                continue
            texts[label] = digest = _sha256(text)
            if not (home / digest).exists():
                write_atomically(home / digest, text)
        write_json(record, {"config": config, "files": files, "texts": texts})


def texts_of(record: Path) -> dict[str, str | None]:
    """Return the text of each recorded file; None for a text that was not stored.

    Raises:
        ConfigError: The record is damaged.
    """
    content, home = read_json(record, shapes.SOURCES) or {}, _home(record.resolve().parents[2])
    texts = dict[str, str | None].fromkeys(content.get("files", {}))
    for label, digest in content.get("texts", {}).items():
        text = read_text(home / digest)
        texts[label] = text if text is not None and _sha256(text) == digest else None
    return texts


def line_differences(before: Path, now: Path | None = None) -> dict[str, str]:
    """Return a unified diff, or `NOT_KEPT`, for each file in which the code of two runs differs.

    Args:
        before: The earlier run's record.
        now: The later run's record; None for the files as they are now.
    """
    files = sources.files_in(before)
    new_files = sources.files_in(now) if now else sources.files_present(files)
    texts = texts_of(before)
    new_texts = texts_of(now) if now else {label: _present_text(label) for label in new_files}
    labels = [x for x in {**files, **new_files} if files.get(x) != new_files.get(x)]
    return {x: _unified(x, texts.get(x, ""), new_texts.get(x, "")) for x in labels}


def remove_unnamed(run_root: Path) -> None:
    """Remove the texts that no run or sweep of a run root names any longer."""
    if not (home := _home(run_root)).is_dir():
        return
    with locks.hold(home / ".lock", wait=True, sign=False):
        paths = run_root.glob("*/*/sources.json")
        # By searching the text, so that a damaged record keeps its files too
        names = set(_NAME.findall("\n".join(path.read_text("utf-8", "replace") for path in paths)))
        for path in home.iterdir():
            if path.name not in names and _NAME.fullmatch(path.name):
                path.unlink()


def _home(run_root: Path) -> Path:
    require_no_link(home := run_root / HOME)
    return home


def _present_text(label: str) -> str | None:
    """Return the text of a file as it is now; None if it is missing, too large or not text."""
    try:
        with open(str(sources.place(label)), "rb") as handle:
            raw = handle.read(LARGEST + 1)
        return raw.decode() if len(raw) <= LARGEST else None
    except (OSError, UnicodeDecodeError):
        return None


def _unified(label: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return NOT_KEPT
    names = f"a/{label}", f"b/{label}"
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm=""))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
