"""The code of a run is kept: other code is told apart, and the run's project is written again."""

import hashlib
import json
import shutil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import samewise_forked as forked

from samewise.runner.records import kept_sources, sources

MODEL = "class Net:\n    width = {}\n"


def test_a_run_of_earlier_code_is_told_apart_and_trained_again_from_what_was_kept(samewise, tmp_path):
    project, again, label = tmp_path / "lab", tmp_path / "again", "lab_of_kept_code/model.py"

    def within(folder: Path, *arguments: object, code: int = 0) -> Any:
        done = forked.run(*arguments, folder=folder)
        assert done.returncode == code, done.stderr
        return done

    def listed(*arguments: str) -> str:
        return samewise("runs", *arguments, "--run-root", project / "runs").stdout

    within(tmp_path, "init", project, "--package", "lab_of_kept_code")
    for activation in ("ReLU", "Hardswish"):
        text = (project / label).read_text().replace("nn.ReLU()", f"nn.{activation}()", 1)
        (project / label).write_text(text)
        within(project, "train", "max_steps=2", "tracking=none", "callbacks=none")

    one, two = json.loads(listed("--diff", "--json"))
    first, second = Path(one["folder"]), Path(two["folder"])
    assert [one["differs"], two["differs"]] == [{"code": one["code"]}, {"code": two["code"]}]
    assert one["code"] != two["code"]
    for table in (listed(), listed("--diff"), listed("--sort", "code")):
        assert one["code"] in table
        assert two["code"] in table
    own = f"code={one['code']}"
    assert [run["folder"] for run in json.loads(listed("--where", own, "--json"))] == [str(first)]
    assert " code " not in listed("--where", own)

    for arguments in ([first, second], [first]):
        shown = within(project, "diff", *arguments, code=1).stdout
        assert f"{label} has changed: SmallNet.__init__\n" in shown
        assert "\n-            nn.ReLU(),\n+            nn.Hardswish(),\n" in shown
        lines = json.loads(within(project, "diff", *arguments, "--json", code=1).stdout)["lines"]
        assert lines[label] in shown
    words = within(project, "verify", first, "--coarse", code=1).stdout
    assert f"{label} has changed: SmallNet.__init__\n`samewise diff {first}` shows the lines" in words

    within(tmp_path, "init", again, "--from", first)
    assert {"README.md", ".gitignore", "Makefile"} <= {path.name for path in (tmp_path / again).iterdir()}
    within(again, "train", "tracking=none")
    (repeated,) = again.glob("runs/first/*")
    assert repeated.name == first.name
    digests = [json.loads((folder / "summary.json").read_text())["weights_sha256"] for folder in (first, second, repeated)]
    assert digests[0] == digests[2] != digests[1]

    record = second / "sources.json"
    record.write_text(record.read_text().replace(label, "../outside.py"))
    refused = within(tmp_path, "init", "outside", "--from", second, code=2).stderr
    assert "../outside.py is outside of a project" in refused
    assert not list(tmp_path.glob("outside*"))


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kept_code_of_lab").mkdir()
    return tmp_path / "kept_code_of_lab"


def record(root: Path, run: str, lab: Path) -> Path:
    """Write a run's or a sweep's record of the lab's code."""
    files = {f"{lab.name}/{path.name}": sources.digests_of(path) or {} for path in lab.glob("*.py")}
    (file := root / run / "sources.json").parent.mkdir(parents=True)
    kept_sources.write_record(file, "0" * 64, files)
    return file


def kept(root: Path) -> set[str]:
    return {path.read_text() for path in (root / ".code").iterdir() if path.name[0] != "."}


def test_a_text_is_kept_once_by_its_sha256_and_as_long_as_a_run_or_sweep_names_it(lab, samewise, tmp_path):
    root, texts = tmp_path / "runs", [MODEL.format(width) for width in range(3)]
    runs = ["some/1", "some/2", "sweeps/1"], ["some/3"], ["some/4"]
    for text, names in zip(texts, runs, strict=True):
        (lab / "net.py").write_text(text)
        for name in names:
            record(root, name, lab)
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
    assert [(root / ".code" / digest).read_text() for digest in digests] == texts
    assert kept(root) == set(texts)
    for folder in root.glob("some/*"):
        (folder / "config.yaml").write_text("evaluate:\n  monitor: valid/loss\n")
    deleted = ["runs", "rm", "some/1", "some/2", "some/3", "--run-root", root]
    assert samewise(*deleted).returncode == 0
    assert kept(root) == set(texts), "nothing was deleted yet"
    assert samewise(*deleted, "--yes").returncode == 0
    assert kept(root) == {texts[0], texts[2]}, "the sweep names the first"
    shutil.rmtree(root / "sweeps")
    damaged = root / "some" / "4" / "sources.json"
    damaged.write_text(damaged.read_text()[:-3])
    failed = ["runs", "gc", "--where", "name=other", "--run-root", root]
    assert samewise(*failed, "--yes").returncode == 0
    assert kept(root) == {texts[2]}


def test_runs_that_start_at_once_keep_the_same_code(lab, tmp_path):
    for number in range(20):
        (lab / f"part{number}.py").write_text(f"PART = {number}\n")
    root, process_of = tmp_path / "runs", get_context("fork").Process
    started = [process_of(target=record, args=(root, f"some/{number}", lab)) for number in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * 4
    assert kept(root) == {path.read_text() for path in lab.glob("*.py")}
