"""COCO's average precision against values worked out by hand and by a second implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from samewise.recipes.parts.average_precision import AveragePrecision, Image


def image(
    boxes: list[list[float]], labels: list[int], found: list[list[float]], of: list[int], scores: list[float], *, crowd: list[bool] | None = None
) -> Image:
    true, detected = torch.tensor(boxes).view(-1, 4), torch.tensor(found).view(-1, 4)
    area = (true[:, 2] - true[:, 0]) * (true[:, 3] - true[:, 1])
    marks = torch.tensor(crowd if crowd is not None else [False] * len(boxes), dtype=torch.bool)
    return Image((200, 200), true, torch.tensor(labels, dtype=torch.int64), marks, area, detected, torch.tensor(of, dtype=torch.int64), torch.tensor(scores))


def test_perfect_detections_score_one():
    box = [[10.0, 10, 60, 60]]
    told = AveragePrecision.of([image(box, [1], box, [1], [0.9])], classes=3).summary()
    assert told == pytest.approx({"map": 1.0, "map_50": 1.0, "map_75": 1.0, "map_medium": 1.0, "mar_100": 1.0})


def test_a_detection_of_another_class_or_place_is_wrong():
    box = [[10.0, 10, 60, 60]]
    assert AveragePrecision.of([image(box, [1], box, [2], [0.9])], classes=3).summary()["map"] == 0
    assert AveragePrecision.of([image(box, [1], [[100.0, 100, 150, 150]], [1], [0.9])], classes=3).summary()["map"] == 0


def test_a_wrong_detection_with_a_higher_score_halves_the_precision():
    true = [[10.0, 10, 60, 60]]
    told = AveragePrecision.of([image(true, [1], [[100.0, 100, 150, 150], *true], [1, 1], [0.9, 0.8])], classes=2)
    assert told.summary()["map_50"] == pytest.approx(0.5)
    assert told.by_class() == [(1, pytest.approx(0.5), pytest.approx(0.5))]


def test_the_overlap_decides_at_which_thresholds_a_detection_is_correct():
    true, found = [[0.0, 0, 100, 100]], [[0.0, 0, 100, 72]]  # an overlap of .72: correct at .5, .55, .6, .65, .7
    told = AveragePrecision.of([image(true, [1], found, [1], [0.5])], classes=2).summary()
    assert told["map"] == pytest.approx(0.5)
    assert (told["map_50"], told["map_75"]) == pytest.approx((1.0, 0.0))


def test_a_detection_in_a_crowd_counts_neither_as_right_nor_as_wrong():
    true = [[10.0, 10, 60, 60], [100.0, 100, 200, 200]]
    one = image(true, [1, 1], [true[0], [120.0, 120, 140, 140]], [1, 1], [0.5, 0.9], crowd=[False, True])
    assert AveragePrecision.of([one], classes=2).summary()["map"] == pytest.approx(1.0)


def test_without_any_detection_the_same_figures_are_reported_as_zero():
    true = [[10.0, 10, 60, 60]]
    nothing = AveragePrecision.of([image(true, [1], [], [], [])], classes=3)
    something = AveragePrecision.of([image(true, [1], [[100.0, 100, 150, 150]], [1], [0.1])], classes=3)
    assert nothing.summary() == something.summary()
    assert nothing.by_class() == something.by_class() == [(1, 0.0, 0.0)]


def test_without_any_box_the_average_precision_is_zero():
    assert AveragePrecision.of([image([], [], [], [], [])], classes=3).summary() == {"map": 0.0, "map_50": 0.0, "map_75": 0.0}


def naive_ap(images: list[Image], label: int, threshold: float) -> float:
    """101-point interpolated average precision, greedily matched in order of score."""
    ranked = sorted(
        (
            (float(score), number, place)
            for number, one in enumerate(images)
            for place, score in enumerate(one.found_scores)
            if int(one.found_labels[place]) == label
        ),
        key=lambda row: -row[0],
    )
    total = sum(int((one.labels == label).sum()) for one in images)
    taken: set[tuple[int, int]] = set()
    right = []
    for _, number, place in ranked:
        one, best, match = images[number], threshold, None
        for other in (one.labels == label).nonzero().flatten().tolist():
            overlap = _overlap(one.found_boxes[place], one.boxes[other])
            if (number, other) not in taken and overlap >= best:
                best, match = overlap, other
        right.append(match is not None)
        if match is not None:
            taken.add((number, match))
    hits = np.cumsum(right)
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / total
    return float(np.mean([max((p for p, r in zip(precision, recall, strict=True) if r >= wanted), default=0.0) for wanted in np.linspace(0, 1, 101)]))


def _overlap(a: Tensor, b: Tensor) -> float:
    (ax1, ay1, ax2, ay2), (bx1, by1, bx2, by2) = a.tolist(), b.tolist()
    width, height = min(ax2, bx2) - max(ax1, bx1), min(ay2, by2) - max(ay1, by1)
    common = max(0.0, width) * max(0.0, height)
    return common / ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - common)


def test_it_agrees_with_a_second_implementation_on_random_boxes():
    drawn = torch.Generator().manual_seed(3)

    def random_boxes(count: int) -> Tensor:
        corner = torch.rand(count, 2, generator=drawn) * 120
        return torch.cat([corner, corner + 20 + torch.rand(count, 2, generator=drawn) * 50], dim=1)

    images = []
    for _ in range(12):
        true, extra = random_boxes(4), random_boxes(3)
        labels = torch.randint(1, 4, (4,), generator=drawn)
        found = torch.cat([true + torch.randn(4, 4, generator=drawn) * 4, extra])
        of = torch.cat([labels, torch.randint(1, 4, (3,), generator=drawn)])
        area = (true[:, 2] - true[:, 0]) * (true[:, 3] - true[:, 1])
        images.append(Image((200, 200), true, labels, torch.zeros(4, dtype=torch.bool), area, found, of, torch.rand(7, generator=drawn)))
    told = AveragePrecision.of(images, classes=4)
    for label, mean, at_50 in told.by_class():
        assert at_50 == pytest.approx(naive_ap(images, label, 0.5), abs=1e-6)
        assert mean == pytest.approx(np.mean([naive_ap(images, label, 0.5 + 0.05 * step) for step in range(10)]), abs=1e-6)
    assert 0.05 < told.summary()["map"] < 0.95


def test_it_writes_nothing_to_the_terminal(capsys):
    AveragePrecision.of([image([[0.0, 0, 9, 9]], [1], [[0.0, 0, 9, 9]], [1], [0.5])], classes=2)
    assert capsys.readouterr().out == ""
