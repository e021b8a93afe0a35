"""What a command reports of a run that was damaged, emptied or ended from inside is true: no false success, and no older work replaced."""

import json
import os
import shutil
from pathlib import Path

import pytest
from samewise_tiny import DIGITS

from samewise.runner.cli import main

TINY = (*DIGITS, "model.width=4", "max_steps=6", "checkpoint.every_steps=2", "checkpoint.keep_last=9")


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


def test_a_trace_with_a_changed_digest_is_reported_as_damaged(samewise, run) -> None:
    other = shutil.copytree(run, run.with_name("other"), symlinks=True)
    for folder in (run, other):  # the same change in both
        lines = (folder / "trace.jsonl").read_text().splitlines()
        lines[3] = json.dumps({**json.loads(lines[3]), "weights": "0" * 16})
        (folder / "trace.jsonl").write_text("\n".join(lines) + "\n")
    done = samewise("diff", run, other, code=2)
    assert "trace.jsonl: is damaged: line 4 does not follow from the one before it" in done.stderr
    assert "the same bits" not in done.stdout
    assert samewise("verify", run).returncode == 2


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
    resumed = samewise("train", *TINY, "name=one", f"run_root={tmp_path / 'runs'}", code=0)
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
    assert f"{name}: is missing, and is written again as it is now" in told
    assert ("samewise cannot tell whether the run began in the same environment, and so has the same bits" in told) == (name == "environment.json")
    assert (run / name).is_file()


def test_final_weights_that_differ_from_the_summary_are_reported(samewise, run) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "weights_sha256": "0" * 64}))
    done = samewise("verify", run, code=1)
    assert "did not occur again" not in done.stdout
    assert "summary.json: weights_sha256 is recorded as '0000" in done.stdout
