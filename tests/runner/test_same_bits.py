"""The promise: the same experiment gives the same bits, however often it is run, killed and resumed, and whichever process loads its samples."""

import contextlib
import json
import os
import pty
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import samewise_runner_promise as promise
from samewise_forked import Forked
from samewise_tiny import DIGITS, QUIET

SMALL = ["experiment=resnet18_digits", "model.width=8", "max_epochs=2", "checkpoint.every_steps=3", "callbacks=none", "transforms=cifar", "transforms.size=8"]
STEPS = 44


@pytest.fixture(scope="module")
def experiment():
    return promise.Promise(SMALL)


@pytest.fixture(scope="module")
def reference(experiment, tmp_path_factory) -> Path:
    """One undisturbed run, as a user starts it."""
    return experiment.run_afresh(tmp_path_factory.mktemp("reference"), "tracking=none", "evaluate.pictures=false")


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_second_run_has_the_same_bits_with_any_number_of_workers(experiment, reference, tmp_path, num_workers):
    again = experiment.run(tmp_path, "tracking=none", "evaluate.pictures=false", f"loader.num_workers={num_workers}")
    assert promise.weights(again) == promise.weights(reference)
    assert promise.trace(again) == promise.trace(reference)
    assert again.name == reference.name


def test_another_seed_gives_other_bits(experiment, reference, tmp_path):
    other = experiment.run(tmp_path, "tracking=none", "evaluate.pictures=false", "seed=1")
    assert promise.weights(other) != promise.weights(reference)
    assert other.name != reference.name


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_finishes_with_the_same_bits(experiment, reference, tmp_path, kills):
    chance, killed = random.Random(20), 0
    while killed < kills and experiment.kill_within(tmp_path, chance, f"loader.num_workers={killed % 2}"):
        killed += 1
    folder = experiment.run(tmp_path)
    assert killed >= 0.7 * kills
    assert promise.weights(folder) == promise.weights(reference)
    assert promise.trace(folder) == promise.trace(reference)
    assert_each_point_once(folder, tmp_path)


def assert_each_point_once(folder: Path, run_root: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_root}/mlflow.db")
    runs = client.search_runs([found.experiment_id for found in client.search_experiments()])
    assert len(runs) == 1
    assert runs[0].info.status == "FINISHED"
    losses = client.get_metric_history(runs[0].info.run_id, "train/loss")
    assert sorted(point.step for point in losses) == list(range(1, STEPS + 1))
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()[1:]]
    assert {point.step: point.value for point in losses} == {line["step"]: float.fromhex(line["loss"]) for line in lines}
    accuracies = client.get_metric_history(runs[0].info.run_id, "valid/accuracy")
    assert [point.step for point in accuracies] == [22, 44]


def group_of(leader: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_sigterm_to_the_group_with_workers_saves_and_the_same_command_resumes(experiment, reference, tmp_path):
    """As SLURM and `kill -- -PGID` send it."""
    more = ["tracking=none", "evaluate.pictures=false", "checkpoint.every_steps=null"]
    command = ["train", *experiment.overrides, f"run_root={tmp_path}", *more, "loader.num_workers=2"]
    process = Forked(*command, said=tmp_path / "said", before="os.setpgid(0, 0)")
    while promise.trace_lines(tmp_path) < 10:
        assert process.poll() is None
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 3, process.errors
    for _ in range(100):
        if not (left := group_of(process.pid)):
            break
        time.sleep(0.05)
    assert not left
    assert "stopped by SIGTERM, and saved" in process.errors
    assert "Traceback" not in process.errors
    stopped = promise.trace_lines(tmp_path) - 1
    assert [int(path.name.removeprefix("step-")) for path in tmp_path.glob("*/*/checkpoints/step-*")] == [stopped]
    folder = experiment.run(tmp_path, *more)
    assert promise.weights(folder) == promise.weights(reference)
    assert promise.trace(folder) == promise.trace(reference)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setsid") is None, reason="there is no setsid, which gives a process a terminal of its own")
def test_a_run_whose_terminal_is_closed_saves(tmp_path):
    """The kernel then sends SIGHUP to all of its processes, the loader's workers too, and no more output can be written."""
    terminal, its_end = pty.openpty()
    more = ["tracking=none", "evaluate.pictures=false", "checkpoint.every_steps=null", "loader.num_workers=1", f"run_root={tmp_path}"]
    command = ["setsid", "--ctty", sys.executable, "-m", "samewise", "train", *SMALL, *more]
    with subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end) as process:
        os.close(its_end)
        while promise.trace_lines(tmp_path) < 10:
            assert process.poll() is None
            if select.select([terminal], [], [], 0.005)[0]:
                os.read(terminal, 4096)
        os.close(terminal)
        assert process.wait(60) == 3
    stopped = promise.trace_lines(tmp_path) - 1
    assert [int(path.name.removeprefix("step-")) for path in tmp_path.glob("*/*/checkpoints/step-*")] == [stopped]


def test_a_finished_run_answers_without_training(samewise, reference):
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*") if path.is_file()}
    done = samewise("train", *SMALL, f"run_root={reference.parents[1]}", "tracking=none", "evaluate.pictures=false", code=0)
    assert "nothing to train" in done.stdout
    assert promise.weights(reference) in done.stdout
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("*") if path.is_file()} == before


