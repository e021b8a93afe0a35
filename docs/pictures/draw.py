"""Draws the pictures of README.md and docs/ anew, from real runs in a scratch folder: `python docs/pictures/draw.py`.

    finished.png         a run in the terminal, repeated and verified
    mlflow.png           what `samewise ui` opens: twenty runs of an experiment, twelve of them a sweep

All need a Chromium and playwright, and some minutes of training.
"""

from __future__ import annotations

import io
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
SAMEWISE = [sys.executable, "-m", "samewise"]
SOUNDS = [
    "experiment=resnet18_own_recordings",
    "dataset.root=sounds",
    "dataset.num_classes=3",
    "dataset.seconds=1",
    "max_epochs=4",
]
GAN = ["experiment=gan_digits", "max_epochs=10"]
DIGITS = ["experiment=resnet18_digits", "max_epochs=4"]
THIRTY = [
    *(
        [*SOUNDS, *one]
        for one in ([], ["optimizer.lr=0.01"], ["optimizer.lr=5e-4"], ["model.width=8"], ["seed=1"])
    ),
    *(
        [*GAN, *one]
        for one in (
            [],
            ["seed=1"],
            ["callbacks.ema.decay=0.9"],
            ["optimizer.generator.lr=3e-3"],
            ["optimizer.generator.lr=3e-4"],
        )
    ),
    *(
        [*DIGITS, one]
        for one in (
            "batch_size=32",
            "model.width=8",
            "optimizer.weight_decay=0",
            "recipe.label_smoothing=0",
        )
    ),
    *(
        [*DIGITS, one]
        for one in (
            "optimizer.nesterov=false",
            "optimizer.momentum=0.8",
            "clip_norm=1",
            "optimizer.lr=0.2",
        )
    ),
]
SWEEP = [*DIGITS, "optimizer.lr=0.01,0.03,0.1,0.3", "seed=0,1,2"]


@contextmanager
def browser_page(width: int, height: int) -> Iterator[Any]:
    """A page of a real browser."""
    from playwright.sync_api import sync_playwright

    path = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.set_default_timeout(90_000)
        yield page
        browser.close()


def said(*arguments: str) -> str:
    """What a command prints, standard error included, with its colours."""
    environment = {
        **os.environ,
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*SAMEWISE, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout.rstrip()


def draw_terminal() -> None:
    """A run, the same command again, and `verify`."""
    trained, again = (
        said("train", "experiment=resnet18_digits"),
        said("train", "experiment=resnet18_digits"),
    )
    (folder,) = Path("runs/resnet18_digits").glob("*")
    console = Console(record=True, width=118, file=io.StringIO(), force_terminal=True)
    lines = [
        *trained.splitlines()[-16:],
        "$ samewise train experiment=resnet18_digits | head -1",
        again.splitlines()[0],
    ]
    for line in [
        *lines,
        f"$ samewise verify {folder} --steps 60",
        *said("verify", str(folder), "--steps", "60").splitlines(),
    ]:
        console.print(Text.from_ansi(line))
    svg = re.sub(
        r"@font-face\s*\{.*?\}", "", console.export_svg(title="samewise"), flags=re.DOTALL
    )  # fonts of this machine
    with browser_page(1400, 900) as page:
        page.set_content(f"<body style='margin:0'>{svg}</body>")
        page.locator("svg").screenshot(path=HERE / "finished.png")


def record_sounds(folder: Path) -> None:
    """Made-up recordings of three classes: tones that rise, stay and warble."""
    for name, bend in {
        "rising": lambda at: 1 + at / 8000,
        "steady": lambda at: 1.0,
        "warbling": lambda at: 1 + 0.3 * math.sin(at / 200),
    }.items():
        (folder / name).mkdir(parents=True)
        for each in range(12):
            draw = random.Random(f"{name} {each}")
            pitch, phase, samples = draw.uniform(300, 600), 0.0, list[int]()
            for at in range(8000):
                phase += 2 * math.pi * pitch * bend(at) / 8000
                samples.append(int(9000 * math.sin(phase) + draw.gauss(0, 500)))
            with wave.open(str(folder / name / f"{each}.wav"), "wb") as file:
                file.setparams((1, 2, 8000, len(samples), "NONE", ""))
                file.writeframes(struct.pack(f"<{len(samples)}h", *samples))


def train_thirty() -> None:
    """Thirty runs of three experiments, twelve of them a sweep, in the current folder."""
    record_sounds(Path("sounds"))
    for overrides in THIRTY:
        said("train", *overrides)
    said("sweep", *SWEEP)


@contextmanager
def front_page(width: int, height: int) -> Iterator[Any]:
    """What `samewise ui` opens, in a browser."""
    server = subprocess.Popen(
        [*SAMEWISE, "ui", "--port", "5077"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = next(
            found[0] for line in server.stdout if (found := re.search(r"http://\S+", line))
        )
        with browser_page(width, height) as page:
            page.goto(address)
            page.get_by_text("matching runs").wait_for()
            page.wait_for_timeout(3000)  # columns get their widths
            yield page
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def draw_mlflow() -> None:
    """Thirty runs in the MLflow UI, as it opens but for the panel of MLflow's assistant, which is closed after a browser's first visit."""
    train_thirty()
    with front_page(1720, 880) as page:
        page.get_by_role("button", name=re.compile("close", re.IGNORECASE)).first.click()
        page.wait_for_timeout(1500)
        page.screenshot(path=HERE / "mlflow.png")


def main() -> None:
    """Draw those named on the command line, or all."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, draw in {"finished": draw_terminal, "mlflow": draw_mlflow}.items():
            if not sys.argv[1:] or name in sys.argv[1:]:
                draw()


if __name__ == "__main__":
    main()
