"""Many tiny jobs on this machine: `samewise sweep` against Hydra's basic launcher, as ratios within one run; and how long a thousand points take to check.

    make bench        or: python tests/benchmarks/bench_sweep.py [JOBS]        (12 jobs, if not given; 100 take a quarter of an hour on two cores)

Each job trains the same network (64-64-10) on scikit-learn's digits for the same steps, evaluates, and logs losses and accuracy to MLflow in an SQLite file.
By hand it is a script of one page, which imports torch and mlflow; Hydra's basic launcher starts it with one setting after the other: in a process of its own
for each, so that nothing of a job is left to the next one, and, for comparison, all in one process, which imports them once.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8", MLFLOW_DISABLE_TELEMETRY="true")

import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = """
import argparse, os
import mlflow, torch
from sklearn.datasets import load_digits

def train(lr, seed, store):
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("by hand")
    with mlflow.start_run(run_name=f"lr={lr} seed={seed}"):
        mlflow.log_params({"lr": lr, "seed": seed})
        for step in range(40):
            take = torch.randint(1438, (64,))
            loss = torch.nn.functional.cross_entropy(model(images[take]), labels[take])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                mlflow.log_metric("train/loss", loss.item(), step)
        with torch.no_grad():
            mlflow.log_metric("valid/accuracy", (model(images[1438:]).argmax(1) == labels[1438:]).float().mean().item(), 40)

if __name__ == "__main__":
    given = argparse.ArgumentParser()
    given.add_argument("--lr", type=float)
    given.add_argument("--seed", type=int)
    given.add_argument("--store")
    train(**vars(given.parse_args()))
"""
APP = """
import subprocess, sys
import hydra

@hydra.main(version_base=None, config_path=None, config_name=None)
def main(cfg):
    if cfg.alone:
        subprocess.run([sys.executable, cfg.job, f"--lr={cfg.lr}", f"--seed={cfg.seed}", f"--store={cfg.store}"], check=True, stderr=subprocess.DEVNULL)
    else:
        from job import train
        train(cfg.lr, cfg.seed, cfg.store)

main()
"""
MLP = """\
# 64-64-10
_target_: torch.nn.Sequential
_args_:
  - {_target_: torch.nn.Flatten}
  - {_target_: torch.nn.Linear, in_features: 64, out_features: 64}
  - {_target_: torch.nn.ReLU}
  - {_target_: torch.nn.Linear, in_features: 64, out_features: 10}
"""
OURS = ("dataset=digits", "transforms=images", "model=mlp", "batch_size=64", "max_steps=40", "optimizer.momentum=0.9", "tracking.log_every_steps=10")


def took(*command: str, folder: Path) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return time.perf_counter() - began


def by_hydra(folder: Path, jobs: int, *, alone: bool) -> float:
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    (folder / "app.py").write_text(APP)
    settings = f"+seed=range({jobs // 2})", "+lr=0.05,0.1", f"+store=sqlite:///{folder}/mlflow.db", f"+job={folder}/job.py", f"+alone={str(alone).lower()}"
    seconds = took(sys.executable, "app.py", "-m", *settings, folder=folder)
    require(f"sqlite:///{folder}/mlflow.db", "by hand", jobs)
    return seconds


def by_samewise(folder: Path, jobs: int) -> float:
    (folder / "configs" / "model").mkdir(parents=True)
    (folder / "configs" / "model" / "mlp.yaml").write_text(MLP)
    seconds = took(
        sys.executable, "-m", "samewise", "sweep", "--config-dir", "configs", *OURS, f"seed=range({jobs // 2})", "optimizer.lr=0.05,0.1", folder=folder
    )
    require(f"sqlite:///{folder}/runs/mlflow.db", "samewise", jobs)
    return seconds


def require(store: str, experiment: str, jobs: int) -> None:
    """Require that all runs are in MLflow, finished, each with its accuracy."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id], max_results=1000)
    assert len(runs) == jobs
    assert all(run.info.status == "FINISHED" and 0.5 < run.data.metrics["valid/accuracy"] <= 1 for run in runs)


def checked(folder: Path, points: int) -> float:
    folder.mkdir()
    varied = f"seed=range({points // 10})", "optimizer.lr=range(1,11)"
    return took(sys.executable, "-m", "samewise", "sweep", "--list", "experiment=resnet18_digits", *varied, folder=folder)


def main(jobs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        by_samewise(place / "warm", 2), by_hydra(place / "hydra_warm", 2, alone=True)
        ours = by_samewise(place / "ours", jobs)
        theirs = {"a process for each job": by_hydra(place / "alone", jobs, alone=True), "all in one process": by_hydra(place / "together", jobs, alone=False)}
        print(f"{jobs} jobs by samewise sweep: {ours:.1f} s, {ours / jobs:.2f} s a job")
        for how, seconds in theirs.items():
            print(f"by Hydra's basic launcher, {how}: {seconds:.1f} s, {seconds / jobs:.2f} s a job; samewise takes {ours / seconds:.2f} of it")
        print(f"1000 points composed and checked: {checked(place / 'listed', 1000):.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
