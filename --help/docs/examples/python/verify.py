"""Runs model.onnx of an export on its test vectors by onnxruntime, without samewise or torch, and prints what it predicts and how far that is off.

python verify.py FOLDER        exit code: 0 within the export's tolerance, 1 not, 2 it cannot be run
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime
from vectors import read_vectors


def verify(folder: Path) -> int:
    """Run the model on the export's own inputs, and compare; the exit code."""
    tensors, about = read_vectors(folder / "vectors.safetensors")
    classes = about["classes"].split("\n")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # one order of sums
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    taken = {one.name for one in session.get_inputs()}
    given = {
        name.replace(".", "_"): tensors[f"input/{name}"] for name in about["inputs"].split("\n")
    }  # ONNX has no dots in names
    results = session.run(None, {name: array for name, array in given.items() if name in taken})

    is_sound = True
    for name, found in zip(about["outputs"].split("\n"), results, strict=True):
        expected = tensors[f"output/{name}"]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise ValueError(f"{name} has another shape or dtype")
        if found.ndim == 2 and found.shape[1] == len(classes):
            for row, scores in enumerate(found):
                print(f"sample {row}: {classes[scores.argmax()]}")
        if found.tobytes() == expected.tobytes():
            print(f"{name} the same bits")
            continue
        error = np.abs(found.astype(np.float64) - expected).max() / (np.abs(expected).max() or 1)
        is_sound = is_sound and bool(error <= float(about["tolerance"]))  # nan is not
        print(f"{name} differs by {error:.2g} of its largest number")
    return 0 if is_sound else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python verify.py FOLDER")
    try:
        sys.exit(verify(Path(sys.argv[1])))
    except Exception as error:  # onnxruntime's own errors have no base of their own
        print(error, file=sys.stderr)
        sys.exit(2)
