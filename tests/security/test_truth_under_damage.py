"""What a command reports of a run that was damaged, emptied or ended from inside is true: no false success, and no older work replaced."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import samewise_forked
from samewise_tiny import DIGITS

from samewise.runner.cli import main

TINY = (*DIGITS, "model.width=4", "max_steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=9")

LAB = """
import os, shutil, sys
from samewise.datasets.generated import GeneratedClassification
from samewise.runner.interfaces import Callback

class Leaves(GeneratedClassification):

    def __init__(self, after, **given):
        super().__init__(**given)
        self.left = after

    def batch(self, indices):
        self.left -= 1
        if self.left == 0:
            sys.exit(0)
        return super().batch(indices)

class Empties(Callback):
    def on_step(self, run, outcome):
        if outcome.step == 3:
            for one in run.folder.glob("*"):  # as `rm -r RUN/*`, which leaves the lock
                shutil.rmtree(one) if one.is_dir() else one.unlink()

class Vanishes(Callback):
    def __init__(self, thread=False, at_once=False):
        self.thread = thread
        if at_once:
            os._exit(0)

    def on_step(self, run, outcome):
        if self.thread:
            import threading
            one = threading.Thread(target=os._exit, args=(0,))
            one.start()
            one.join()
        os._exit(0)

class VanishesInC(Callback):
    def on_step(self, run, outcome):
        import ctypes
        ctypes.CDLL(None)._exit(0)
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from samewise.runner.cli import main

    root = tmp_path_factory.mktemp("runs")
    assert main(["train", *TINY, "name=one", f"run_root={root}"]) == 0
    (folder,) = root.glob("*/*/")
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "one" / original.name, symlinks=True))


def train_again(samewise, run: Path, *more: str):
    return samewise("train", *TINY, "name=one", f"run_root={run.parents[1]}", *more)


def test_a_trace_with_a_changed_digest_is_reported_as_damaged(samewise, run) -> None:
    other = shutil.copytree(run, run.with_name("other"), symlinks=True)
    for folder in (run, other):  # the same change in both
        lines = (folder / "trace.jsonl").read_text().splitlines()
        lines[3] = json.dumps({**json.loads(lines[3]), "weights": "0" * 16})
        (folder / "trace.jsonl").write_text("\n".join(lines) + "\n")
    done = samewise("diff", run, other)
    assert done.returncode == 2, done.stdout
    assert "trace.jsonl: is damaged: line 4 does not follow from the one before it" in done.stderr
    assert "the same bits" not in done.stdout
    assert samewise("verify", run).returncode == 2


def test_a_trace_cut_off_by_a_crash_is_compared_up_to_its_last_full_line(samewise, run) -> None:
    other = shutil.copytree(run, run.with_name("other"), symlinks=True)
    (other / "trace.jsonl").write_bytes((other / "trace.jsonl").read_bytes()[:-20])
    (other / "summary.json").unlink()
    done = samewise("diff", run, other)
    assert done.returncode == 0, done.stderr
    assert "the same bits in all 5 common steps" in done.stdout


@pytest.mark.parametrize(
    ("kept", "words"), [(lambda raw: raw[:-20], "it ends at step 5, but the run took 6"), (lambda raw: b"", "it is empty")], ids=["cut", "empty"]
)
def test_a_trace_shorter_than_its_finished_run_is_damaged(samewise, run, kept, words) -> None:
    other = shutil.copytree(run, run.with_name("other"), symlinks=True)
    (run / "trace.jsonl").write_bytes(kept((run / "trace.jsonl").read_bytes()))
    for command in (["diff", other, run], ["verify", run]):
        done = samewise(*command)
        assert (done.returncode, "the same bits" in done.stdout) == (2, False)
        assert f"trace.jsonl: is damaged: {words}" in done.stderr


def test_a_trace_deleted_before_a_run_resumes_is_noticed(samewise, original, tmp_path) -> None:
    run = Path(shutil.copytree(original, tmp_path / "runs" / "one" / original.name, symlinks=True))
    for one in ("summary.json", "trace.jsonl", "checkpoints/latest", "checkpoints/best"):
        (run / one).unlink()
    shutil.rmtree(run / "checkpoints/step-00000006")
    resumed = samewise("train", *TINY, "name=one", f"run_root={tmp_path / 'runs'}")
    assert resumed.returncode == 0, resumed.stderr
    assert "trace.jsonl: is missing; a new trace begins after step 4" in resumed.stderr
    for given in (("diff", original, run), ("verify", run)):
        assert "its trace begins at step 5: the steps before were not compared" in samewise(*given).stdout


