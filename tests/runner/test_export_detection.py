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
from PIL import Image
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
def test_an_export_says_how_its_data_set_resizes(samewise: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (40, 30), (60 * number, 90, 30)).save(tmp_path / "images" / f"{number}.png")
    images = [{"id": number, "file_name": f"{number}.png", "width": 40, "height": 30} for number in range(4)]
    boxes = [{"id": number, "image_id": number, "category_id": 1, "bbox": [4, 3, 20, 20], "area": 400, "iscrowd": 0} for number in range(4)]
    (tmp_path / "boxes.json").write_text(json.dumps({"images": images, "categories": [{"id": 1, "name": "cell"}], "annotations": boxes}))
    places = [f"dataset.{split}_{kind}" for split in ("train", "valid") for kind in ("images=images", "annotations=boxes.json")]
    data = ["dataset=coco", f"dataset.root={tmp_path}", *places, "dataset.num_classes=2", "dataset.size=[48,64]", "model.min_size=48", "model.max_size=64"]
    short = ["batch_size=2", "max_steps=1", "model.score_thresh=0.001", "tracking=none", "evaluate.pictures=false", f"run_root={tmp_path / 'runs'}"]
    done = samewise("train", "experiment=retinanet_bccd", "~dataset.test_split", "~dataset.first_pixel", "~dataset.empty_boxes", *data, *short)
    assert done.returncode == 0, done.stderr
    done = samewise("export", next(tmp_path.glob("runs/*/*")), "--to", "safetensors", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    said, readme = json.loads((tmp_path / "out" / "export.json").read_text()), (tmp_path / "out" / "README.md").read_text()
    assert said["preparation"]["size"] == said["inputs"]["image"]["shape"][2:] == [48, 64]
    assert "- size: [48, 64]\n- resizing: to this height and width, whatever those of the file; bilinear, with antialiasing\n" in readme
    assert "boxes (x1, y1, x2, y2) in pixels of the input" in readme


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
    assert "first at " in words
    assert "its weights are the model's, so an operator computes differently" in words


@pytest.mark.slow
def test_a_wrong_weight_of_a_detector_is_named_with_the_operator_that_uses_it(
    samewise: Callable[..., Any], detector: tuple[Path, Path], tmp_path: Path
) -> None:
    import onnx
    from onnx import numpy_helper

    folder = Path(shutil.copytree(detector[1], tmp_path / "copy"))
    name = "backbone.fpn.layer_blocks.1.0.weight"
    model = onnx.load(str(folder / "model.onnx"))
    weight = next(one for one in model.graph.initializer if one.name == f"model.{name}")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).swapaxes(0, 1).copy(), weight.name))
    onnx.save(model, str(folder / "model.onnx"))
    program = torch.export.load(str(folder / "model.pt2"))
    program.state_dict[f"model.{name}"].data = program.state_dict[f"model.{name}"].transpose(0, 1).contiguous()
    torch.export.save(program, str(folder / "model.pt2"))
    found = verified(samewise, folder, 1, "--trust")
    for format, kind in (("onnx", "Conv"), ("pt2", "aten.conv2d.default")):
        assert f"({kind} in {name.removesuffix('.weight')})" in found[format]["words"]
        assert f"these weights differ from the model's: {name}" in found[format]["words"]


@pytest.mark.slow
def test_a_detector_that_finds_nothing_in_the_example_is_refused(samewise: Callable[..., Any], detector: tuple[Path, Path], tmp_path: Path) -> None:
    done = samewise("export", detector[0], "model.score_thresh=0.999", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "finds nothing in the example (boxes, labels, scores), so no format could be compared with it" in done.stderr
    assert samewise("export", detector[0], "--module", "backbone", "--out", tmp_path / "backbone").returncode == 0
