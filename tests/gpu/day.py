"""Everything that a machine with a GPU can show about samewise, in one table: the gpu tests, bits, and speed. `make gpu`; no network.

Each row is a behaviour that only a device can show, and says what came of it: "same bits", where two trainings part, or why it failed. The exit code is 1
where a row failed or bits differed that should not. `--device cpu --only bits` tries the script itself where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import photographs

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {
    "classification": "resnet18_digits",
    "detection": "retinanet_bccd",
    "speech_recognition": "wav2letter_spoken_digits",
    "separation": "conv_tasnet_spoken_digits",
    "vocoder": "wavernn_spoken_digits",
    "adversarial": "gan_digits",
}
TINY = ["debug=tiny", "max_steps=12", "tracking=none", "evaluate.pictures=false", "checkpoint.every_steps=4", "checkpoint.keep_last=9"]
KILLED_AT = 6
FILL = Path(__file__).with_name("filled.py")
SPEED = Path(__file__).with_name("speed.py")


@dataclass(frozen=True)
class Row:
    """The outcome of one check."""

    check: str
    said: str
    good: bool
    seconds: float


class Trainings:
    """Runs `samewise train` in processes of their own, below one folder.

    Args:
        place: Made for this day alone.
        device: cuda, or cpu to try the script.
    """

    def __init__(self, place: Path, device: str) -> None:
        self.place, self.device = place, device
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT / ".package"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def command(self, name: str, recipe: str, *overrides: str, samewise: tuple[str, ...] = ("-m", "samewise")) -> list[str]:
        given = [f"experiment={RECIPES[recipe]}", *TINY, f"device={self.device}", f"run_root={self.place / name}", *overrides]
        return [sys.executable, *samewise, "train", *given]

    def train(self, name: str, recipe: str, *overrides: str, **how: tuple[str, ...]) -> Path:
        """The run's folder. `samewise=(FILE,)` starts that in the place of samewise.

        Raises:
            RuntimeError: it failed; with the last lines that it said.
        """
        done = subprocess.run(self.command(name, recipe, *overrides, **how), env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(" / ".join(done.stderr.strip().splitlines()[-2:]))
        return self.folder(name)

    def train_killed(self, name: str, recipe: str, *overrides: str) -> Path:
        """As `train`, but killed by SIGKILL in mid-run, and started again."""
        process = subprocess.Popen(self.command(name, recipe, *overrides), env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(file.read_bytes().count(b"\n") > KILLED_AT for file in self.place.glob(f"{name}/*/*/trace.jsonl")):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            raise RuntimeError("it ended before it could be killed")
        return self.train(name, recipe, *overrides)

    def folder(self, name: str) -> Path:
        (found,) = {file.parent for file in self.place.glob(f"{name}/*/*/config.yaml")}
        return found

    def compared(self, first: Path, second: Path) -> tuple[str, bool]:
        """ "same bits", or the first line of `samewise diff`."""
        digests = [json.loads((folder / "summary.json").read_text())["weights_sha256"] for folder in (first, second)]
        if digests[0] == digests[1]:
            return f"same bits ({digests[0][:8]})", True
        done = subprocess.run([sys.executable, "-m", "samewise", "diff", first, second], env=self.environment, capture_output=True, text=True)
        return next((line for line in done.stdout.splitlines() if "step" in line), "other bits"), False


def checks(trainings: Trainings, devices: int) -> Iterator[tuple[str, Callable[[], tuple[str, bool]]]]:
    """Each check's name, and the function that carries it out."""

    def pair(name: str, recipe: str, one: list[str], other: list[str], *, way: Callable[..., Path] | None = None) -> tuple[str, bool]:
        first = trainings.train(f"{name}_a", recipe, *one)
        return trainings.compared(first, (way or trainings.train)(f"{name}_b", recipe, *other))

    for recipe, precision in product(RECIPES, ("fp32", "bf16")):
        given = [f"precision={precision}"]
        yield f"{recipe}, {precision}: again in a fresh process", partial(pair, f"again_{recipe}_{precision}", recipe, given, given)
    for recipe in RECIPES:
        yield f"{recipe}: killed at step {KILLED_AT} and resumed", partial(pair, f"killed_{recipe}", recipe, [], [], way=trainings.train_killed)
    elastic = ["strategy=elastic", "replicas=4"]
    for recipe, processes in product(("classification", "detection", "speech_recognition"), (2, 4)):
        sharing = [*elastic, f"strategy.nproc={processes}", "strategy.backend=gloo", *(["strategy.share_devices=true"] if trainings.device == "cuda" else [])]
        yield f"{recipe}: elastic on 1 and {processes} processes that share a device", partial(pair, f"elastic_{recipe}_{processes}", recipe, elastic, sharing)
    for processes in (2, 4, 8):
        if trainings.device == "cuda" and devices >= processes:
            several = ["strategy=elastic", f"replicas={processes}"]
            over = [*several, f"strategy.nproc={processes}", "strategy.backend=nccl"]
            yield f"classification: elastic on {processes} devices over NCCL", partial(pair, f"nccl_{processes}", "classification", several, over)
    for layout, replicas in product(("contiguous", "channels_last"), (1, 4)):
        given = [f"memory_format={layout}", f"replicas={replicas}", "loader.num_workers=0"]
        other = [*given[:-1], "loader.num_workers=2"]
        yield f"classification: {layout}, {replicas} replicas, without and with workers", partial(pair, f"{layout}_{replicas}", "classification", given, other)
    if not (files := trainings.place / "photographs").exists():
        photographs.write(files, count=16, size=(160, 120))
    decoded = photographs.overrides(files, size=32, decode="device")
    yield "classification: JPEG decoded on the device, again", partial(pair, "jpeg_again", "classification", decoded, decoded)
    given = [[*decoded, f"loader.num_workers={workers}"] for workers in (0, 2)]
    yield "classification: JPEG decoded on the device, without and with workers", partial(pair, "jpeg_workers", "classification", *given)
    yield "classification: JPEG decoded on the device, killed", partial(pair, "jpeg_killed", "classification", decoded, decoded, way=trainings.train_killed)
    if trainings.device == "cuda":
        yield "classification: a device nearly full of memory", partial(nearly_full, trainings)


