"""Recognises an export that was killed before its end. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DESCRIPTION: Final = "export.json"
WEIGHTS: Final = "weights.safetensors"
UNFINISHED: Final = f"an export that did not end, without {DESCRIPTION}"


def is_unfinished(folder: Path) -> bool:
    """Whether a folder has an export's first file, and not its last."""
    return (folder / WEIGHTS).is_file() and not (folder / DESCRIPTION).exists()
