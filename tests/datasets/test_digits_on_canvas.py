"""Digits drawn on canvases."""

from __future__ import annotations

import torch

from samewise.datasets.digits_on_canvas import DigitsOnCanvas


def test_boxes_lie_in_the_image_around_brighter_pixels_and_apart_from_each_other():
    data = DigitsOnCanvas(split="valid", length=40, digits=4, height=80, width=100, largest=40)
    counts = set()
    for index in range(40):
        sample = data[index]
        counts.add(len(sample["labels"]))
        assert all(1 <= label <= 10 for label in sample["labels"].tolist())
        outside = torch.ones(80, 100, dtype=torch.bool)
        for x1, y1, x2, y2 in sample["boxes"].int().tolist():
            assert 0 <= x1 < x2 <= 100
            assert 0 <= y1 < y2 <= 80
            assert sample["image"][:, y1:y2, x1:x2].max() > 150
            assert outside[y1:y2, x1:x2].all()
            outside[y1:y2, x1:x2] = False
        assert int((sample["image"].amax(0)[outside] > 96).sum()) == 0  # the whole digit is in its box
    assert counts == {1, 2, 3, 4}


def test_aspect_ratios_tell_which_canvases_are_turned():
    data = DigitsOnCanvas(split="train", length=30, turned=True)
    ratios = data.aspect_ratios().tolist()
    assert ratios == [data[index]["image"].shape[2] / data[index]["image"].shape[1] for index in range(30)]
    assert set(ratios) == {96 / 128, 128 / 96}
