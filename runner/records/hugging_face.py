"""Checkpoints of Hugging Face and timm: a folder with safetensors, or a name in Hugging Face's
cache. Downloads nothing; does not import torch.

The cache is as huggingface.co/docs/huggingface_hub ("Manage the cache") has it:
`models--OWNER--NAME/` with `refs/REVISION`, which holds a commit, and `snapshots/COMMIT/`, whose
files lead to `blobs/`; that of a large file is called by its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from samewise.runner.errors import ConfigError, Problem, did_you_mean
from samewise.runner.records.files import read_json, read_text, sha256
from samewise.runner.records.shapes import SHA256

PATH: Final = "initialise.weights"
PREFIX: Final = "hf:"
STATE: Final = "state.pt"
MODEL: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLE: Final = "pytorch_model.bin"
_NAMED = re.compile(
    r"hf:(?P<name>[\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@(?P<revision>[\w-][\w.-]*))?", re.ASCII
)
_COMMIT = re.compile("[0-9a-f]{40}")
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)


def settle_commit(weights: str) -> str:
    """Pin `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION` to the commit in the cache:
    `hf:OWNER/NAME@COMMIT`; a ConfigError if it is not cached.
    """
    return f"{weights.partition('@')[0]}@{snapshot(weights).name}"


def snapshot(weights: str) -> Path:
    """The checkpoint's folder in the cache.

    ConfigError if it is not there, or `weights` is not such a name.
    """
    given = _NAMED.fullmatch(weights)
    if given is None:
        raise ConfigError(
            Problem(
                PATH,
                "is not the name of a Hugging Face model",
                weights,
                "hf:OWNER/NAME, or hf:OWNER/NAME@REVISION",
            )
        )
    name, revision = given["name"], given["revision"] or "main"
    folder = cache() / ("models--" + name.replace("/", "--"))
    download = f"on a machine with network access: hf download {name}" + (
        f" --revision {revision}" if given["revision"] else ""
    )
    if not folder.is_dir():
        held = [
            f"hf:{one.name.removeprefix('models--').replace('--', '/')}"
            for one in folder.parent.glob("models--*")
        ]
        hint = "; ".join(
            filter(
                None, (did_you_mean(weights, held), f"{download}; HF_HOME says where the cache is")
            )
        )
        raise ConfigError(
            Problem(
                PATH,
                "is not in Hugging Face's cache, and samewise downloads nothing from there",
                weights,
                f"{folder}",
                hint,
            )
        )
    commit = (
        revision
        if _COMMIT.fullmatch(revision)
        else (read_text(folder / "refs" / revision) or "").strip()
    )
    found = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not found.is_dir():
        held = sorted(
            one.name
            for place in ("refs", "snapshots")
            if (folder / place).is_dir()
            for one in (folder / place).iterdir()
        )
        raise ConfigError(
            Problem(
                PATH,
                f"Hugging Face's cache has no revision '{revision}' of {name}",
                weights,
                " or ".join(held),
                download,
            )
        )
    return found


def cache() -> Path:
    """The folder of Hugging Face's downloads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(variable):
            return Path(given).expanduser()
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    return Path(home).expanduser() / "hub"


def files_at(path: Path) -> list[Path]:
    """The weight files at a path: the file itself.

    In a folder, a samewise checkpoint or safetensors, one file or those of an index, in order.

    ConfigError if a folder has none, or one is missing.
    """
    if not path.is_dir():
        return [path]
    if (path / STATE).is_file() or (path / "manifest.json").is_file():
        return [path / STATE]
    return _safetensors(path)


def _safetensors(folder: Path) -> list[Path]:
    if (folder / MODEL).is_file():
        return [folder / MODEL]
    index = read_json(folder / INDEX, {"weight_map": {str: _FILE}})
    if index is None:
        hint = (
            f"name the pickle itself to read its tensors, and nothing else: {folder / PICKLE}"
            if (folder / PICKLE).is_file()
            else ""
        )
        # Of `samewise export`
        hint = (
            f"name the file: {own}" if (own := folder / "weights.safetensors").is_file() else hint
        )
        raise ConfigError(
            Problem(
                PATH,
                "the folder contains no weights",
                str(folder),
                f"{MODEL}, {INDEX}, or a checkpoint of samewise",
                hint,
            )
        )
    files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ConfigError(
            Problem(
                PATH,
                f"{INDEX} lists files that do not exist, or none",
                str(folder),
                ", ".join(missing) or "at least one",
            )
        )
    return files


def digest_of(files: Sequence[Path]) -> str:
    """The SHA-256 of a file; of several, that of the lines `SHA256  NAME` as sha256sum prints them.

    ConfigError if a file in the cache is not the one that its name says.
    """
    digests = [sha256(file) for file in files]
    for file, digest in zip(files, digests, strict=True):
        blob = file.resolve().name
        if SHA256.fullmatch(blob) and blob != digest:
            words = f"the file in Hugging Face's cache does not match its checksum: {file}"
            raise ConfigError(
                Problem(PATH, words, digest, blob, "remove the file, and download it again")
            )
    lines = "".join(f"{digest}  {file.name}\n" for file, digest in zip(files, digests, strict=True))
    return digests[0] if len(digests) == 1 else hashlib.sha256(lines.encode()).hexdigest()
