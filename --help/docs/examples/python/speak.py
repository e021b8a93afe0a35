"""Speaks with an exported WaveRNN: its conditioning once for the spectrogram, its step once for each sample; by onnxruntime or torch, without samewise.

python speak.py FOLDER        with conditioning/ and step/ in it; model.onnx by onnxruntime, where it is there, else model.pt2 by torch

The spectrogram and the random numbers are the export's own, so what it speaks can be compared with what the model spoke by them. Exit code: 0 within the
export's tolerance, 1 not, 2 it cannot be run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from vectors import Arrays, read_vectors


def opened(folder: Path, inputs: list[str], outputs: list[str]) -> Callable[[Arrays], Arrays]:
    """The model in a folder as a function of arrays by name."""
    if (folder / "model.onnx").exists():
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        return lambda given: dict(zip(outputs, session.run(outputs, given), strict=True))
    import torch

    program = torch.export.load(str(folder / "model.pt2")).module()

    def call(given: Arrays) -> Arrays:
        with torch.no_grad():
            made = program(*(torch.tensor(given[name]) for name in inputs))
        return {name: one.numpy() for name, one in zip(outputs, made, strict=True)}

    return call


def speak(folder: Path) -> int:
    """Speak, and say how far that is from what the model spoke; the exit code."""
    given, about = read_vectors(folder / "conditioning" / "vectors.safetensors")
    tensors, known_as = read_vectors(folder / "step" / "vectors.safetensors")
    conditioning = opened(folder / "conditioning", ["mel"], about["outputs"].split("\n"))
    step = opened(folder / "step", known_as["inputs"].split("\n"), known_as["outputs"].split("\n"))

    known = conditioning({"mel": given["input/mel"]})
    times, batch = known["entry"].shape[:2]
    sample = np.zeros(batch, np.float32)
    state1, state2 = (
        np.zeros((batch, tensors[f"input/{name}"].shape[1]), np.float32)
        for name in ("state1", "state2")
    )
    spoken = np.zeros((batch, times), np.float32)  # as the model reads samples
    for time in range(times):
        now = {name: one[time] for name, one in known.items()}
        after = step(
            {
                "sample": sample,
                "state1": state1,
                "state2": state2,
                **now,
                "uniform": tensors["check/uniform"][time],
            }
        )
        sample, state1, state2 = after["next"], after["after1"], after["after2"]
        spoken[:, time] = sample

    expected = tensors["check/spoken"]
    error = np.abs(spoken.astype(np.float64) - expected).max() / np.abs(expected).max()
    print(f"spoke {batch} x {times} samples")
    print(
        "spoken the same bits"
        if spoken.tobytes() == expected.tobytes()
        else f"spoken differs by {error:.1e} of its largest number"
    )
    return 0 if error <= float(known_as["tolerance"]) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python speak.py FOLDER")
    try:
        sys.exit(speak(Path(sys.argv[1])))
    except (OSError, KeyError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
