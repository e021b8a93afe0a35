"""What a process sets before it computes: threads, memory that it keeps, and environment variables before what reads them is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from samewise.runner.processes import variables

CORES = sorted(os.sched_getaffinity(0))
several_cores = pytest.mark.skipif(len(CORES) < 2, reason="there is one core")

EXPERIMENTS = {
    "resnet18_digits": ["experiment=resnet18_digits"],
    "conv_tasnet_spoken_digits": ["experiment=conv_tasnet_spoken_digits"],
    "wavernn_spoken_digits": ["experiment=wavernn_spoken_digits"],
    "audio_classification_spoken_digits": ["experiment=audio_classification_spoken_digits", "model.width=4"],
    "wav2letter_spoken_digits": ["experiment=wav2letter_spoken_digits", "model.width=32"],
    "gan_digits": ["experiment=gan_digits"],
    "channels_last": ["experiment=resnet18_digits", "memory_format=channels_last", "replicas=4"],
    "retinanet_coco": ["experiment=retinanet_coco", "batch_size=2", "replicas=2", "model.channels=16"],
}
TRAINS = """\
import os, sys
from samewise.runner.cli import main
for command in sys.argv[2:]:
    assert main(command.split()) == 0
assert len(os.listdir("/proc/self/task")) >= int(sys.argv[1]), "nothing was computed by as many threads"
"""
COMPUTES = """\
import hashlib, types
from samewise.runner.processes import variables
variables.prepare(types.SimpleNamespace(threads=4, variables={}, deterministic=True))
import numpy as np
drawn = np.random.default_rng(0)
line, other, square = drawn.standard_normal(1_000_000), drawn.standard_normal(1_000_000), drawn.standard_normal((400, 400))
print([hashlib.sha256(found.tobytes()).hexdigest() for found in (line @ other, square @ square, np.linalg.solve(square, square[0]))])
"""
MULTIPLIES = """\
import os, sys
os.environ |= dict(argument.split("=") for argument in sys.argv[1:])
import samewise, torch
torch.ones(1, 99) @ torch.ones(99, 144)
"""


def output_on(cores: int, code: str, *arguments: str) -> str:
    """The output of a new process that may use this many cores, in an environment that asks for a single thread."""
    command = ["taskset", "-c", ",".join(map(str, CORES[:cores])), sys.executable, "-c", code, *arguments]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "OPENBLAS_", "GOMP_"))}
    done = subprocess.run(command, capture_output=True, text=True, env={**outside, "OMP_THREAD_LIMIT": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_spin_before_they_sleep_unless_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables.WAITING:
        monkeypatch.delenv(name, raising=False)
    assert variables.thread_variables(2).items() >= {"OMP_NUM_THREADS": "2", **variables.WAITING}.items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert not variables.thread_variables(2).keys() & {*variables.WAITING}


@pytest.mark.slow
@several_cores
@pytest.mark.timeout(900)
@pytest.mark.parametrize("threads", [4, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 2, 8))])
def test_any_number_of_threads_gives_the_same_bits_on_one_or_two_cores(threads: int, tmp_path: Path) -> None:
    common = ["debug=tiny", "max_steps=5", "tracking=none", "evaluate.pictures=false", f"reproducibility.threads={threads}"]
    for cores in (1, 2):
        trainings = [["train", *common, *own, f"name={name}", f"run_root={tmp_path}/{cores}"] for name, own in EXPERIMENTS.items()]
        output_on(cores, TRAINS, str(threads), *map(" ".join, trainings))
    for name in EXPERIMENTS:
        (one,), (two,) = ((tmp_path / str(cores) / name).glob("*/trace.jsonl") for cores in (1, 2))
        assert json.loads((one.parent / "environment.json").read_text())["threads"] == threads
        assert one.read_bytes() == two.read_bytes()
        assert one.read_bytes().count(b"\n") == 6


@pytest.mark.slow
def test_mkl_adds_in_a_fixed_order_unless_the_environment_decides() -> None:
    if not torch.backends.mkl.is_available():
        pytest.skip("torch was built without MKL")
    assert "CNR:AUTO" in output_on(1, MULTIPLIES, "MKL_VERBOSE=1")
    assert "CNR:COMPATIBLE" in output_on(1, MULTIPLIES, "MKL_VERBOSE=1", "MKL_CBWR=COMPATIBLE")


@several_cores
def test_numpy_gives_the_same_bits_on_one_or_two_cores() -> None:
    assert output_on(1, COMPUTES) == output_on(2, COMPUTES)


STEPS = """
import resource, sys
from samewise.runner.processes.this_process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    made = [bytearray(size << 20) for size in (48, 5, 33)]
    for one in made:
        one[::4096] = bytes(len(one) // 4096)
    return made
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


def faults(way: str, **variables: str) -> int:
    """Pages taken from the kernel by a step that allocates 86 MB, which are 22,016 pages."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", STEPS, way], env=clean | variables, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="malloc is glibc's on Linux")
def test_freed_memory_is_reused_unless_the_environment_configures_malloc():
    assert faults("not kept") > 15_000
    assert faults("kept") < 1_500
    assert faults("kept", MALLOC_ARENA_MAX="4") > 15_000


TINY = ["experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=none", "max_steps=2"]
CODE = """
import os, sys
from samewise.runner.processes import variables

def report(settings):
    print("torch is imported" if "torch" in sys.modules else "in time", flush=True)
    os.kill(os.getpid(), 9)

variables.prepare = report
from samewise.runner.cli import main
sys.exit(main(sys.argv[1:]))
"""
COMMANDS = {
    "train": ["train", *TINY, "max_steps=3"],
    "check": ["check", *TINY],
    "profile": ["profile", *TINY, "max_steps=20"],
    "verify": ["verify", "{run}"],
    "verify of a bundle": ["verify", "{bundle}", "--trust"],
    "eval": ["eval", "{run}"],
    "export": ["export", "{run}", "--to", "safetensors", "--out", "{folder}/export"],
    "predict into a table": ["predict", "{run}", "{image}", "--output", "{folder}/table.csv"],
    "predict": ["predict", "{run}", "{image}"],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, a bundle of it, an image and a folder."""
    from PIL import Image

    from samewise.runner.cli import main

    folder = tmp_path_factory.mktemp("variables")
    assert main(["train", *TINY, f"run_root={folder}/runs"]) == 0
    (run,) = folder.glob("runs/*/*")
    assert main(["bundle", str(run), "--out", str(folder / "run.bundle")]) == 0
    Image.new("L", (8, 8)).save(folder / "image.png")
    return {"folder": folder, "run": run, "bundle": folder / "run.bundle", "image": folder / "image.png"}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_variables_are_set_before_torch_is_imported(command: str, places: dict[str, Path], clean_environment: Mapping[str, str], repository: Path) -> None:
    arguments = [one.format(**places) for one in COMMANDS[command]]
    environment = {**clean_environment, "PYTHONPATH": str(repository / ".package")}
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=places["folder"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["in time"], done.stderr
