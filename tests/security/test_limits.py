"""A config cannot bring the machine down, neither by large numbers nor through the commands that a launcher runs."""

from __future__ import annotations

import os
import resource
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from samewise.runner.config.check import problems
from samewise.runner.config.check.machine import require_few_in_all
from samewise.runner.config.compose import compose
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.processes import memory
from samewise.runner.sweepers.space import read_space

BARE = Project(Path("/"))
DIGITS = "experiment=resnet18_digits"


def paths(*overrides: str, project: Project = BARE) -> dict[str, str]:
    return {problem.path: str(problem) for problem in problems(compose([DIGITS, *overrides], project=project), project)}


NUMBERS = {
    "loader.num_workers": "loader.num_workers=100000",
    "loader.prefetch_factor": "loader.prefetch_factor=100000000",
    "replicas": "replicas=100000000",
    "accumulate": "accumulate=100000000",
    "reproducibility.threads": "reproducibility.threads=1000000",
    "evaluate.batch_size": "evaluate.batch_size=100000000000",
    "sweeper.trials": "sweeper=random sweeper.trials=1000000000",
}


def test_numbers_too_large_for_the_machine_are_refused() -> None:
    told = paths(*" ".join(NUMBERS.values()).split())
    assert {key for key in NUMBERS if "too large" in told[key] or "more processes" in told[key]} == NUMBERS.keys()
    assert "too large" in paths("batch_size=100000000000")["batch_size"]


def test_more_ranks_than_the_machine_can_carry_are_not_started(samewise, tmp_path: Path) -> None:
    many = ["strategy=elastic", "strategy.nproc=65536", "replicas=65536", "batch_size=65536"]
    done = samewise("train", DIGITS, "debug=tiny", *many, "tracking=none", f"run_root={tmp_path}")
    assert done.returncode == 2
    assert "strategy.nproc: is more processes than this machine with" in done.stderr


def test_the_limit_on_ranks_counts_the_threads_and_workers_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    def require(nproc: int, *more: str) -> None:
        require_few_in_all(compose([DIGITS, "strategy=elastic", "replicas=64", *more], project=BARE).cfg, nproc)

    require(64)
    require(16, "loader.num_workers=4", "reproducibility.threads=4")
    require(1, "reproducibility.threads=256", "loader.num_workers=64")  # each is within its own limit
    with pytest.raises(ConfigError, match="are 4096 in all, too many for this machine with 2 cores"):
        require(16, "reproducibility.threads=256")
    with pytest.raises(ConfigError, match="are 4160 in all"):
        require(64, "loader.num_workers=64")


LARGE = {
    "a metric": ("recipe.metrics.f1", {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 100_000_000}, "num_classes"),
    "a model": ("model", {"_target_": "samewise.recipes.models.resnet.resnet18_small", "width": 20_000, "num_classes": 10, "in_channels": 1}, "width"),
}


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 100_000_000)
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(free=0))
    monkeypatch.setattr(memory, "_LEAST", 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds what a process can write")
@pytest.mark.parametrize("what", LARGE)
def test_a_component_that_would_fill_memory_is_refused_when_it_is_made(little_memory, what: str) -> None:
    """A metric of a billion classes took 19 GB, and then the kernel killed the command."""
    path, node, key = LARGE[what]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(ConfigError, match="memory") as told:
        instantiate(node, path, allowed=())
    assert told.value.problems[0].path == f"{path}.{key}"
    assert told.value.problems[0].hint == "make it smaller"
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize("values", ["seed=range(1000000000)", "seed=shuffle(range(0,1000000000))", "optimizer.lr=range(0,1,0.000000001)"])
def test_a_sweep_of_too_many_values_is_refused_before_they_are_made(values: str) -> None:
    with pytest.raises(ConfigError, match="too many values"):
        read_space([values], project=BARE)


def test_a_config_sets_only_variables_that_affect_computation() -> None:
    strange = [
        "OMP_TOOL_LIBRARIES",
        "MKL_VERBOSE_OUTPUT_FILE",
        "LD_PRELOAD",
        "PATH",
        "KMP_CPUINFO_FILE",
        "CUDNN_LOGDEST_DBG",
        "ONEDNN_VERBOSE",
        "OMP_NUM_THREADSX",
    ]
    told = paths(*(f"+reproducibility.variables.{name}=x" for name in strange))
    assert {path for path, words in told.items() if "may not set" in words} == {f"reproducibility.variables.{name}" for name in strange}
    assert not paths("+reproducibility.variables.MKL_CBWR=COMPATIBLE")


COMMANDS = {
    "slurm setup": ("slurm", "launcher:\n  setup: [touch mark]\n", "launcher.setup.0"),
    "slurm extra": ("slurm", "launcher:\n  extra: [--wrap=x]\n", "launcher.extra.0"),
    "slurm python": ("slurm", "launcher:\n  python: /tmp/x\n", "launcher.python"),
    "kubernetes image": ("kubernetes", "launcher:\n  image: stranger/x\n", "launcher.image"),
    "kubernetes host path": ("kubernetes", "launcher:\n  volumes: {/host: /}\n", "launcher.volumes./host"),
    "kubernetes pod": ("kubernetes", "launcher:\n  pod: {hostPID: 'true'}\n", "launcher.pod.hostPID"),
    "kubernetes switch": ("kubernetes", "launcher:\n  pod: {hostPID: true}\n", "launcher.pod.hostPID"),
    "kubernetes variable that is a number": ("kubernetes", "launcher:\n  env: {SAMEWISE_TRUST_MODEL: 1}\n", "launcher.env.SAMEWISE_TRUST_MODEL"),
    "ray address": ("ray", "launcher:\n  address: http://stranger:1\n", "launcher.address"),
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    for group in ("experiment", "launcher"):
        (tmp_path / group).mkdir()
    return tmp_path


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_experiment_file_may_not_set_what_a_launcher_runs(kind: str, own: Path) -> None:
    choice, text, path = COMMANDS[kind]
    (own / "experiment" / "of_others.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - /experiment/resnet18_digits\n  - override /launcher: {choice}\n{text}"
    )
    project = Project(own, configs=(own,))
    found = problems(compose(["experiment=of_others"], project=project), project)
    assert [problem.path for problem in found] == [path]
    assert "of_others.yaml" in found[0].where
    assert "of_others.yaml" not in found[0].message
    meant = shlex.split(found[0].hint)[-1]
    assert not problems(compose(["experiment=of_others", meant], project=project), project)


def test_the_command_line_and_own_launcher_files_may_set_what_it_runs(own: Path) -> None:
    assert not paths("launcher=slurm", "launcher.setup=[module load cuda]", "launcher.partition=gpu")
    (own / "launcher" / "ours.yaml").write_text("# Ours\ndefaults:\n  - slurm\nsetup: [module load cuda]\n")
    (own / "experiment" / "ours.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /experiment/resnet18_digits\n  - override /launcher: ours\nlauncher: {partition: gpu, time: 60}\n"
    )
    project = Project(own, configs=(own,))
    assert not problems(compose(["experiment=ours"], project=project), project)
    given = Project(own, configs=(own,), given=(own,))  # the same folder by --config-dir need not be the user's
    assert [problem.path for problem in problems(compose(["experiment=ours"], project=given), given)] == ["launcher.setup.0"]
