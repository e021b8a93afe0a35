"""Checkpoints of Hugging Face and timm: folders with safetensors, or names in Hugging Face's cache.

Downloads nothing; does not import torch.

The cache is as huggingface.co/docs/huggingface_hub ("Manage the cache") has it:
`models--OWNER--NAME/` with `refs/REVISION`, which holds a commit, and `snapshots/COMMIT/`, whose
files lead to `blobs/`; the blob of a large file is called by its SHA-256.
"""

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
_NAMED = re.compile(
    r"hf:(?P<name>[\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@(?P<revision>[\w-][\w.-]*))?", re.ASCII
)
_COMMIT = re.compile("[0-9a-f]{40}")
# No path, which could lead out of the folder
_FILE = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)


def settle_commit(weights: str) -> str:
    """Pin `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION` to the commit in the cache.

    Returns:
        `hf:OWNER/NAME@COMMIT`.

    Raises:
        ConfigError: The model is not in the cache.
    """
    return f"{weights.partition('@')[0]}@{snapshot(weights).name}"


def snapshot(weights: str) -> Path:
    """Return the checkpoint's folder in the cache.

    Raises:
        ConfigError: It is not there, or `weights` is not the name of a Hugging Face model.
    """
    match = _NAMED.fullmatch(weights)
    if match is None:
        raise ConfigError(
            Problem(
                PATH,
                "is not the name of a Hugging Face model",
                weights,
                "hf:OWNER/NAME, or hf:OWNER/NAME@REVISION",
            )
        )
    name, revision = match["name"], match["revision"] or "main"
    folder = cache() / ("models--" + name.replace("/", "--"))
    download = f"on a machine with network access: hf download {name}" + (
        f" --revision {revision}" if match["revision"] else ""
    )
    if not folder.is_dir():
        models = [
            f"hf:{path.name.removeprefix('models--').replace('--', '/')}"
            for path in folder.parent.glob("models--*")
        ]
        hints = did_you_mean(weights, models), f"{download}; HF_HOME says where the cache is"
        raise ConfigError(
            Problem(
                PATH,
                "is not in Hugging Face's cache, and samewise downloads nothing from there",
                weights,
                f"{folder}",
                "; ".join(filter(None, hints)),
            )
        )
    commit = (
        revision
        if _COMMIT.fullmatch(revision)
        else (read_text(folder / "refs" / revision) or "").strip()
    )
    checkpoint = folder / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not checkpoint.is_dir():
        revisions = sorted(
            path.name
            for name in ("refs", "snapshots")
            if (folder / name).is_dir()
            for path in (folder / name).iterdir()
        )
        raise ConfigError(
            Problem(
                PATH,
                f"Hugging Face's cache has no revision '{revision}' of {name}",
                weights,
                " or ".join(revisions),
                download,
            )
        )
    return checkpoint


def cache() -> Path:
    """Return the folder of Hugging Face's downloads."""
    # In the order of huggingface_hub; the second is the older name
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = (
        os.environ.get("HF_HOME")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    )
    return Path(home).expanduser() / "hub"


def files_at(path: Path) -> list[Path]:
    """List the weight files at a path.

    A file is itself the list. A folder holds a samewise checkpoint or safetensors: one file, or
    those that its index names, in order.

    Raises:
        ConfigError: A folder has no weights, or a file of its index is missing.
    """
    if not path.is_dir():
        return [path]
    if (path / STATE).is_file() or (path / "manifest.json").is_file():
        return [path / STATE]
    if (path / MODEL).is_file():
        return [path / MODEL]
    index = read_json(path / INDEX, {"weight_map": {str: _FILE}})
    if index is None:
        # `samewise export` writes weights under the second name
        weights = [path / name for name in ("pytorch_model.bin", "weights.safetensors")]
        raise ConfigError(
            Problem(
                PATH,
                "the folder contains no weights",
                str(path),
                f"{MODEL}, {INDEX}, or a checkpoint of samewise",
                next((f"name the file itself: {file}" for file in weights if file.is_file()), ""),
            )
        )
    files = [path / name for name in sorted(set(index["weight_map"].values()))]
    missing = [file.name for file in files if not file.is_file()]
    ConfigError.raise_if(
        missing or not files,
        PATH,
        f"{INDEX} lists files that do not exist, or none",
        str(path),
        ", ".join(missing) or "at least one",
    )
    return files


def digest_of(files: Sequence[Path]) -> str:
    """Return the SHA-256 of a file.

    Of several, the SHA-256 of the lines that sha256sum prints for them.

    Raises:
        ConfigError: A file in the cache does not have the SHA-256 that its name states.
    """
    digests = [sha256(file) for file in files]
    for file, digest in zip(files, digests, strict=True):
        blob = file.resolve().name
        # Only the blobs of large files are called by their SHA-256
        ConfigError.raise_if(
            SHA256.fullmatch(blob) and blob != digest,
            PATH,
            f"the file in Hugging Face's cache does not match its checksum: {file}",
            digest,
            blob,
            "remove the file, and download it again",
        )
    lines = "".join(f"{digest}  {file.name}\n" for file, digest in zip(files, digests, strict=True))
    return digests[0] if len(digests) == 1 else hashlib.sha256(lines.encode()).hexdigest()
