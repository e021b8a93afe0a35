"""The tests marked `gpu`, and others that train, pass on the pretended device, in a separate process in which it exists from the start."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pretended_cuda import PretendedDevice, written
from pretended_cuda.steps import counted

from samewise.runner.training.recorder import Recorder

RANKS = "tests/runner/test_any_number_of_ranks_of_recipes.py::test_processes_that_share_a_gpu_give_the_bits_of_one_process"
"""Has its own test here, as it takes minutes. In bf16 it needs a real device: autocast does not reach the pretended one, which would compute in fp32."""
NEEDS_HARDWARE: Mapping[str, str] = {
    "tests/datasets/test_encoded.py::test_pixels_are_right_while_the_device_is_busy": "it is what a device does while it computes that is tested",
    "tests/pretend/test_one_wait.py::test_the_host_waits_for_a_real_device_at_most_once_per_step": "it is what CUDA's own profiler sees that is tested",
    "tests/runner/test_digest_kernel.py::test_a_device_digests_a_model_by_the_kernel_as_the_cpu_does_without": "it is Triton's kernel that is tested",
    "tests/runner/test_precision.py::test_cudnn_repeats_forward_and_backward_passes_with_dropout": "it is cuDNN that is tested",
    "tests/runner/test_precision.py::test_products_and_convolutions_on_cuda_round_as_the_format_requires": "it is how CUDA's kernels round that is tested",
    "tests/runner/test_sync_batch_norm.py::test_two_processes_normalise_over_the_whole_batch": "SyncBatchNorm's operators are CUDA's alone",
}
"""The tests marked `gpu` that only a real device can pass, and why."""
WITH_CUDA = (
    *("ema.py::test_the_average_matches_the_textbook", "frozen.py::test_layers_frozen_until_an_epoch_are_trained_from_its_first_step"),
    *("frozen.py::test_only_frozen_layers_keep_their_parameters_and_statistics", "initial_weights.py"),
    *("initialise.py::test_every_choice_fits_a_resnet[xavier]", "optimizers.py"),
    "predict.py::test_a_batch_predicts_the_same_and_a_bad_file_spoils_no_other[classification]",
    *("predict.py::test_a_recording_is_resynthesised_the_same_whatever_other_files_are_given", "predict.py::test_a_recording_is_split_into_its_speakers"),
    *("predict.py::test_a_recording_is_transcribed", "predict.py::test_boxes_are_found_in_an_image_and_drawn"),
    *("predict.py::test_the_moving_average_of_the_weights_predicts_and_is_evaluated[classification]", "several_optimizers.py", "trace.py"),
    *("verify.py::test_eval_gives_the_metrics_of_training", "verify.py::test_verify_reports_the_same_bits"),
)
"""Tests of tests/runner/test_* that train, predict or compute on whatever device this process has; of those that would find the same faults, one."""


def run(repository: Path, report: Path, environment: Mapping[str, str], *arguments: str) -> dict[str, str]:
    """Run tests on the pretended device; return the outcome of each by `file::name`: passed, or what went wrong."""
    paths = os.pathsep.join(map(str, (repository / ".package", repository / "tests" / "pretend")))
    command = [sys.executable, "-m", "pytest", "-p", "pretended_cuda.plugin", "-p", "no:cacheprovider", "-q", f"--junitxml={report}", *arguments]
    done = subprocess.run(command, cwd=repository, env={**environment, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        wrong = [f"{kind.tag}: {kind.get('message', '')}" for kind in case if kind.tag in ("failure", "error", "skipped")]
        found[f"{(case.get('classname') or '').replace('.', '/')}.py::{case.get('name')}"] = "; ".join(wrong) or "passed"
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_gpu_test_passes_except_those_that_need_a_real_device(repository: Path, clean_environment: dict[str, str], tmp_path: Path):
    marked = [str(file) for file in (repository / "tests").rglob("test_*.py") if re.search(r"mark\.gpu\b", file.read_text())]  # fewer than all to import
    without = [argument for name in (RANKS, *NEEDS_HARDWARE) for argument in ("--deselect", name)]
    found = run(repository, tmp_path / "report.xml", clean_environment, "-m", "gpu", *without, *marked)
    assert {name: outcome for name, outcome in found.items() if outcome != "passed"} == {}
    assert len(found) > 50


def test_the_tests_that_need_a_real_device_exist(repository: Path):
    for name in (RANKS, *NEEDS_HARDWARE):
        file, _, function = name.partition("::")
        text = (repository / file).read_text()
        assert f"def {function}(" in text
        assert "@pytest.mark.gpu" in text[: text.index(f"def {function}(")].rpartition("\n\n\n")[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tests_that_train_pass_on_the_pretended_device(repository: Path, clean_environment: dict[str, str], tmp_path: Path):
    chosen = [f"tests/runner/test_{name}" for name in WITH_CUDA]
    found = run(repository, tmp_path / "report.xml", clean_environment, "-m", "not slow and not gpu", *chosen)
    assert {name: outcome for name, outcome in found.items() if outcome != "passed"} == {}
    assert len(found) > 90


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "recipe", ["classification", *(pytest.param(name, marks=pytest.mark.long) for name in ("detection", "speech_recognition", "separation", "vocoder"))]
)
def test_processes_that_share_the_device_give_the_bits_of_one(repository: Path, clean_environment: dict[str, str], tmp_path: Path, recipe: str):
    found = run(repository, tmp_path / "report.xml", clean_environment, f"{RANKS}[{recipe}-fp32]")
    assert [*found.values()] == ["passed"], found


@pytest.mark.slow
@pytest.mark.long
def test_the_script_compares_the_bits_of_trainings_and_prints_the_results(repository: Path, clean_environment: dict[str, str]) -> None:
    command = [sys.executable, repository / "tests/gpu/day.py", "--device", "cpu", "--only", "bits", "--match", "JPEG", "--jobs", "2"]
    done = subprocess.run(command, env={**clean_environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line for line in done.stdout.splitlines() if line.startswith("ok")]
    assert [line.split(":")[0] for line in results] == ["ok  classification"] * 3
    assert all("same bits (" in line for line in results)
    assert done.stdout.splitlines()[-1] == "3 of 3 as they should be"


STEPS = (
    "debug=tiny",
    "device=cuda",
    "tracking=none",
    "loader.num_workers=0",
    "max_steps=4",
    "evaluate.every_steps=2",
    "evaluate.limit=1",
    "dataset.samples=16",
)
CLIPS = {"vocoder": ("dataset.samples=200", "dataset.clips=16", "dataset.valid_clips=4")}
"""The number of samples of a vocoder is that of one clip."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", written.RECIPES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    device: PretendedDevice, samewise: Callable[..., Any], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def train(root: Path) -> Any:
        return samewise("train", *written.RECIPES[recipe], *STEPS, *CLIPS.get(recipe, ()), f"run_root={root}", "--json")

    whole = train(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    with monkeypatch.context() as patch:
        record = Recorder.record

        def stopped(recorder: Recorder, outcome: Any) -> None:
            record(recorder, outcome)
            if outcome.step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

        patch.setattr(Recorder, "record", stopped)
        assert train(tmp_path / "stopped").returncode == 3
    resumed = train(tmp_path / "stopped")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 2" in resumed.stderr
    one, other = (Path(json.loads(done.stdout.splitlines()[-1])["folder"]) for done in (whole, resumed))
    assert (one / "trace.jsonl").read_bytes() == (other / "trace.jsonl").read_bytes()
    assert json.loads((one / "environment.json").read_text())["decides"]["device"]["kind"] == "cuda"


@pytest.mark.parametrize("recipe", written.RECIPES)
def test_launches_copies_and_waits_of_a_step_and_a_batch_are_as_recorded(recipe: str, tmp_path: Path):
    expected = written.read()
    if expected["versions"] != written.versions():
        pytest.skip(f"counts.json is of {expected['versions']}, here are {written.versions()}: other versions may make other operators of a function")
    told = written.differences(expected["recipes"][recipe], counted(written.RECIPES[recipe], tmp_path))
    assert not told, "\n".join(["", *told, f"If that is meant: {written.COMMAND} {recipe}"])


def test_every_recipe_has_recorded_counts(repository: Path):
    recipes = {file.stem for file in (repository / "configs" / "recipe").glob("*.yaml")}
    assert recipes - {"instance_segmentation"} == {*written.RECIPES} == {*written.read()["recipes"]}
