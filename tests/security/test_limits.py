"""A config cannot bring the machine down, neither by large numbers nor through the commands that a launcher runs."""

import shlex
from pathlib import Path

import pytest

from samewise.runner.config.check import problems
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
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
    done = samewise("train", DIGITS, "debug=tiny", *many, "tracking=none", f"run_root={tmp_path}", code=2)
    assert "strategy.nproc: is more processes than this machine with" in done.stderr


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


@pytest.mark.parametrize("kind", COMMANDS)
def test_an_experiment_file_may_not_set_what_a_launcher_runs(kind: str, tmp_path: Path) -> None:
    for group in ("experiment", "launcher"):
        (tmp_path / group).mkdir()
    choice, text, path = COMMANDS[kind]
    (tmp_path / "experiment" / "of_others.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - /experiment/resnet18_digits\n  - override /launcher: {choice}\n{text}"
    )
    project = Project(tmp_path, configs=(tmp_path,))
    found = problems(compose(["experiment=of_others"], project=project), project)
    assert [problem.path for problem in found] == [path]
    assert "of_others.yaml" in found[0].where
    assert "of_others.yaml" not in found[0].message
    meant = shlex.split(found[0].hint)[-1]
    assert not problems(compose(["experiment=of_others", meant], project=project), project)
