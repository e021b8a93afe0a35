"""A detector is exported as a whole: images go in, the selected boxes come out, and an export that selects other boxes is reported."""

import json
from pathlib import Path

import pytest
import torch
from samewise_runner_exported import TINY


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
