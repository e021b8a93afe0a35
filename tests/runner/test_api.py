"""samewise from Python: it gives the commands' bits, whatever the process has done to torch, and raises their errors as exceptions."""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image
from safetensors.torch import load_file

import samewise as sw
from samewise.runner.errors import CheckpointError, ConfigError, DataError, TrainingError
from samewise.runner.processes import variables

TINY = [
    *("experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "max_steps=6", "callbacks=[ema]"),
    "callbacks.ema.every_steps=1",
]


def state() -> list[Any]:
    """Settings that a user may have changed, and the state of the generators."""
    return [
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.backends.mkldnn.enabled,
        (torch.full((), 1e-310, dtype=torch.float64) * 1).item(),
        torch.random.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]


@pytest.fixture(scope="module")
def disturbed() -> Iterator[None]:
    """A notebook in which many settings were changed."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(True)
    torch._C._set_mkldnn_enabled(False)
    torch.set_grad_enabled(False)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(deterministic)
    torch.set_flush_denormal(False)
    torch._C._set_mkldnn_enabled(True)
    torch.set_grad_enabled(True)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of a run that the command trained."""
    from samewise.runner.cli import main

    root = tmp_path_factory.mktemp("command")
    assert main(["train", *TINY, f"run_root={root}"]) == 0
    (summary,) = root.glob("*/*/summary.json")
    return {**json.loads(summary.read_text()), "folder": summary.parent}


@pytest.fixture(scope="module")
def trained(command: dict[str, Any], disturbed: None, tmp_path_factory: pytest.TempPathFactory) -> sw.Trained:
    before = state()
    found = sw.train(*TINY, f"run_root={tmp_path_factory.mktemp('python')}")
    assert state() == before, "what the user had set is as it was"
    return found


def test_training_gives_the_commands_bits_whatever_the_process_has_set(trained: sw.Trained, command: dict[str, Any]) -> None:
    assert trained.weights_sha256 == command["weights_sha256"]
    assert trained.metrics == command["metrics"]["final"]
    assert (trained.steps, trained.level, trained.is_new) == (6, "R2", True)
    assert (trained.folder / "trace.jsonl").read_bytes() == (command["folder"] / "trace.jsonl").read_bytes()


def test_a_loaded_model_predicts_what_the_command_predicts(samewise, trained: sw.Trained, command: dict[str, Any], tmp_path: Path) -> None:
    for name, colour in (("a", 40), ("b", 200)):
        Image.effect_noise((40, 40), colour).save(tmp_path / f"{name}.png")
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    said = samewise("predict", command["folder"], *files, "--weights", "ema", "--json").stdout.splitlines()
    found = sw.predict(trained, files, weights="ema", output=tmp_path / "made")
    assert [one.values() for one in found] == [{key: value for key, value in json.loads(line).items() if key not in ("file", "files")} for line in said]
    model, transforms, config = loaded = sw.load(trained, checkpoint="last")
    batch = transforms(*files)
    assert batch["image"].shape[0] == 2
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
    assert model(batch["image"]).shape == (2, config.cfg.dataset.num_classes)
    assert config.cfg.model.width == 4
    image = Image.open(files[0]).convert("RGB")
    assert torch.equal(transforms((image, 0))["image"], batch["image"][:1]), "an image without a label goes through with any"
    with pytest.raises(DataError, match=r"^transforms: .*if you do not know the label, pass any: transforms\(\(image, 0\)\)"):
        transforms(image)
    with pytest.raises(ConfigError, match=r"weights: is for a run that is not loaded yet; hint: give it to samewise\.load"):
        sw.predict(loaded, *files, weights="ema")
    files[0].write_bytes(files[0].read_bytes()[:300])
    with pytest.raises(ConfigError, match=r"is a damaged image.*; hint: the file cannot be decoded"):
        sw.predict(loaded, *files)


def test_evaluating_exporting_and_comparing_give_what_the_commands_give(samewise: Any, trained: sw.Trained, command: dict[str, Any], tmp_path: Path) -> None:
    before = state()
    found = sw.evaluate(trained, checkpoint="last", pictures=tmp_path / "pictures")
    exported = sw.export(trained, tmp_path / "python", checkpoint="last")
    compared = sw.diff(trained, command["folder"])
    assert state() == before
    assert found.metrics == trained.metrics
    assert (found.run, found.step, found.split, found.changed) == (trained.folder, 6, "valid", [])
    (part,) = exported.parts
    assert [held.format for held in part.formats if held.sound] == ["pt2"]
    weights = sw.load(trained, checkpoint="last").model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(part.folder / "weights.safetensors").items())
    assert (compared.same, compared.steps, compared.parts) == (True, 6, None)


