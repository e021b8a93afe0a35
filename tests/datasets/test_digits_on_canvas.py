"""Digits drawn on canvases."""

from samewise.datasets.digits_on_canvas import DigitsOnCanvas


def test_aspect_ratios_tell_which_canvases_are_turned():
    data = DigitsOnCanvas(split="train", length=30, turned=True)
    ratios = data.aspect_ratios().tolist()
    assert ratios == [data[index]["image"].shape[2] / data[index]["image"].shape[1] for index in range(30)]
    assert set(ratios) == {96 / 128, 128 / 96}
