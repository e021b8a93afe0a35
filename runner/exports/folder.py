"""Write and run an export's folder.

It holds export.json, which describes it; the weights; the model in each format; and test vectors
with the model's outputs.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from samewise.runner.errors import ConfigError, Problem, first_few, first_line
from samewise.runner.exports import formats
from samewise.runner.exports.call import Call
from samewise.runner.exports.card import card
from samewise.runner.exports.names import DESCRIPTION, UNFINISHED, WEIGHTS, is_unfinished
from samewise.runner.exports.runtimes import Truth, try_runtime
from samewise.runner.processes.memory import free_memory
from samewise.runner.records import trust
from samewise.runner.records.digest import tensor_bytes
from samewise.runner.records.files import open_to_read, read_json, require_downloaded, write_json
from samewise.runner.records.shapes import SHA256
from samewise.runner.records.tensor_file import read_tensors, write_tensors
from samewise.runner.results import Runtime
from samewise.runner.secrets import redact_values

VECTORS: Final = "vectors.safetensors"
CARD: Final = "README.md"
SHAPE: Final = {
    "average?": (str, None),
    "files": {str: SHA256},
    "inputs": dict,
    "outputs": dict,
    "tolerance": float,
    "weights": {str: SHA256},
}


def write(
    folder: Path, call: Call, *, to: Sequence[str], tolerance: float, about: Mapping[str, Any]
) -> list[Runtime]:
    """Write an export, and compare each format with the model.

    export.json comes last and completes the export.

    Args:
        folder: An empty or a new folder.
        call: The model, with an example.
        to: Formats besides the weights.
        tolerance: Largest relative error (`Difference.relative`) that is accepted.
        about: Facts about the run, written to export.json unchanged.

    Returns:
        How each format compares, in order.

    Raises:
        ConfigError: The folder is not empty, a package is missing, an exporter refuses the model,
            or its results are further off than `tolerance`.
    """
    ConfigError.raise_if(
        folder.exists() and (not folder.is_dir() or any(folder.iterdir())),
        "--out",
        "already exists and is not overwritten",
        str(folder),
        "a folder that does not exist, or an empty one",
        f"it is {UNFINISHED}: delete it, or choose another folder" if is_unfinished(folder) else "",
    )
    for name in to:
        formats.require(formats.FORMATS[name])
    # A folder that existed, though empty, is not removed with a refused export
    is_made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _write(folder, call, to, tolerance, about)
    except BaseException:
        # After Ctrl-C too
        discard(folder, is_made=is_made)
        raise


def _write(
    folder: Path, call: Call, to: Sequence[str], tolerance: float, about: Mapping[str, Any]
) -> list[Runtime]:
    """Write an export into an empty folder."""
    weights = {
        name: tensor.detach().cpu() for name, tensor in call.function.model.state_dict().items()
    }
    write_tensors(folder / WEIGHTS, weights)
    vectors = {
        f"{kind}/{name}": tensor
        for kind, tensors in (
            ("input", call.inputs),
            ("output", call.outputs),
            ("check", call.checks),
        )
        for name, tensor in tensors.items()
    }
    # In order, for programs without a JSON parser
    lists = {
        "inputs": call.inputs,
        "outputs": call.outputs,
        "classes": about.get("classes") or (),
    }
    runtimes, truth = list[Runtime](), Truth(call.inputs, call.outputs, weights)
    for name in to:
        form = formats.FORMATS[name]
        formats.write(form, call, folder / form.file)
        runtime = try_runtime(form, folder / form.file, truth, tolerance)
        ConfigError.raise_if(
            runtime.sound is False,
            "--to",
            f"was not exported: {runtime.description}",
            name,
            f"a relative error of at most {tolerance:g}",
            "--tolerance accepts a larger error" if runtime.difference else "",
        )
        runtimes.append(runtime)
    write_tensors(
        folder / VECTORS,
        vectors,
        {name: "\n".join(tensors) for name, tensors in lists.items()}
        | {"tolerance": str(tolerance)},
    )
    files = {name: folder / formats.FORMATS[name].file for name in to}
    sizes = {name: formats.sizes(formats.FORMATS[name], file, call) for name, file in files.items()}
    description = {
        **redact_values(about),
        "module": call.part,
        "whole": call.whole,
        "inputs": {name: _form(tensor) for name, tensor in call.inputs.items()},
        "outputs": {name: _form(tensor) for name, tensor in call.outputs.items()},
        "tolerance": tolerance,
        "formats": {
            runtime.format: {
                "file": (file := files[runtime.format]).name,
                "bytes": file.stat().st_size,
                "memory": formats.FORMATS[runtime.format].memory(file),
                "compared": runtime.description,
                "sizes": sizes[runtime.format],
                "operators": formats.FORMATS[runtime.format].kinds(file),
            }
            for runtime in runtimes
        },
        "weights": {name: _sha256(tensor) for name, tensor in weights.items()},
        "files": {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(folder.iterdir())
        },
    }
    (folder / CARD).write_text(card(description), encoding="utf-8")
    write_json(folder / DESCRIPTION, description)
    trust.sign(folder / DESCRIPTION)
    return runtimes


def discard(folder: Path, *, is_made: bool = True) -> None:
    """Delete an export that was refused or interrupted, so that it can be tried again.

    Args:
        folder: The export's folder, whose files are all its own.
        is_made: Whether the folder was made for the export.
    """
    for part in folder.iterdir():
        part.unlink()
    if is_made:
        folder.rmdir()


def run_test_vectors(folder: Path, *, trusted: bool) -> list[Runtime]:
    """Run an export's test vectors in every installed runtime.

    Args:
        folder: Folder with an export.json.
        trusted: Whether to run an export that another user has made, and files that were altered.

    Raises:
        ConfigError: The export is not this user's or trusted, or a file is missing, damaged or
            unreadable.
    """
    description = read_json(folder / DESCRIPTION, SHAPE)
    trust.require(folder / DESCRIPTION, trust=trusted, uses="runs the models in the folder")
    vectors, weights = (_read(folder / name) for name in (VECTORS, WEIGHTS))
    inputs, outputs = (
        {
            name: vectors[f"{kind}/{name}"]
            for name in description[f"{kind}s"]
            if f"{kind}/{name}" in vectors
        }
        for kind in ("input", "output")
    )
    changed_weights = [
        name
        for name in description["weights"]
        if name not in weights or _sha256(weights[name]) != description["weights"][name]
    ]
    result = (
        f"altered since the export: {first_few(changed_weights, 5)}"
        if changed_weights
        else f"{len(weights)} tensors, as exported"
    )
    runtimes = [Runtime("safetensors", result, same=not changed_weights, sound=not changed_weights)]
    if _describe_change(folder / VECTORS, description["files"]):
        return [
            *runtimes,
            Runtime(
                "vectors",
                f"{VECTORS} was altered since the export: there is nothing to compare the "
                "models with",
            ),
        ]
    truth = Truth(
        inputs,
        outputs,
        # Altered weights say nothing about those in the formats
        {name: tensor for name, tensor in weights.items() if name not in changed_weights},
    )
    for form in (x for x in formats.FORMATS.values() if x.file in description["files"]):
        path = folder / form.file
        if not (altered := _describe_change(path, description["files"])):
            runtimes.append(try_runtime(form, path, truth, description["tolerance"]))
        elif not trusted:
            # The file is not the one that export.json describes
            runtimes.append(Runtime(form.name, f"{altered}, so it is only run with --trust"))
        else:
            runtime = try_runtime(form, path, truth, description["tolerance"])
            runtimes.append(
                replace(
                    runtime,
                    description=f"{altered}; {runtime.description}",
                    same=False,
                    sound=False,
                )
            )
    return runtimes


def _describe_change(path: Path, files: Mapping[str, str]) -> str:
    """Describe how a file differs from what was written; "" if it does not, or is missing.

    Raises:
        ConfigError: The file is larger than the free memory.
    """
    handle = open_to_read(path)
    if handle is None:
        return ""
    with handle:
        ConfigError.raise_if(
            (size := os.fstat(handle.fileno()).st_size) > (free := free_memory()),
            str(path),
            f"was not read: it takes {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory is free",
        )
        is_altered = hashlib.file_digest(handle, "sha256").hexdigest() != files.get(path.name)
    return f"{path.name} was altered since the export" if is_altered else ""


def _form(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def _read(path: Path) -> dict[str, Tensor]:
    try:
        require_downloaded(path)
        return read_tensors(path)
    except (ValueError, OSError) as error:
        raise ConfigError(
            Problem(
                str(path),
                f"cannot be read: {first_line(error)}",
                expected="a .safetensors file, as `samewise export` wrote it",
            )
        ) from None