def test_a_run_is_verified_in_the_process_that_has_changed_settings(trained: sw.Trained) -> None:
    before = state()
    found = sw.verify(trained)
    assert (found.same, found.compared) == (True, 6)
    other = sw.verify(trained, "seed=1", steps=2, coarse=True)
    assert state() == before
    assert other.parts is not None
    assert (other.same, other.parts["stage"]) == (False, "initial")
    assert "the config differs: seed: 0 there, 1 here" in other.messages


def test_runs_are_listed_as_a_table(trained: sw.Trained, tmp_path: Path) -> None:
    table = sw.runs(trained.folder.parents[1], where="state=finished", sort="valid/accuracy", diff=True)
    (row,) = table[table["folder"] == str(trained.folder)].to_dict("records")
    assert row["valid/loss"] == trained.best["valid/loss"]
    assert str(table["changed"].dtype).startswith("datetime64")
    empty = sw.runs(tmp_path)
    assert len(empty) == 0
    assert set(empty.columns) <= set(table.columns)


def test_errors_are_raised_as_exceptions(trained: sw.Trained, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'optimizer\.lr'"):
        sw.compose("lr=1")
    with pytest.raises(ConfigError, match="at least 1") as refused:
        sw.train("max_epochs=0", "optimizer.lr=-1", f"run_root={tmp_path}")
    assert len(refused.value.problems) == 2
    with pytest.raises(ConfigError, match="one composed config"):
        sw.train(sw.compose("seed=1"), "seed=2")
    with pytest.raises(ConfigError, match="no such run"):
        sw.load("nothing", run_root=tmp_path)
    with pytest.raises(CheckpointError):
        sw.load(trained.folder, checkpoint=5000)
    with pytest.raises(ConfigError, match=r"none\.png") as refused:
        sw.predict(trained.folder, tmp_path / "none.png", tmp_path / "nothing.png")
    assert len(refused.value.problems) == 2
    with pytest.raises(TrainingError, match="not finite"):
        sw.train(*TINY, "optimizer.lr=1e30", f"run_root={tmp_path}")
    with pytest.raises(AttributeError, match="trian"):
        sw.trian  # noqa: B018


@pytest.mark.parametrize("block", [torch.autocast("cpu", torch.bfloat16), torch.device("meta")])
def test_a_block_that_would_change_the_bits_is_refused(trained: sw.Trained, block: Any, tmp_path: Path) -> None:
    with block, pytest.raises(ConfigError, match="outside of the block"):
        sw.train(*TINY, "seed=3", f"run_root={tmp_path}")
    assert not list(tmp_path.glob("*/*/trace.jsonl"))


@pytest.mark.parametrize("imported", ["torch is imported", "CUDA is used"])
def test_a_variable_already_read_by_a_library_is_refused_and_an_unread_one_is_set(monkeypatch: pytest.MonkeyPatch, imported: str) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(variables, "_REPLACED", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: imported == "CUDA is used")
    settings = partial(SimpleNamespace, threads=1, deterministic=True)
    if imported == "CUDA is used":
        with pytest.raises(ConfigError, match="before CUDA is used"):
            variables.prepare(settings(variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}))
    else:
        variables.prepare(settings(variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(ConfigError, match="before torch is imported"):
            variables.prepare(settings(variables={"MKL_CBWR": "COMPATIBLE"}))


def test_a_variable_of_an_earlier_experiment_is_set_back_or_refused_once_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(variables, "_REPLACED", {})
    settings, set_here = partial(SimpleNamespace, threads=1, deterministic=True), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    variables.prepare(settings(variables=set_here))
    variables.prepare(settings(variables={}))
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    variables.prepare(settings(variables=set_here))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG: was set by an earlier experiment"):
        variables.prepare(settings(variables={}))
    variables.prepare(settings(variables={}, deterministic=False))


COMPUTES_FIRST = """
import torch
torch.ones(2, 2) @ torch.ones(2, 2)
import samewise
samewise.train("experiment=resnet18_digits", "debug=tiny")
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch was built without MKL")
def test_a_product_before_samewise_is_imported_is_refused(tmp_path: Path) -> None:
    outside = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run([sys.executable, "-c", COMPUTES_FIRST], cwd=tmp_path, env=outside, capture_output=True, text=True, check=False)
    assert "import samewise first" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_trainings_in_threads_have_the_bits_of_trainings_alone(command: dict[str, Any], tmp_path: Path) -> None:
    found = dict[str, str]()

    def train(seed: str) -> None:
        found[seed] = sw.train(*TINY, *([f"seed={seed}"] if seed else []), f"run_root={tmp_path}").weights_sha256

    threads = [threading.Thread(target=train, args=(seed,)) for seed in ("", "1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[""] == command["weights_sha256"]
    assert found["1"] == sw.train(*TINY, "seed=1", f"run_root={tmp_path}", fresh=True).weights_sha256


@pytest.mark.slow
def test_the_first_training_of_a_process_leaves_its_generators_as_they_were(tmp_path: Path) -> None:
    """Some libraries draw when they are imported."""
    arguments = ", ".join(map(repr, [*TINY, "max_steps=1", f"run_root={tmp_path}"]))
    code = f"import random, samewise; random.seed(3); before = random.getstate(); samewise.train({arguments}); assert random.getstate() == before"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_importing_and_composing_load_no_heavy_packages(tmp_path: Path) -> None:
    code = "import sys, samewise; samewise.compose('experiment=resnet18_digits'); print({'torch', 'mlflow', 'pandas'} & set(sys.modules), dir(samewise))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("set() ")
    assert "'train'" in done.stdout


def test_training_imports_matplotlib_only_to_draw(tmp_path: Path) -> None:
    overrides = "'experiment=resnet18_digits', 'debug=tiny', 'max_steps=1', 'tracking=none', 'evaluate.pictures=false'"
    code = f"import sys, samewise; samewise.train({overrides}); print({{'matplotlib', 'mlflow', 'torchmetrics', 'scipy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a folder that is not there": (lambda: sw.runs("nothere"), "run_root: the folder does not exist"),
    "a run elsewhere": (lambda: sw.load("3f2a", run_root="nothere"), "if it is not in nothere, give the path of its folder"),
    "a condition": (lambda: sw.runs(".", where="x"), "where: is not a valid condition"),
    "a package": (lambda: sw.compose("model._target_=labs.Net", packages="labs"), "packages: this package cannot be found"),
    "a folder of configs": (lambda: sw.compose(config_dirs="nothere"), "correct `configs` or config_dirs"),
    "a list of overrides": (lambda: sw.compose(["model=resnet18"]), "samewise.compose(*overrides)"),  # pyright: ignore[reportArgumentType]
    "a folder for a new sweep": (lambda: sw.sweep("seed=1,2", run_root="x"), "run_root: is where a sweep is looked up by its id"),
    "a number": (lambda: sw.compose("experiment=resnet18_digits", 5), "samewise.compose('experiment=NAME', "),  # pyright: ignore[reportArgumentType]
    "an override's name": (lambda: sw.train(experiment="x"), "overrides are strings: samewise.train('experiment=x')"),  # pyright: ignore
    "an override of a run": (lambda: sw.predict("a", "a.png", device="cpu"), "overrides are strings: samewise.load(run, 'device=cpu')"),
    "a list of a run's": (lambda: sw.load("a", ["device=cpu"]), "samewise.load(run, *overrides)"),  # pyright: ignore[reportArgumentType]
    "an argument misspelt": (lambda: sw.runs(sorted="x"), "sorted: samewise.runs has no such argument; hint: did you mean 'sort'?"),  # pyright: ignore
    "a word for a switch": (lambda: sw.sweep("seed=1,2", wait="no"), "wait: is not a switch; expected: True or False"),  # pyright: ignore
    "a run by a wrong name": (lambda: sw.load("nothing"), "run: no such run in the folder runs"),
    "no files": (lambda: sw.predict("a"), "files: no files to predict from were given"),
    "an array for a file": (lambda: sw.predict("a", np.zeros((3, 8, 8))), "files: is not the name of a file; hint: "),  # pyright: ignore
    "a text for a score": (lambda: sw.predict("a", "a.png", threshold="0.5"), "threshold: is not a valid score; expected: a number from 0 to 1"),  # pyright: ignore
    "a text for steps": (lambda: sw.verify("a", steps="2"), "steps: is not a number of steps; expected: a whole number from 1"),  # pyright: ignore
    "a format": (lambda: sw.export("a", "b", to="onx"), "to: is not a format that models are exported to; hint: did you mean 'onnx'?"),
    "a run to compare": (lambda: sw.diff(5, "a"), "run: is not a run; expected: what samewise.train returned"),  # pyright: ignore
    "a checkpoint that is none": (lambda: sw.load("a", checkpoint=0.5), "checkpoint: is not a checkpoint; expected: 'best', 'last' or a step"),  # pyright: ignore
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_the_first_line_names_python_arguments_not_options(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, words = MISTAKES[kind]
    with pytest.raises(ConfigError) as caught:
        wrong()
    first = str(caught.value).splitlines()[0]
    assert words in first
    assert "--" not in first


def test_a_notebook_shows_the_error_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell()
    shell.run_cell("import samewise\nsamewise.compose('experiment=resnet18_digits', 'lr=1')")
    told = capsys.readouterr()
    assert (told.out + told.err).strip().splitlines() == ["error: lr: no such key; hint: did you mean 'optimizer.lr'?", "    value:    1"]
    shell.run_cell("%tb")
    InteractiveShell.clear_instance()
