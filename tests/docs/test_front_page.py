"""The page that `samewise ui` opens for thirty runs of three experiments, twelve of them a sweep, as docs/pictures/draw.py draws it for README.md."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="there is no Chromium: apt-get install chromium")
@pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed")
def test_the_best_run_and_its_settings_are_visible_without_a_click(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "pictures" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    monkeypatch.chdir(tmp_path)
    draw.train_thirty()
    best = {file.parent: json.loads(file.read_text())["metrics"]["best"] for file in tmp_path.glob("runs/*/*/summary.json")}
    assert len(best) == 30
    digits = {folder: found["valid/accuracy"] for folder, found in best.items() if folder.parent.name == "resnet18_digits"}
    first = [json.loads((folder / "tracking.json").read_text())["run_id"] for folder, value in digits.items() if value == max(digits.values())]

    with draw.front_page(1720, 880) as page:
        assert "20 matching runs" in page.inner_text("body")
        places = [page.get_by_role("columnheader", name=name).last.bounding_box()["x"] for name in ("Run Name", "best/valid/accuracy", "optimizer.lr", "seed")]
        assert places == sorted(places)
        assert places[-1] < 1720
        rows = page.locator(".ag-pinned-left-cols-container a, .ag-center-cols-container a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
        shown = [match[1] for href in rows if (match := re.search(r"/runs/(\w{32})", href or ""))]
        assert shown[0] in first
        told = page.get_by_text("best of 20 is").first
        assert told.is_visible()
        words = told.inner_text()
        assert f"valid/accuracy {max(digits.values()):.4g}" in words
        assert "optimizer.lr" in words
        links = page.locator("a[href*='viewStateShareKey']").evaluate_all("all => all.map(one => one.getAttribute('href'))")
        keys = {match[1] for href in links if (match := re.search(r"viewStateShareKey=([\w-]+)", href))}
        assert {"samewise-gan_digits", "samewise-resnet18_own_recordings", "samewise"} < keys
        assert any(key.startswith("samewise-sweep-") for key in keys)

        page.goto(re.sub(r"/runs\?.*", "/runs?viewStateShareKey=samewise-gan_digits&compareRunsMode=CHART", page.url))
        page.get_by_text("5 matching runs").wait_for()
        page.get_by_text("best by ema/valid/energy_distance").wait_for()
