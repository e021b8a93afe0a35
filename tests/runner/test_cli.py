"""The command line, as a person uses it: in a separate process if imports or the last output matter."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from samewise_tiny import DIGITS

from samewise.runner.cli import main
from samewise.runner.commands import commands
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, write_json
from samewise.runner.records.json_text import to_json

LIGHT = [["--help"], ["--version"], ["list"], ["list", "optimizer"], ["show"], ["show", "debug=tiny", "--origin", "--json"], ["train", "--help"]]

Run = Callable[..., Any]


def run_in_new_process(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new interpreter."""
    command = [sys.executable, "-m", "samewise", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120, env={**os.environ, **variables}, check=False)


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_quick_commands_import_neither_torch_nor_mlflow(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "samewise", *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "samewise.runner.cli" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "torchvision", "mlflow")}


def test_help_lists_every_command_with_a_summary(samewise: Run) -> None:
    told = samewise("--help").stdout
    assert {"train", "check", "show", "list"} <= set(commands())
    for name, command in commands().items():
        assert re.search(rf"^  {name} +\S", told, re.MULTILINE)
        assert command.summary


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which signals a process catches")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_train_stopped_before_it_trains_says_so(here: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "samewise", "train", "experiment=resnet18_digits", "debug=tiny", "tracking=none"]
    as_usual = partial(signal.signal, number, signal.SIG_DFL)  # also if these tests were started with nohup
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=as_usual) as process:
        while not caught_signals(process.pid) >> (number - 1) & 1:
            assert process.poll() is None
        process.send_signal(number)
        assert process.stderr is not None
        assert process.stderr.read() == f"interrupted: stopped by {number.name}; run the same command again\n"
    assert process.returncode == 3
    assert not (here / "runs").exists()


