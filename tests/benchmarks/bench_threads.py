"""Time per step with several threads, on one core and on two, against one thread, as ratios within one run.

    make bench        or: python tests/benchmarks/bench_threads.py [WORK...]

A process for each number of threads and of cores (taskset) trains real shapes on generated data. They take turns of one step, so that they share
whatever else the machine does; the ratio is the median over the turns. On one core it is of processor time, which is what a step takes where nothing
else runs; on two it is of time, so nothing else should run. With each number of threads, the weights at the end are the same on one core and on two,
or it says so.

The second table compares the experiments' own settings (threads, memory format, memory kept) with one thread, contiguous tensors and glibc's defaults, at
their own batch sizes.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

WORK = {
    "ResNet-20 at 32 px, batch 64": ["experiment=resnet_cifar10", "dataset=generated_classification", "batch_size=64"],
    "RetinaNet, ResNet-18 at 192x256, batch 4": [
        *("experiment=retinanet_bccd", "dataset=generated_detection", "dataset.num_classes=11", "dataset.samples=32", "dataset.valid_samples=8"),
        *("dataset.height=192", "dataset.width=256", "batch_size=4"),
    ],
    "Wav2Letter, narrow, batch 16": ["experiment=wav2letter_spoken_digits", "dataset=generated_speech_recognition", "batch_size=16"],
    "ConvTasNet, narrow, batch 4": ["experiment=conv_tasnet_spoken_digits", "dataset=generated_separation", "dataset.seconds=1.5", "batch_size=4"],
    "WaveRNN, narrow, batch 8": [
        *("experiment=wavernn_spoken_digits", "dataset=generated_vocoder", "dataset.sample_rate=8000", "dataset.clips=64", "dataset.samples=1000"),
        "batch_size=8",
    ],
}
COMMON = ["tracking=none", "callbacks=none", "loader.num_workers=0", "max_epochs=100000"]
CORES = sorted(os.sched_getaffinity(0))
WAYS = [(threads, cores) for cores in (1, 2) if cores <= len(CORES) for threads in (1, 2, 4)]
TURNS = 6


class Trainer:
    """A process that takes a step whenever it is asked."""

    def __init__(self, overrides: list[str], cores: int, variables: Mapping[str, str] | None = None) -> None:
        command = ["taskset", "-c", ",".join(map(str, CORES[:cores])), sys.executable, __file__, "--train", *overrides]
        environment = {**os.environ, **(variables or {})}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self.ask("")  # it is ready

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line and f"{line}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().strip()
        assert said, "the process has failed; it says why where it is run alone"
        return said

    def end(self) -> str:
        """The digest of its weights."""
        digest = self.ask("end")
        self._process.wait()
        return digest


def train(overrides: list[str]) -> None:
    """Take a step for each line of standard input, and say how many seconds it took, of time and of the processor."""
    from samewise.runner.config import compose, project
    from samewise.runner.processes import variables

    folder = tempfile.mkdtemp()
    composed = compose.compose([*overrides, *COMMON, f"run_root={folder}/runs"], project=project.find())
    variables.prepare(composed.cfg.reproducibility)
    from samewise.runner.records.digest import weights_sha256
    from samewise.runner.training.batches import TrainingBatches
    from samewise.runner.training.build import build
    from samewise.runner.training.loop import train_step
    from samewise.runner.training.session import session

    run = build(composed, composed.project, composed.folder)
    with session(run):
        batches = TrainingBatches(run)
        print("ready", flush=True)
        while input() != "end":
            began, computed = time.perf_counter(), time.process_time()
            train_step(run, next(batches))
            print(time.perf_counter() - began, time.process_time() - computed, flush=True)
        print(weights_sha256(run.model.state_dict()), flush=True)
        shutil.rmtree(folder)
        os._exit(0)  # there is nothing to evaluate or to keep


def measure(overrides: list[str], turns: int = TURNS) -> tuple[float, dict[tuple[int, int], float], bool]:
    """(milliseconds of one thread on one core, median ratio to one thread on as many cores, whether cores changed no bit)."""
    trainers = {way: Trainer([*overrides, f"reproducibility.threads={way[0]}"], way[1]) for way in WAYS}
    times = [{way: [*map(float, trainer.ask("step").split())] for way, trainer in trainers.items()} for _ in range(turns + 2)][2:]
    digests = {way: trainer.end() for way, trainer in trainers.items()}
    same = all(digests[way] == digests[way[0], 1] for way in WAYS)
    ratios = {way: statistics.median(turn[way][way[1] == 1] / turn[1, way[1]][way[1] == 1] for turn in times) for way in WAYS}
    return statistics.median(turn[1, 1][1] for turn in times) * 1000, ratios, same


def measure_settings(overrides: list[str], turns: int = TURNS) -> tuple[float, float, float]:
    """(seconds with plain settings, seconds with the experiment's own, median ratio)."""
    overrides, cores = [one for one in overrides if not one.startswith("batch_size=")], min(2, len(CORES))
    plain = Trainer(
        [*overrides, "reproducibility.threads=1", "memory_format=contiguous"], cores, {"MALLOC_TOP_PAD_": "0"}
    )  # with it samewise leaves glibc as it is
    own = Trainer(overrides, cores)
    pairs = [tuple(float(trainer.ask("step").split()[0]) for trainer in (plain, own)) for _ in range(turns + 2)][2:]
    plain.end(), own.end()
    return statistics.median(one for one, _ in pairs), statistics.median(other for _, other in pairs), statistics.median(other / one for one, other in pairs)


def main(wanted: list[str], say: Callable[[str], None] = print) -> None:
    work = {name: overrides for name, overrides in WORK.items() if not wanted or any(word in name for word in wanted)}
    say(f"{'work':<42} {'1 thread':>10}  " + " ".join(f"{f'{threads} on {cores}':>7}" for threads, cores in WAYS if threads > 1) + "   threads on cores")
    for name, overrides in work.items():
        one, ratios, same = measure(overrides)
        say(f"{name:<42} {one:>7.0f} ms  " + " ".join(f"{ratios[way]:>7.2f}" for way in WAYS if way[0] > 1) + ("" if same else "   CORES CHANGE BITS"))
    say(f"{'work':<42} {'plain':>10}  {'own':>10}  {'ratio':>7}   settings")
    for name, overrides in work.items():
        plain, own, ratio = measure_settings(overrides)
        say(f"{name.rpartition(', batch')[0]:<42} {plain * 1000:>7.0f} ms  {own * 1000:>7.0f} ms  {ratio:>7.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2:])
    else:
        main(sys.argv[1:])
