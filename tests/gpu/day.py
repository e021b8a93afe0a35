"""Everything that a machine with a GPU can show about samewise, in one table: the gpu tests, and bits. `make gpu`; no network.

Each row is a behaviour that only a device can show, and says what came of it: "same bits", where two trainings part, or why it failed. The exit code is 1
where a row failed or bits differed that should not. `--device cpu --only bits` tries the script itself where there is no GPU.
"""

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
        logs: Where the output of what fails is kept.
    """

    def __init__(self, place: Path, device: str, logs: Path | None = None) -> None:
        self.place, self.device, self.logs = place, device, logs
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT / ".package"), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def command(self, name: str, recipe: str, *overrides: str, samewise: tuple[str, ...] = ("-m", "samewise")) -> list[str]:
        given = [f"experiment={RECIPES[recipe]}", *TINY, f"device={self.device}", f"run_root={self.place / name}", *overrides]
        return [sys.executable, *samewise, "train", *(["--debug"] if self.logs else []), *given]

    def train(self, name: str, recipe: str, *overrides: str, **how: tuple[str, ...]) -> Path:
        """The run's folder. `samewise=(FILE,)` starts that in the place of samewise.

        Raises:
            RuntimeError: it failed; with the last lines that it said.
        """
        done = self.run(self.command(name, recipe, *overrides, **how))
        if done.returncode:
            raise RuntimeError(" / ".join(done.stderr.strip().splitlines()[-2:]))
        return self.folder(name)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """The command's result; the output of one that fails is kept in `logs`."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        if done.returncode and self.logs:
            self.logs.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.logs, suffix=".txt", delete=False) as file:
                file.write("\n".join([" ".join(command), done.stdout, done.stderr]))
        return done

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

    def losses(self, folder: Path) -> list[float]:
        """The total loss of each step, over its phases."""
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [{name: value for name, value in one["metrics"].items() if name.startswith("train/")} for one in found if "metrics" in one]
        return [sum(value for name, value in one.items() if name == "train/loss" or name.endswith("/loss")) for one in steps if one]

    def refused(self, arguments: list[str], *words: str, samewise: tuple[str, ...] = ("-m", "samewise")) -> tuple[str, bool]:
        """Whether a command ends with an error that contains the words, and without a traceback."""
        done = self.run([sys.executable, *samewise, *arguments])
        good = done.returncode in (1, 2) and "Traceback" not in done.stderr and all(word in done.stderr for word in words)
        return f"exit code {done.returncode}: {' / '.join(done.stderr.strip().splitlines()[-3:])}", good

    def works(self, *arguments: str, words: str) -> tuple[str, bool]:
        """Whether a command succeeds, and the first line of its output that contains the words."""
        done = self.run([sys.executable, "-m", "samewise", *arguments])
        line = next((line.strip() for line in (done.stdout + done.stderr).splitlines() if words in line), None)
        return line or " / ".join(done.stderr.strip().splitlines()[-3:]), done.returncode == 0 and line is not None

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
        yield f"{recipe}: the losses of the CPU", partial(as_on_cpu, trainings, recipe)
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
    for recipe, precision in product(("classification", "separation"), ("tf32", "fp16")):
        given = [f"precision={precision}"]
        yield f"{recipe}, {precision}: again in a fresh process", partial(pair, f"again_{recipe}_{precision}", recipe, given, given)
    for recipe, mode in (("classification", "default"), ("classification", "max"), ("separation", "default")):
        given = [f"compile={mode}"]
        yield f"{recipe}, compile={mode}: again in a fresh process", partial(pair, f"compiled_{recipe}_{mode}", recipe, given, given)
    place = [f"run_root={trainings.place / 'commands'}", f"device={trainings.device}", "tracking=none"]
    profiled = ["profile", f"experiment={RECIPES['classification']}", "debug=tiny", "dataset.samples=640", *place, "--out", str(trainings.place / "profile")]
    yield "profile", partial(trainings.works, *profiled, words="forward")
    if trainings.device == "cuda":
        graphs = ["compile=default", "compile.cuda_graphs=true"]
        yield "classification, CUDA graphs: with and without", partial(pair, "graphs", "classification", graphs, graphs[:1])
        yield "classification, CUDA graphs: killed", partial(pair, "graphs_killed", "classification", graphs, graphs, way=trainings.train_killed)
        yield "memory: a device nearly full of it", partial(nearly_full, trainings)
        large = ["model=resnet50", "dataset=generated_classification", "dataset.image_size=224", "dataset.samples=64", "transforms=images", "batch_size=64"]
        small = ["train", *large, "max_steps=2", *place]
        yield "memory: a batch that does not fit", partial(trainings.refused, small, "memory", "accumulate", samewise=(str(FILL),))


def as_on_cpu(trainings: Trainings, recipe: str) -> tuple[str, bool]:
    """How far the losses of the device are from those of the CPU: in the first step only rounding, which later steps amplify."""
    given = ["max_steps=3", *(["model.dropout=0"] if recipe == "speech_recognition" else [])]  # each device draws other numbers for dropout
    folders = [trainings.train(f"on_{device}_{recipe}", recipe, *given, f"device={device}") for device in ("cpu", trainings.device)]
    here, there = map(trainings.losses, folders)
    apart = [abs(one - other) / abs(one) for one, other in zip(here, there, strict=True)]
    return f"relative differences of {', '.join(f'{one:.1e}' for one in apart)}", apart[0] < 1e-4 and max(apart) < 1e-2


def nearly_full(trainings: Trainings) -> tuple[str, bool]:
    """The same training with little memory left: the same bits, or a warning that says why not."""
    free = trainings.train("full_a", "classification", "precision=bf16")
    try:
        full = trainings.train("full_b", "classification", "precision=bf16", samewise=(str(FILL),))
    except RuntimeError as error:
        return f"refused: {error}", "memory" in str(error)
    return trainings.compared(free, full)


def gpu_tests(jobs: int) -> tuple[str, bool]:
    """pytest's own last line on the tests that use a CUDA device."""
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.(gpu|any_cuda)\b", file.read_text())]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu or any_cuda", "-n", str(jobs), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return "; ".join([done.stdout.strip().splitlines()[-1].strip("= "), *failed[:9]]), done.returncode == 0


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
    parser.add_argument("--only", choices=("tests", "bits"), help="one part alone")
    parser.add_argument("--match", default="", help="of the bits, those checks whose name matches this regular expression")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=max(2, cores * 3 // 4), help="how many trainings at a time (default: 3 for 4 cores)")
    parser.add_argument("--logs", type=Path, help="keep the output of what fails, with tracebacks, in this folder")
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
            wanted = [one for one in checks(Trainings(Path(place), args.device, args.logs), devices) if re.search(args.match, one[0])]
            alone = [one for one in wanted if one[0].startswith("memory")]  # they leave no memory to others
            rows += pool.map(lambda one: carried_out(*one), [one for one in wanted if one not in alone])
            rows += [carried_out(*one) for one in alone]
    if args.only in (None, "tests"):
        rows.append(carried_out("the tests that use a CUDA device", partial(gpu_tests, args.jobs)))
    wrong = [row for row in rows if not row.good]
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they should be{'' if not wrong else '; not: ' + '; '.join(row.check for row in wrong)}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
