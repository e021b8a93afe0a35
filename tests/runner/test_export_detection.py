"""A detector is exported as a whole: images go in, the selected boxes come out, and an export that selects other boxes is reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samewise_runner_exported import TINY, verified


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its export."""
    from samewise.runner.cli import main

    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    root = tmp_path_factory.mktemp("detector")
    assert main(["train", "experiment=retinanet_bccd", *TINY, "max_steps=8", f"run_root={root}"]) == 0
    assert main(["export", str(next(root.glob("retinanet_bccd/*"))), "--to", "pt2,onnx", "--out", str(root / "export")]) == 0
    return next(root.glob("retinanet_bccd/*")), root / "export"


@pytest.mark.slow
def test_an_exported_detector_finds_the_same_boxes_in_other_images(detector: tuple[Path, Path]) -> None:
    import onnxruntime

    import samewise as package

    run, folder = detector
    said = json.loads((folder / "export.json").read_text())
    assert said["whole"]
    assert said["inputs"]["image"]["dtype"] == "uint8"
    assert list(said["outputs"]) == ["boxes", "labels", "scores"]
    model = package.load(run, trust=True).model
    program = torch.export.load(str(folder / "model.pt2")).module()
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == said["inputs"]["image"]["shape"]  # the resized size is in the file, so another one is refused
    assert said["formats"]["onnx"]["sizes"] == {"image": said["inputs"]["image"]["shape"]}
    counts = set[int]()
    for image in torch.randint(0, 256, (4, 1, *said["inputs"]["image"]["shape"][1:]), generator=torch.Generator().manual_seed(5), dtype=torch.uint8):
        with torch.no_grad():
            (expected,) = model([image[0].float() / 255])
            found = program(image)
        for boxes, labels, scores in (found, map(torch.from_numpy, session.run(None, {"image": image.numpy()}))):
            assert torch.equal(labels, expected["labels"])
            assert (boxes - expected["boxes"]).abs().max() < 1e-3
            assert (scores - expected["scores"]).abs().max() < 1e-5
        counts.add(len(labels))
    assert len(counts) > 1  # the number of boxes depends on the image


@pytest.mark.slow
def test_a_detector_that_selects_other_boxes_is_reported(samewise: Callable[..., Any], detector: tuple[Path, Path], tmp_path: Path) -> None:
    import onnx
    from onnx import numpy_helper

    folder = Path(shutil.copytree(detector[1], tmp_path / "copy"))
    model = onnx.load(str(folder / "model.onnx"))
    suppression = next(node for node in model.graph.node if node.op_type == "NonMaxSuppression")
    suppression.input[3] = "other"
    model.graph.initializer.append(numpy_helper.from_array(np.array([0.9], np.float32), "other"))
    onnx.save(model, str(folder / "model.onnx"))
    words = verified(samewise, folder, 1, "--trust")["onnx"]["words"]
    assert "gives boxes as float32[" in words
    assert "its weights are the model's, so an operator computes differently" in words