@pytest.mark.parametrize(("lines", "step"), [(6, 4), (5, 4), (4, 2), (2, None), (0, None)])
def test_a_trace_that_ends_before_a_checkpoint_is_made_whole_from_an_older_one(original, tmp_path, capsys, lines, step) -> None:
    run, whole = Path(shutil.copytree(original, tmp_path / "runs" / "one" / original.name, symlinks=True)), (original / "trace.jsonl").read_bytes()
    (run / "summary.json").unlink()
    kept = whole.splitlines(keepends=True)[:lines]
    (run / "trace.jsonl").write_bytes(b"".join(kept) + b'{"step": 6, "ba' * bool(kept))
    weights = (run / "checkpoints/step-00000006/state.pt").read_bytes()
    assert main(["train", *TINY, "name=one", f"run_root={tmp_path / 'runs'}"]) == 0
    told = capsys.readouterr().err
    if step:
        assert f"does not lead to step-00000006: the last line up to there is of step {lines - 1}" in told
        assert (run / "trace.jsonl").read_bytes() == whole
        assert (run / "checkpoints/untraced-step-00000006/state.pt").read_bytes() == weights
        assert ("untraced-step-00000004: the checkpoint was moved here" in told) == (step == 2)
    else:
        assert "leads to no checkpoint; moved to damaged-trace.jsonl; a new trace begins after step 6; earlier steps cannot be compared" in told
        assert not list(run.glob("checkpoints/untraced-*"))


def test_a_checkpoint_is_written_once_its_trace_is_on_the_disk(tmp_path, monkeypatch) -> None:
    synced, fsync = list[str](), os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (fsync(file), synced.append(Path(os.readlink(f"/proc/self/fd/{getattr(file, 'fileno', lambda: file)()}")).name))
    )
    assert main(["train", *TINY, "name=one", f"run_root={tmp_path}"]) == 0
    assert [name for name in synced if name in ("trace.jsonl", "state.pt")] == ["trace.jsonl", "state.pt"] * 3


@pytest.mark.parametrize(("kept", "words"), [(0, "steps 1 to 4 are missing"), (3, "steps 4 to 4 are missing"), (6, "")])
def test_metrics_deleted_before_a_run_resumes_are_noticed(original, tmp_path, capsys, kept, words) -> None:
    run = Path(shutil.copytree(original, tmp_path / "runs" / "one" / original.name, symlinks=True))
    for one in ("summary.json", "checkpoints/latest", "checkpoints/best"):
        (run / one).unlink()
    shutil.rmtree(run / "checkpoints/step-00000006")
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if json.loads(line).get("step", 99) <= kept]
    (run / "metrics.jsonl").write_text("".join(lines))
    assert main(["train", *TINY, "name=one", f"run_root={tmp_path / 'runs'}"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "missing" in line]
    assert [line.partition("metrics.jsonl: ")[2].partition(",")[0] for line in told] == [words] * bool(words)


@pytest.mark.parametrize("name", ["environment.json", "config.yaml"])
def test_a_missing_record_of_the_beginning_is_not_replaced_without_a_word(original, tmp_path, capsys, name) -> None:
    run = Path(shutil.copytree(original, tmp_path / "runs" / "one" / original.name, symlinks=True))
    for one in ("summary.json", name):
        (run / one).unlink()
    assert main(["train", *TINY, "name=one", f"run_root={tmp_path / 'runs'}"]) == 0
    told = capsys.readouterr().err
    assert f"{name}: is missing, and is written anew as it is now" in told
    assert ("whether the run began in the same environment, and so has the same bits, cannot be known" in told) == (name == "environment.json")
    assert (run / name).is_file()


def test_final_weights_that_differ_from_the_summary_are_reported(samewise, run) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "weights_sha256": "0" * 64}))
    done = samewise("verify", run)
    assert done.returncode == 1, done.stdout
    assert "did not occur again" not in done.stdout
    assert "step 6: summary.json has weights_sha256 0000000000000000..., and step-00000006 has" in done.stdout
    assert "summary.json: weights_sha256 is recorded as '0000" in done.stdout


@pytest.mark.parametrize("manifest", [None, "", "[]", '{"format": 1}', "pipe"])
def test_checkpoints_without_a_manifest_stop_training_and_are_kept(samewise, run, manifest) -> None:
    (run / "summary.json").unlink()
    for file in run.glob("checkpoints/step-*/manifest.json"):
        file.unlink()
        if manifest == "pipe":
            os.mkfifo(file)
        elif manifest is not None:
            file.write_text(manifest)
    weights = {file: file.read_bytes() for file in run.glob("checkpoints/step-*/state.pt")}
    trace = (run / "trace.jsonl").read_bytes()
    done = train_again(samewise, run)
    assert done.returncode == 2, done.stdout
    assert "nothing has been deleted" in done.stderr
    assert len(weights) >= 3
    assert {file: file.read_bytes() for file in run.glob("checkpoints/step-*/state.pt")} == weights
    assert (run / "trace.jsonl").read_bytes() == trace


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "lab_of_damage.py").write_text(LAB)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("train", ("replicas=2", "batch_size=16", "strategy=ddp", "strategy.nproc=2"), "error: rank 0: ended with exit code 0 before it had finished"),
        ("sweep", ("seed=1,2",), "2 interrupted"),
    ],
)
def test_a_process_that_exits_silently_does_not_count_as_success(lab, command, more, said, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    given = [*TINY, *more, "name=one", f"run_root={lab}/runs", "+callbacks.x={_target_:lab_of_damage.VanishesInC}"]
    done = samewise_forked.run(command, "--package", "lab_of_damage", *given, folder=lab)
    assert done.returncode == 1, done.stdout
    assert said in done.stderr + done.stdout
