"""`samewise runs`: lists what was trained, with labels and results; and deletes runs."""

import json
import os
import shutil
from pathlib import Path

import pytest
from samewise_tiny import DIGITS

from samewise.runner.cli import main
from samewise.runner.commands.runs import _choose_columns  # pyright: ignore[reportPrivateUsage]
from samewise.runner.errors import ConfigError
from samewise.runner.records import header, index, locks
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import find

TINY = [*DIGITS, "model.width=4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run root with three runs: two finished, and one that failed in its second step."""
    root = tmp_path_factory.mktemp("runs")
    for overrides in (["max_steps=1"], ["max_steps=2", "seed=1", "optimizer.lr=0.03"], ["max_steps=2", "optimizer.lr=1e30"]):
        main(["train", *TINY, *overrides, f"run_root={root}"])
    return root


@pytest.fixture
def root(trained, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(trained, tmp_path / "runs", symlinks=True)


@pytest.fixture
def runs(samewise, root):
    def listed(*arguments):
        done = samewise("runs", *arguments, "--run-root", root, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return listed


def test_runs_are_listed_with_their_label_state_and_monitored_metric(runs, root) -> None:
    one, two, failed = sorted(runs(), key=lambda run: run["label"].count("seed") + 2 * ("1e30" in run["label"]))
    assert [run["state"] for run in (one, two, failed)] == ["finished", "finished", "failed"]
    assert two["label"] == "debug=tiny callbacks=none width=4 max_steps=2 lr=0.03 seed=1"
    assert (failed["step"], failed["steps"]) == (1, 2)
    assert "the loss is not finite" in failed["reason"]
    for run in (one, two):
        summary = json.loads((Path(run["folder"]) / "summary.json").read_text())
        assert run["value"] == summary["metrics"]["best"]["valid/accuracy"] == run["metrics"][run["monitor"]]


def test_runs_are_filtered_and_sorted_by_columns_settings_and_metrics(runs) -> None:
    assert {run["state"] for run in runs("--where", "state=finished")} == {"finished"}
    assert [run["label"].endswith("seed=1") for run in runs("--where", "label~lr=0.03")] == [True]
    assert runs("--where", "seed=1") == runs("--where", "optimizer.lr<0.04", "--where", "evaluate.pictures=false") == runs("--where", "label~lr=0.03")
    every = len(runs())
    assert len(runs("--where", "scheduler=one_cycle")) == len(runs("--where", "experiment=resnet18_digits")) == every
    assert runs("--where", "scheduler!=one_cycle") == runs("--where", "optimizer=adamw") == []
    assert len(runs("--where", "resume_from=null")) == every
    assert runs("--where", "clip_norm=null") == runs("--where", "resume_from!=null") == []
    assert runs("--sort=-optimizer.lr")[0] == runs("--where", "seed=1")[0]
    losses = [run["metrics"]["valid/loss"] for run in runs("--where", "state=finished", "--sort=-valid/loss")]
    assert losses == sorted(losses)
    assert runs("--sort", "overridden") == runs("--sort", "label"), "a column of the table goes by its title as well"
    assert len(losses) == 2
    assert [run["metrics"].get("valid/loss") for run in runs("--sort", "valid/loss")][:2] == losses[::-1]
    assert len(runs("--where", f"valid/loss<={losses[0]!r}", "--where", "state!=failed")) == 1


def test_differences_between_configs_are_listed(runs) -> None:
    found = {run["state"] + str(run["differs"]["seed"]): run["differs"] for run in runs("--diff")}
    assert found["finished1"] == {"seed": 1, "max_steps": 2, "optimizer.lr": 0.03}
    assert found["failed0"] == {"seed": 0, "max_steps": 2, "optimizer.lr": 1e30}


@pytest.mark.parametrize("arguments", [[], ["--diff"], ["--where", "seed=1"], ["--sort", "optimizer.lr"], ["--where", "scheduler=one_cycle"]])
def test_a_second_listing_opens_no_file_of_a_run_but_locks(runs, monkeypatch, arguments) -> None:
    monkeypatch.setattr(index, "_SETTLED_NS", 0)
    listed, opened, open_file = runs(*arguments), set(), os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **named: (opened.add(Path(path).name), open_file(path, *rest, **named))[1])
    assert runs(*arguments) == listed
    assert opened <= {".lock"}


def test_a_name_finds_its_only_run_and_the_newest_of_several_are_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(7):
        (folder := tmp_path / "runs" / "fsdd" / f"3f2{number}").mkdir(parents=True)
        (folder / "config.yaml").write_text(header.write({}, f"lr=0.1 seed={number}"))
        os.utime(folder / "config.yaml", (number, number))
        if number == 0:
            for name in ("fsdd", "runs/fsdd", str(folder.parent)):
                assert find(name, run_root=Path("runs")).path.resolve() == folder
    newest = ", ".join(f"runs/fsdd/3f2{number}" for number in (6, 5, 4, 3, 2))
    for name in ("runs/fsdd", "runs"):
        with pytest.raises(ConfigError, match=rf"is a folder of runs; hint: choose one of them .*, the newest first: {newest}, and 2 more"):
            find(name, run_root=Path("runs"))
    listed = ", ".join(f"fsdd/3f2{number}" for number in (6, 5, 4, 3, 2))
    with pytest.raises(ConfigError, match=rf"7 runs match; hint: give more characters: {listed}, and 2 more"):
        find("fsdd", run_root=Path("runs"))


def test_a_renamed_run_goes_by_its_name_and_is_not_trained_again(samewise, runs, root) -> None:
    (folder,) = [Path(run["folder"]) for run in runs("--where", "seed=1")]
    failed = next(run["run"] for run in runs("--where", "state=failed"))
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    # The start of another run's fingerprint
    assert samewise("runs", "rename", folder.name, failed[:4], "--run-root", root).returncode == 0
    assert find(failed[:4], run_root=root).path == folder
    assert samewise("runs", "rename", folder, "raccoon", "--run-root", root).returncode == 0
    assert find(failed[:4], run_root=root).path.name == failed
    assert [run["folder"] for run in runs("--where", "name=raccoon")] == [str(folder)]
    for taken in ("raccoon", "resnet18_digits"):
        done = samewise("runs", "rename", failed, taken, "--run-root", root)
        assert (done.returncode, "names another run" in done.stderr) == (2, True)
    for run in (folder, failed, folder):  # each has its own name again
        samewise("runs", "rename", run, "", "--run-root", root, code=0)
    assert {path: path.read_bytes() for path in before} == before
    done = samewise("train", *TINY, "max_steps=2", "seed=1", "optimizer.lr=0.03", f"run_root={root}")
    assert "already finished" in done.stdout


def test_tags_of_the_config_and_later_ones_are_listed_and_select_runs(samewise, tmp_path) -> None:
    folders = [make_run(tmp_path, f"some/{seed}", "tracking:\n  enabled: false\n  tags:\n    team: vision").path for seed in (1, 2)]
    unknown = samewise("runs", "tag", folders[1], "~teem", "--run-root", tmp_path)
    assert (unknown.returncode, "did you mean 'team'?" in unknown.stderr) == (2, True)
    assert samewise("runs", "tag", folders[1], "~team", "note=two words", "--run-root", tmp_path).returncode == 0

    def selected(condition: str) -> list[str]:
        return [run["folder"] for run in json.loads(samewise("runs", "--where", condition, "--run-root", tmp_path, "--json").stdout)]

    assert selected("tags.team=vision") == [str(folders[0])]
    assert selected("tags.note=two words") == selected("tags.team=null") == [str(folders[1])]
    assert "note=two words" in samewise("runs", "--run-root", tmp_path).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--where", "failed"], "NAME=VALUE"),
        (["--sort", "valid/los"], "did you mean 'valid/loss'?"),
        (["--sort", "metrics"], "no such column, metric or setting"),
        (["rm"], "no run was named"),
        (["rm", "zzz"], "no such run"),
        (["gc", "3f2a"], "takes no names"),
        (["rename", "3f2a"], "samewise runs rename RUN NAME"),
        (["tag", "resnet18_digits", "x"], "runs match"),
        (["--where", "state=finised"], "did you mean 'finished'?"),
        (["--where", "state=interrupted", "--where", "stat=failed"], "did you mean 'state'?"),
        (["--where", "step>many"], "compares a number with text"),
        (["--run-root", "nowhere"], "the folder does not exist"),
    ],
)
def test_an_impossible_listing_is_refused(samewise, root, arguments, words) -> None:
    done = samewise("runs", "--run-root", root, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_gc_leaves_finished_runs_out(samewise, runs, root) -> None:
    before = {run["folder"] for run in runs()}
    (failed,) = [run["folder"] for run in runs("--where", "state=failed")]
    done = samewise("runs", "gc", "--where", "step>0", "--yes", "--run-root", root)
    assert "2 left out, as finished" in done.stderr
    assert {run["folder"] for run in runs()} == before - {failed}


def test_deletions_are_listed_first_and_delete_nothing_else(samewise, runs, root) -> None:
    before = {run["folder"] for run in runs()}
    (failed,) = [run["folder"] for run in runs("--where", "state=failed")]
    done = samewise("runs", "gc", "--run-root", root)
    assert f"would be deleted: {failed}" in done.stdout
    assert "nothing has been deleted yet" in done.stdout
    assert {run["folder"] for run in runs()} == before
    assert "deleted: " + failed in samewise("runs", "gc", "--yes", "--run-root", root).stdout
    assert {run["folder"] for run in runs()} == before - {failed}
    some, *_, other = sorted(before - {failed})
    config = Path(other) / "config.yaml"
    config.write_text(config.read_text().replace("resume_from: null", f"resume_from: {Path(some).resolve()}/checkpoints/step-00000001"))
    done = samewise("runs", "rm", Path(some).name, "--yes", "--run-root", root)
    assert done.returncode == 0
    assert f"warning: {other} was trained from one of these" in done.stderr
    assert {run["folder"] for run in runs()} == before - {failed, some}


def test_nothing_is_deleted_if_one_of_the_runs_is_being_trained(samewise, runs, root) -> None:
    folders = [Path(run["folder"]) for run in runs()]
    with locks.hold(folders[1] / ".lock"):
        assert {run["state"] for run in runs() if run["folder"] == str(folders[1])} <= {"running", "finished"}
        done = samewise("runs", "rm", *(folder.name for folder in folders), "--yes", "--run-root", root)
    assert done.returncode == 2
    assert "is being written by process" in done.stderr
    assert all((folder / "config.yaml").exists() for folder in folders)


def make_run(root: Path, run: str, config: str = "") -> RunFolder:
    (folder := RunFolder(root / run)).create()
    folder.config.write_text(f"{config}\nevaluate:\n  monitor: valid/loss\n")
    return folder


@pytest.mark.parametrize("damaged", ["", '# choices: {"sched', '# choices: {"scheduler": "cosine"}\nseed: 0\n', "seed: 0\nevaluate:\n  monitor: [\n"])
def test_a_run_whose_config_is_damaged_hides_no_other(samewise, tmp_path, damaged) -> None:
    spoilt, *_ = [make_run(tmp_path, f"some/{seed}", f'# choices: {{"scheduler": "cosine"}}\nseed: {seed}').config for seed in (1, 2, 3)]
    spoilt.write_text(damaged)
    done = [samewise("runs", *one, "--run-root", tmp_path) for one in (["--where=seed=2"], ["--where=scheduler=cosine", "--where=seed>1"], ["--sort=seed"], [])]
    assert [(one.returncode, len(one.stdout.splitlines()) - 1) for one in done] == [(0, 1), (0, 2), (0, 3), (0, 3)]
    (line,) = "".join(one.stderr for one in done).splitlines()
    assert line.startswith(f"warning: {spoilt}: is damaged: ")


def test_the_columns_of_differences_include_one_that_tells_each_run_apart() -> None:
    others = {f"model.{number}": "-" for number in range(20)}
    configs = [{"a.b.c.d": "1", **others}, {"a.b.c.d": "2", **others}, {"a.b.c.d": "1", **dict.fromkeys(others, "3")}]
    shown, left_out = _choose_columns(configs)
    assert "a.b.c.d" in shown
    assert len({tuple(config[path] for path in shown) for config in configs}) == 3
    assert len(shown) + left_out == 21