def caught_signals(pid: int) -> int:
    """The signals that a process catches, one bit each."""
    return int(re.search(r"^SigCgt:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1], 16)


@pytest.mark.parametrize(("closed", "arguments", "code"), [(">&-", "list", 0), ("<&- 2>&-", "list", 0), (">&- 2>&-", "nothing", 2)])
def test_standard_streams_may_be_closed(here: Path, closed: str, arguments: str, code: int) -> None:
    done = subprocess.run(f"{sys.executable} -m samewise {arguments} {closed}", shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_help_with_examples(name: str, samewise: Run) -> None:
    done = samewise(name, "--help", code=0)
    assert "examples:" in done.stdout
    assert f"samewise {name}" in done.stdout


TINY_DIGITS = ["experiment=resnet18_digits", "debug=tiny"]
BAD = {
    "no such option": (["train", "--fast"], "--fast"),
    "a folder for runs as an option of a sweep": (["sweep", *TINY_DIGITS, "seed=0,1", "--run-root", "elsewhere"], "without dashes: run_root=elsewhere"),
    "a folder for runs as an option of a sweep's state": (["sweep", *TINY_DIGITS, "seed=0,1", "--run-root", "elsewhere", "--status"], "run_root=elsewhere"),
    "JSON of a cancelled sweep": (["sweep", "1a2b", "--cancel", "--json"], "--status --json"),
    "a store for another backend": (["sync", "--to", "tensorboard", "--uri", "http://127.0.0.1:9"], "--to names only tensorboard"),
    "a folder and a store": (["runs", "--run-root", "elsewhere", "--uri", "http://127.0.0.1:9"], "--uri: not allowed with argument --run-root"),
    "three runs to compare": (["diff", "3f2a", "91bc", "0d4e"], "RUN: diff compares two runs"),
    "a misspelt option": (["runs", "--were", "state=finished"], "did you mean '--where'?"),
    "a misspelt option beside a name": (["sweep", "1a2b", "--stats"], "did you mean '--status'?"),
    "an option that must be given": (["export", "a"], "samewise export: the following arguments are required: --out"),
    "an option without its value": (["runs", "--sort"], "--sort: expected one argument"),
    "unknown nested key": (["train", "loader.workers=1"], "did you mean 'loader.num_workers'?"),
    "unknown experiment": (["train", "experiment=nothing_of_the_kind"], "samewise list experiment|one of:"),
    "unknown group": (["train", "optimiser=sgd"], "did you mean 'optimizer'?"),
    "a value without a key": (["show", "=3"], "experiment=3"),
    "no choice of a group with few": (["show", "precision=fp8"], "no such choice; expected: one of: bf16, fp16"),
    "a run that must be named": (["eval"], "are required: RUN;"),
    "a table of one run": (["eval", "3f2a", "--csv", "x.csv"], "is for a sweep's points"),
    "a misspelt choice of an option": (["profile", *TINY_DIGITS, "--by", "layrs"], "did you mean 'layers'?"),
    "a key of another choice's file": (["show", *TINY_DIGITS, "transforms.hflip=0.5"], "hflip: no such key; hint: `samewise show` lists"),
    "a table that is missing": (["check", "dataset=table", "dataset.table_path=no.csv"], "error: no.csv: "),
    "a sweep of nothing": (["sweep"], "no sweep was named"),
    "a sweep with an unknown choice": (["train", "-m", "optimizer=sgd,adm"], "did you mean 'adam'?"),
    "a target that is not there": (["train", "model._target_=torchvision.models.resnet19"], "did you mean 'resnet18'?"),
    "no variable": (["show", "name=${oc.env:SAMEWISE_NOPE}"], "an environment variable that is not set: SAMEWISE_NOPE"),
    "a callback that was not chosen": (["show", "callbacks.ema.decay=2"], "callbacks=[default,ema]"),
    "a key two deep": (["show", "callbacks.progress.refresh=3"], "did you mean 'callbacks.progress.refresh_s'?"),
    "a key that a class may take": (["show", "callbacks.progress.line_s=3"], "write +callbacks.progress.line_s=3 to add it"),
    "a component that was not there": (["show", "callbacks.x._target_=a.b"], "hint: write +callbacks.x._target_=a.b to add it"),
    "quotes within": (["show", "model={word: 'a b'}"], "hint: write '++model={word: '\"'\"'a b'\"'\"'}' to add them"),
    "no mapping": (["show", "tracking.tags=3"], "a mapping of names to values, each a string"),
    "no list of transforms": (["check", "--static", "transforms.train.sample=none"], "transforms.train.sample: is not a list of transforms"),
    "a launcher for a callback": (
        ["check", "--static", "+callbacks.x._target_=samewise.runner.launchers.local.Local"],
        "it is a launcher, which belongs in `launcher`",
    ),
    "a misspelt package": (["check", "--static", "model._target_=torchvision.modls.resnet18"], "did you mean 'torchvision.models.resnet18'?"),
    "no such group": (["list", "optimzer"], "did you mean 'optimizer'?"),
    "no such package": (["show", "--package", "lab_that_is_not"], "cannot be found"),
    "no such folder": (["show", "--config-dir", "nowhere"], "config folder does not exist"),
    "check": (["check", "--static", "batch_size=0", "device=tpu"], "2 problems"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_gives_a_clear_message_and_exit_code_2_and_writes_nothing(kind: str, samewise: Run, here: Path) -> None:
    done = samewise(*BAD[kind][0], code=2)
    assert any(word in done.stderr for word in BAD[kind][1].split("|")), done.stderr
    assert list(here.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = run_in_new_process("show", "lr=1", "--debug", folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_show_prints_what_train_would_do_and_the_origin_of_each_value(samewise: Run) -> None:
    done = samewise("show", "seed=3", "--json", "--origin")
    told = json.loads(done.stdout)
    assert told["config"]["seed"] == 3
    assert told["origins"]["seed"] == "override seed=3"
    assert all(told["origins"].values())  # what a reference leads to is set where the reference is
    assert told["folder"] == f"runs/{told['name']}/{told['fingerprint'][:12]}"
    assert told["choices"]["optimizer"] == "sgd"


def test_show_prints_the_meaning_of_settings_arguments_and_the_values_they_refer_to(samewise: Run) -> None:
    meanings = json.loads(samewise("show", "experiment=resnet18_digits", "--meanings", "--json").stdout)["meanings"]
    assert "over all replicas" in meanings["batch_size"]
    assert "Share of the cycle" in meanings["scheduler.pct_start"]
    assert meanings["transforms.degrees"] == meanings["transforms.train.batch.1.degrees"]
    assert "torch.save" in meanings["initialise.weights"]
    printed = samewise("show", "experiment=resnet18_digits", "--meanings").stdout
    assert re.search(r"^transforms\.translate\.1: 0\.08 +# Largest shift", printed, re.MULTILINE)


def test_check_reports_all_problems_as_json(samewise: Run) -> None:
    done = samewise("check", "--static", "--json", "batch_size=0", "optimizer=sdg", code=2)
    assert {problem["path"] for problem in json.loads(done.stdout)["problems"]} == {"batch_size", "optimizer"}


def test_a_users_project_is_found_from_a_subfolder(samewise: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "pyproject.toml").write_text('[tool.samewise]\npackages = ["lab_within"]\nconfigs = "settings"\n')
    (here / "lab_within").mkdir()
    (here / "lab_within" / "__init__.py").write_text("import torch\nclass Net(torch.nn.Linear):\n    pass\n")
    (here / "settings" / "model").mkdir(parents=True)
    (here / "settings" / "model" / "ours.yaml").write_text("# A net of ours\n_target_: lab_within.Net\nin_features: 64\nout_features: 10\n")
    within = here / "notes"
    within.mkdir()
    monkeypatch.chdir(within)
    assert "A net of ours" in samewise("list", "model").stdout
    samewise("check", "--static", "model=ours", code=0)
    (here / "pyproject.toml").write_text('[tool.samewise]\nconfigs = "settings"\n')
    refused = samewise("check", "--static", "model=ours", code=2)
    assert "outside the packages" in refused.stderr
    (here / "pyproject.toml").write_text('[tool.samewise]\npackges = ["lab_within"]\n')
    assert "did you mean 'packages'?" in samewise("show").stderr
    (here / "pyproject.toml").write_text("[tool.samewise\n")
    assert "not valid TOML" in samewise("show").stderr


def pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)


def terminal() -> TextIO:
    ours, theirs = os.openpty()
    os.close(ours)
    return open(theirs, "w", buffering=1)


def leave_unread(make: Callable[[], TextIO], monkeypatch: pytest.MonkeyPatch) -> tuple[TextIO, TextIO]:
    """Replace standard output and error with streams that nobody reads; not in a fixture, because pytest then sets its own."""
    given = make(), make()
    monkeypatch.setattr(sys, "stdout", given[0])
    monkeypatch.setattr(sys, "stderr", given[1])
    return given


UNREAD = pytest.mark.parametrize("make", [pipe, terminal])


@UNREAD
def test_training_continues_to_its_end_with_unread_output(make: Callable[[], TextIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = leave_unread(make, monkeypatch)
    with pytest.raises(OSError, match=r"Broken pipe|Input/output error"):
        out.write("unread\n")
    leave_unread(make, monkeypatch)
    assert main(["train", *DIGITS, "model.width=4", "max_steps=2", "callbacks=default", f"run_root={tmp_path}"]) == 0
    assert len(list(tmp_path.glob("*/*/summary.json"))) == 1
    assert main(["runs", "--run-root", str(tmp_path)]) == 0
    assert main(["train", "lr=1"]) == 2


def test_a_pipe_that_breaks_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("samewise.runner.cli._help", refuse)
    assert main(["--help"]) == 1
    assert "Broken pipe" in capfd.readouterr().err


def test_a_command_with_unread_output_ends_without_a_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "samewise", "list", "optimizer"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_values_that_json_lacks_become_null() -> None:
    value = {"best": {"valid/loss": float("nan")}, "curve": [1.5, float("inf")], "pair": (-float("inf"), 0.1), "path": Path("a"), "text": "NaN"}
    expected = {"best": {"valid/loss": None}, "curve": [1.5, None], "pair": [None, 0.1], "path": "a", "text": "NaN"}
    assert json.loads(to_json(value), parse_constant=refuse) == expected
    assert json.loads(to_json(value, indent=2), parse_constant=refuse) == expected


def test_files_spell_what_json_lacks_and_only_numbers_are_read_so(tmp_path: Path) -> None:
    file, metrics = tmp_path / "file.json", {"loss": math.nan, "psnr": math.inf, "gap": -math.inf, "step": 3}
    write_json(file, {"metrics": metrics, "name": "NaN", "pair": (1.5, math.nan)})
    words = {"loss": "NaN", "psnr": "Infinity", "gap": "-Infinity", "step": 3}
    assert json.loads(file.read_text(), parse_constant=refuse) == {"metrics": words, "name": "NaN", "pair": [1.5, "NaN"]}
    read = read_json(file, {"metrics": shapes.NUMBERS, "name": str})
    assert {name: repr(value) for name, value in read["metrics"].items()} == {name: repr(value) for name, value in metrics.items()}
    assert read["name"] == "NaN"


TINY = ["experiment=resnet18_digits", "debug=tiny", "model.width=4", "tracking=none", "evaluate.pictures=false", "callbacks=[progress]"]


def test_a_run_reports_what_it_trains_its_progress_and_its_expected_end(samewise, tmp_path) -> None:
    done = samewise("train", *TINY, "optimizer.lr=0.03", "seed=1", "+callbacks.progress.line_s=0", f"run_root={tmp_path}", code=0)
    name, folder, size, *lines = done.stderr.splitlines()
    assert name == "resnet18_digits  debug=tiny width=4 callbacks=[progress] lr=0.03 seed=1"
    assert folder.startswith(f"  {tmp_path}/resnet18_digits/")
    assert folder.endswith(" on cpu")
    (state,) = tmp_path.glob("*/*/checkpoints/step-00000020/state.pt")
    weights = torch.load(state, weights_only=True)["model"]
    learned = sum(tensor.numel() for name, tensor in weights.items() if name.rpartition(".")[2] in ("weight", "bias"))
    assert size == f"  {learned:,} parameters, 64 samples, 20 steps of 16 samples, 4 per epoch"
    told = [re.match(r"epoch \d+/\d+  step (\d+) of 20  loss \d+\.\d{4}  accuracy [01]\.\d{4}  \S+ steps/s, ends at about \d\d:\d\d", line) for line in lines]
    assert [int(match[1]) for match in told if match] == list(range(1, 21))
