"""Reads and writes .safetensors files: tensors by name, without code."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from samewise.runner.errors import first_line
from samewise.runner.processes.memory import free_memory
from samewise.runner.records.files import write_atomically


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file, on the CPU.

    Raises:
        ValueError: It is not such a file, is cut short, or does not fit into memory.
        OSError: It cannot be read.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file")
    if (size := path.stat().st_size) > (free := free_memory()):
        raise ValueError(
            f"its tensors take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory is free"
        )
    try:
        tensors = load(path.read_bytes())
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"it is cut short, damaged or of another format: {first_line(error)}"
        ) from None
    return {name: tensors[name] for name in sorted(tensors)}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> None:
    """Write tensors in row-major order; the same tensors give the same bytes.

    Args:
        path: The file.
        tensors: Tensors by name.
        about: Entries of the header's `__metadata__`.
    """
    # Copies, since the format does not take tensors that share memory
    content = save(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    )
    if about:
        # By hand, since the library writes entries of the metadata in another order each time
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.dumps(
            {"__metadata__": dict(about), **json.loads(content[8:start])}, separators=(",", ":")
        ).encode()
        # The format aligns the tensors' bytes to 8, by spaces after the header
        header += b" " * (-len(header) % 8)
        content = len(header).to_bytes(8, "little") + header + content[start:]
    write_atomically(path, content)