COMMON = [*QUIET, "reproducibility.threads=1", "checkpoint.every_steps=3"]
RECIPES = {
    "detection": ["experiment=retinanet_coco", "transforms=detection_ssd", "batch_size=2", "replicas=2", "model.channels=16", "evaluate.every_epochs=5"],
    "autoencoder": ["experiment=autoencoder_digits", "model.variational=true"],
    "regression": ["recipe=regression", "recipe.reads=image", "model=resnet18_regression", "model.model.width=4", "optimizer.lr=0.01"],
    "instance_segmentation": ["experiment=maskrcnn_digit_masks", "batch_size=2", "replicas=2", "evaluate.every_epochs=5"],
    "segmentation": ["experiment=fcn_digit_masks", "transforms=segmentation", "replicas=2"],
    "separation": ["experiment=conv_tasnet_spoken_digits"],
    "vocoder": ["experiment=wavernn_spoken_digits"],
    "audio_classification": ["experiment=audio_classification_spoken_digits", "model.width=4"],
    "text_classification": ["experiment=transformer_unicode_categories", "model.dropout=0.1"],
    "language_modelling": ["experiment=gpt_unicode_names", "recipe.objective=masked", "model.dropout=0.1"],
    "speech_recognition": ["experiment=wav2letter_spoken_digits", "model.width=16", "model.top_width=32"],
}


@pytest.mark.slow  # test_resuming.py stops every recipe, too
@pytest.mark.parametrize("recipe", [pytest.param(one, marks=() if one == "speech_recognition" else pytest.mark.long) for one in RECIPES])
def test_each_recipe_gives_the_same_bits_with_workers_and_when_killed(recipe, tmp_path):
    experiment = promise.Promise([*RECIPES[recipe], *COMMON])
    reference = experiment.run(tmp_path / "reference")
    assert promise.trace(reference).count(b"\n") == 21
    for number_of_workers in (0, 3):
        again = experiment.run(tmp_path / f"again{number_of_workers}", f"loader.num_workers={number_of_workers}")
        assert promise.weights(again) == promise.weights(reference)
        assert promise.trace(again) == promise.trace(reference)
    chance, kills = random.Random(3), 0
    while kills < 3 and experiment.kill_within(tmp_path / "killed", chance, f"loader.num_workers={kills % 2}"):
        kills += 1
    resumed = experiment.run(tmp_path / "killed")
    assert kills >= 2
    assert promise.weights(resumed) == promise.weights(reference)
    assert promise.trace(resumed) == promise.trace(reference)


CODE = """
import os

from torch import nn

class Branches(nn.Module):
    def __init__(self, order="set"):
        super().__init__()
        kinds = ["edge", "blob", "line", "dot", "grid", "ring", "star", "wave"]
        if order == "set":
            kinds = set(kinds)
        elif order == "rank" and os.environ.get("RANK") == "1":
            kinds = kinds[::-1]
        self.branches = nn.ModuleDict({kind: nn.Linear(64, 10) for kind in kinds})

    def forward(self, pixels):
        return sum(self.branches[kind](pixels.flatten(1)) for kind in sorted(self.branches))
"""
QUICK = [*DIGITS, "dataset=digits", "transforms=images", "param_groups.norms=null", "max_steps=6"]
TINY = [*QUICK, "model=branches"]
HASH = "import sys; print(sys.flags.hash_randomization, hash('same'), sys.argv[1:])"


@pytest.fixture
def lab(tmp_path: Path) -> list[str]:
    (tmp_path / "lab_of_sets").mkdir()
    (tmp_path / "lab_of_sets" / "__init__.py").write_text(CODE)
    (tmp_path / "configs" / "model").mkdir(parents=True)
    (tmp_path / "configs" / "model" / "branches.yaml").write_text("# Branches\n_target_: lab_of_sets.Branches\norder: set\n")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'lab'\n")
    return ["--package", "lab_of_sets", "--config-dir", str(tmp_path / "configs")]


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    line = [sys.executable, "-m", "samewise", *arguments, f"run_root={folder}"]
    return subprocess.Popen(line, cwd=folder.parent, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    said = process.communicate(timeout=300)
    assert process.returncode == code, said[1]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, "7", "random"])
def test_the_command_fixes_the_hash_seed_and_keeps_its_arguments(seed: str | None):
    code = f"import samewise.__main__ as command, samewise.runner.cli as cli; cli.entry = lambda: exec({HASH!r}); command.main()"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"} | ({"PYTHONHASHSEED": seed} if seed else {})
    line = [sys.executable, "-W", "ignore", "-c", code, "a b", "--c=d"]
    said = {subprocess.run(line, env=variables, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    fixed = subprocess.run([sys.executable, "-c", HASH, "a b", "--c=d"], env={**variables, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True)
    assert said == {fixed.stdout}
    assert fixed.stdout.startswith("0 ")
    assert fixed.stdout.endswith("['a b', '--c=d']\n")


@pytest.mark.slow
def test_a_model_created_from_a_set_is_resumed_and_spread_over_ranks_with_the_same_bits(lab: list[str], tmp_path: Path):
    whole = json.loads(finish(command(tmp_path / "whole", "train", *lab, *TINY, "replicas=2", "--json"))[0])["weights_sha256"]
    killed = command(tmp_path / "killed", "train", *lab, *TINY, "replicas=2", "max_steps=6", "checkpoint.every_steps=1")
    while not list((tmp_path / "killed").glob("*/*/checkpoints/step-*")):
        assert killed.poll() is None, killed.communicate()[1]
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    again = finish(command(tmp_path / "killed", "train", *lab, *TINY, "replicas=2", "max_steps=6", "checkpoint.every_steps=1", "--json"))[0]
    ranks = finish(command(tmp_path / "ranks", "train", *lab, *TINY, "replicas=2", "strategy=elastic", "strategy.nproc=2", "--json"))[0]
    assert json.loads(again)["weights_sha256"] == json.loads(ranks)["weights_sha256"] == whole
