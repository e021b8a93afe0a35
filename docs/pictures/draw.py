"""Draws the pictures of README.md and docs/ anew, from real runs in a scratch folder: `python docs/pictures/draw.py`.

    finished.png         a run in the terminal, repeated and verified
    mlflow.png           five runs in the MLflow UI

The pictures of a sweep, sweep_table.png and sweep_compared.png, come from the test that reads those pages in a browser:
`SAMEWISE_PICTURES=docs/pictures python -m pytest tests/sweeps/test_report.py -k mlflow_ui`.
All need a Chromium and playwright, and some minutes of training.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
SAMEWISE = [sys.executable, "-m", "samewise"]
RUNS = {"lr 0.1, seed 0": (), "lr 0.1, seed 1": ("seed=1",), **{f"lr {lr}, seed 0": (f"optimizer.lr={lr}",) for lr in ("0.03", "0.3", "0.01")}}


@contextmanager
def browser_page(width: int, height: int) -> Iterator[Any]:
    """A page of a real browser."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.set_default_timeout(90_000)
        yield page
        browser.close()


def said(*arguments: str) -> str:
    """What a command prints, standard error included, with its colours."""
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*SAMEWISE, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout.rstrip()


def draw_terminal() -> None:
    """A run, the same command again, and `verify`."""
    trained, again = said("train", "experiment=resnet18_digits"), said("train", "experiment=resnet18_digits")
    (folder,) = Path("runs/resnet18_digits").glob("*")
    console = Console(record=True, width=118, file=io.StringIO(), force_terminal=True)
    lines = [*trained.splitlines()[-16:], "$ samewise train experiment=resnet18_digits | head -1", again.splitlines()[0]]
    for line in [*lines, f"$ samewise verify {folder} --steps 60", *said("verify", str(folder), "--steps", "60").splitlines()]:
        console.print(Text.from_ansi(line))
    svg = re.sub(r"@font-face\s*\{.*?\}", "", console.export_svg(title="samewise"), flags=re.DOTALL)  # fonts of this machine
    with browser_page(1400, 900) as page:
        page.set_content(f"<body style='margin:0'>{svg}</body>")
        page.locator("svg").screenshot(path=HERE / "finished.png")


def draw_mlflow() -> None:
    """Five runs as charts."""
    for name, overrides in RUNS.items():
        said("train", "experiment=resnet18_digits", *overrides, f"tracking.run_name={name}")
    server = subprocess.Popen([*SAMEWISE, "ui", "--port", "5077"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        with browser_page(1400, 1130) as page:
            page.goto(f"{address}/#/experiments/1/runs?compareRunsMode=CHART")
            page.get_by_placeholder("Search metric charts").fill("(train/|valid/(loss|acc))")
            page.locator(".main-svg").nth(4).wait_for()
            page.wait_for_timeout(3000)  # the charts move into their places
            page.screenshot(path=HERE / "mlflow.png")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def main() -> None:
    """Draw those named on the command line, or all."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, draw in {"finished": draw_terminal, "mlflow": draw_mlflow}.items():
            if not sys.argv[1:] or name in sys.argv[1:]:
                draw()


if __name__ == "__main__":
    main()
