"""What is around training, for n and ten times n: processor time, memory, and the exponent with which each grows.

    make bench-growth        or: python tests/benchmarks/growth.py [ROW ...]

Each measurement is a process of its own. What a row costs with nothing to do (`n` of 1) is taken off before the exponent is computed: 1 is linear, 0 does
not grow. A time or a size that is below the noise (0.1 s, 8 MiB) has none.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8", MLFLOW_DISABLE_TELEMETRY="true", PYTHONHASHSEED="0")

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from many_runs import REDUCED, copy_runs, train_template

PLAIN = ("dataset=digits", "transforms=images", "tracking=none", "callbacks=none", "checkpoint.every_epochs=null", "evaluate.every_epochs=null")
LINEAR = """\
# One layer
_target_: torch.nn.Sequential
_args_:
  - {_target_: torch.nn.Flatten}
  - {_target_: torch.nn.Linear, in_features: 64, out_features: 10}
"""


@dataclass
class Cost:
    """Processor time, and the peak of a process's memory."""

    seconds: float = 0.0
    mib: float = 0.0


@contextmanager
def measured() -> Iterator[Cost]:
    """Measure what this process does."""
    cost, before = Cost(), time.process_time()
    yield cost
    cost.seconds = time.process_time() - before
    cost.mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def command(folder: Path, *arguments: str) -> Cost:
    """Run a command of samewise; its memory is that of its first process."""
    process = subprocess.Popen([sys.executable, "-m", "samewise", *arguments], cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, arguments
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def on_runs(*arguments: str) -> Callable[[Path, int], Cost]:
    """Return a row: a command among n runs, the second time, when the index has what it needs."""

    def row(folder: Path, n: int) -> Cost:
        names = copy_runs(train_template(folder / "trained"), folder / "runs", n)
        # The index keeps nothing of files that are younger than two seconds
        time.sleep(3)
        words = [names[n // 2].name if argument == "RUN" else argument for argument in arguments]
        command(folder, *words)
        return command(folder, *words)

    return row


def stored(folder: Path, n: int) -> Cost:
    """List n runs of an MLflow store, each a copy of one that was sent."""
    from mlflow import MlflowClient
    from mlflow.entities import Param, RunTag

    uri = f"sqlite:///{folder}/mlflow.db"
    train_template(folder / "runs", [*(x for x in REDUCED if x != "tracking=none"), f"tracking.uri={uri}"])
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("samewise").experiment_id
    (run,) = client.search_runs([experiment])
    metrics = [value for name in run.data.metrics for value in client.get_metric_history(run.info.run_id, name)]
    params, tags = ([kind(*item) for item in values.items()] for kind, values in ((Param, run.data.params), (RunTag, run.data.tags)))
    for number in range(1, n):
        copy = client.create_run(experiment, run_name=f"{run.info.run_name}-{number}").info.run_id
        client.log_batch(copy, metrics, params, [tag for tag in tags if tag.key != "mlflow.runName"])
        client.set_terminated(copy)
    return command(folder, "runs", "--uri", uri)


def points(folder: Path, n: int) -> Cost:
    return command(folder, "sweep", "--list", "experiment=resnet18_digits", f"seed=range({max(1, n // 10)})", f"optimizer.lr=range(1,{1 + min(n, 10)})")


def linear(folder: Path) -> tuple[str, ...]:
    (folder / "configs/model").mkdir(parents=True, exist_ok=True)
    (folder / "configs/model/linear.yaml").write_text(LINEAR)
    return ("train", "--config-dir", "configs", *PLAIN, "model=linear", "batch_size=16", "max_epochs=100000")


def training(folder: Path, n: int) -> Cost:
    return command(folder, *linear(folder), f"max_steps={n}", "trace.every_steps=0")


def traces(folder: Path, n: int) -> Cost:
    for root in ("runs", "others"):
        command(folder, *linear(folder), f"max_steps={n}", f"run_root={folder / root}")
    return command(folder, "diff", *(str(next((folder / root).glob("*/*/config.yaml")).parent) for root in ("runs", "others")))


def sending(folder: Path, n: int) -> Cost:
    """Send n values, a hundred a step, to SQLite."""
    from samewise.runner.tracking.journal import Journal

    run = train_template(folder / "runs", [x for x in REDUCED if x != "tracking=none"])
    journal = Journal(run / "metrics.jsonl", resume_step=None)
    for step in range(n // 100):
        journal.log({f"train/loss_{number}": step / (1 + number) for number in range(100)}, 10 + step)
    journal.close()
    return command(folder, "sync", run.name)


def listing(folder: Path, n: int) -> Cost:
    """List n image files in a hundred folders, the second time."""
    from samewise.datasets.parts.folders import list_by_class

    classes = [f"class_{number:02d}" for number in range(100)]
    for name in classes:
        (folder / name).mkdir()
        for number in range(n // 100):
            (folder / name / f"{number}.jpg").touch()
    list_by_class(folder, classes)
    with measured() as cost:
        assert len(list_by_class(folder, classes).labels) == n // 100 * 100
    return cost


def order(_: Path, n: int) -> Cost:
    """Compute a thousand batches of 128 indices of n samples."""
    import numpy as np

    from samewise.runner.data.order import Bijection

    bijection = Bijection(range(n), seed=0)
    with measured() as cost:
        for batch in range(1000):
            bijection.at(0, np.arange(batch * 128, batch * 128 + 128) % n)
    return cost


def checkpoint(folder: Path, n: int) -> Cost:
    """Write a model of n parameters with the state of Adam."""
    import torch

    from samewise.runner.config.schema import Checkpoint
    from samewise.runner.records.checkpoint_writer import Checkpoints

    weights = torch.rand(n)
    state = {"model": {"weight": weights}, "optimizers": [{"state": {0: {"exp_avg": weights.clone(), "exp_avg_sq": weights.clone()}}}]}
    writer = Checkpoints(folder / "checkpoints", Checkpoint(), {}, {})
    with measured() as cost:
        writer.save(1, state, {})
        writer.wait()
    return cost


def ranks(folder: Path, n: int) -> Cost:
    """Train one step on n processes."""
    return command(folder, "train", *PLAIN, "model=resnet18_small", "max_steps=1", "replicas=8", "strategy=elastic", f"strategy.nproc={n}")


ROWS: dict[str, tuple[Callable[[Path, int], Cost], int, int]] = {
    "runs": (on_runs("runs"), 5000, 50_000),
    "runs --diff": (on_runs("runs", "--diff"), 100, 1000),
    "runs --where SETTING": (on_runs("runs", "--where", "optimizer.lr=0.001"), 1000, 10_000),
    "runs rm RUN": (on_runs("runs", "rm", "RUN"), 1000, 10_000),
    "runs gc": (on_runs("runs", "gc"), 1000, 10_000),
    "runs tag RUN": (on_runs("runs", "tag", "RUN", "team=vision"), 1000, 10_000),
    "runs --uri": (stored, 100, 1000),
    "sweep --list": (points, 100, 1000),
    "train, n steps": (training, 1000, 10_000),
    "diff, n steps": (traces, 500, 5000),
    "sync, n values": (sending, 10_000, 100_000),
    "listing n files": (listing, 10_000, 100_000),
    "order, of n samples": (order, 10**7, 10**8),
    "checkpoint, n parameters": (checkpoint, 10**6, 10**7),
    "train, n processes": (ranks, 2, 8),
}


def measure(row: str, n: int) -> Cost:
    """Measure in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--measure", row, str(n)], check=True, stdout=subprocess.PIPE, text=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def exponent(costs: tuple[float, float, float], sizes: tuple[int, int], noise: float) -> str:
    nothing, small, large = costs
    if large - nothing < noise or small <= nothing:
        return "-"
    return f"{math.log((large - nothing) / (small - nothing)) / math.log(sizes[1] / sizes[0]):.2f}"


def main(rows: list[str]) -> None:
    print(f"{'what':<28} {'n':>11} {'n = 1':>9} {'n':>9} {'10 n':>9} {'exponent':>9} {'MiB: 1':>9} {'n':>7} {'10 n':>7} {'exponent':>9}")
    for row in rows or ROWS:
        _, small, large = ROWS[row]
        costs = [measure(row, n) for n in (1, small, large)]
        seconds, mib = tuple(cost.seconds for cost in costs), tuple(cost.mib for cost in costs)
        print(
            f"{row:<28} {small:>11,} {seconds[0]:>8.2f}s {seconds[1]:>8.2f}s {seconds[2]:>8.2f}s {exponent(seconds, (small, large), 0.1):>9} "
            f"{mib[0]:>9.0f} {mib[1]:>7.0f} {mib[2]:>7.0f} {exponent(mib, (small, large), 8.0):>9}",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(vars(ROWS[sys.argv[2]][0](Path(place), int(sys.argv[3])))))
    else:
        main(sys.argv[1:])
