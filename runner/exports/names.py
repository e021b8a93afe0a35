"""Name an export's formats and files. Does not import torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from samewise.runner.errors import ConfigError, nearest

KINDS = ("safetensors", "pt2", "aoti", "onnx", "executorch", "executorch_portable")


def require_sound(names: Iterable[str], tolerance: float) -> list[str]:
    """Return the formats to write besides the weights, each once.

    Raises:
        ConfigError: A name is not one of `KINDS`, or the tolerance is not a share.
    """
    ConfigError.raise_if(
        not 0 <= tolerance < 1,
        "--tolerance",
        "is not a valid share",
        tolerance,
        "at least 0 and less than 1",
    )
    requested = [name.strip() for name in names if name.strip()]
    for name in requested:
        ConfigError.raise_if(
            name not in KINDS,
            "--to",
            "is not a format that models are exported to",
            name,
            ", ".join(KINDS),
            "TorchScript is deprecated: pt2 is for Python and C++, onnx for other runtimes"
            if "script" in name
            else nearest(name, KINDS),
        )
    # The weights are always written
    return [name for name in dict.fromkeys(requested) if name != "safetensors"]


DESCRIPTION: Final = "export.json"
WEIGHTS: Final = "weights.safetensors"
UNFINISHED: Final = f"an export that did not end, without {DESCRIPTION}"


def is_unfinished(folder: Path) -> bool:
    """Whether a folder has an export's first file, and not its last."""
    return (folder / WEIGHTS).is_file() and not (folder / DESCRIPTION).exists()