def nearly_full(trainings: Trainings) -> tuple[str, bool]:
    """The same training with little memory left: the same bits, or a warning that says why not."""
    free = trainings.train("full_a", "classification", "precision=bf16")
    try:
        full = trainings.train("full_b", "classification", "precision=bf16", samewise=(str(FILL),))
    except RuntimeError as error:
        return f"refused: {error}", "memory" in str(error)
    return trainings.compared(free, full)


def gpu_tests() -> tuple[str, bool]:
    """pytest's own last line on the tests marked `gpu`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", "4", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return "; ".join([done.stdout.strip().splitlines()[-1].strip("= "), *failed[:5]]), done.returncode == 0


def carried_out(check: str, carry_out: Callable[[], tuple[str, bool]]) -> Row:
    began = time.perf_counter()
    try:
        said, good = carry_out()
    except Exception as error:  # whatever happens in one check, the others are carried out
        said, good = f"failed: {type(error).__name__}: {error}", False
    row = Row(check, said, good, time.perf_counter() - began)
    print(f"{'ok' if row.good else 'NO':<3} {row.check:<66} {row.said}  ({row.seconds:.0f} s)", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("tests", "bits", "speed"), help="one part alone")
    parser.add_argument("--match", default="", help="of the bits, those checks whose name contains this")
    parser.add_argument("--jobs", type=int, default=6, help="how many trainings at a time; speed is measured alone")
    args = parser.parse_args()
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device; --device cpu --only bits tries this script without one", file=sys.stderr)
        return 2
    devices = torch.cuda.device_count() if args.device == "cuda" else 0
    print(f"torch {torch.__version__}, {devices} x {torch.cuda.get_device_name() if devices else 'no device'}", flush=True)
    rows: list[Row] = []
    if args.only in (None, "bits"):
        with tempfile.TemporaryDirectory(prefix="samewise-gpu-") as place, ThreadPoolExecutor(args.jobs) as pool:
            wanted = [one for one in checks(Trainings(Path(place), args.device), devices) if args.match in one[0]]
            rows += pool.map(lambda one: carried_out(*one), wanted)
    if args.only in (None, "tests"):
        rows.append(carried_out("the tests marked gpu", gpu_tests))
    if args.only in (None, "speed"):
        speed = subprocess.run([sys.executable, str(SPEED), "--device", args.device], env={**os.environ, "PYTHONPATH": str(ROOT / ".package")}, check=False)
        rows.append(Row("speed", "", speed.returncode == 0, 0.0))
    wrong = [row for row in rows if not row.good]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they should be{'' if not wrong else '; not: ' + '; '.join(row.check for row in wrong)}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
