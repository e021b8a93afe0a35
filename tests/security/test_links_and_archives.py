"""Nothing is written through a link in a folder that someone else made, and an archive is not read as one of our files."""

import os
import shutil
from pathlib import Path

import pytest
from samewise_tiny import DIGITS

from samewise.runner.errors import ConfigError, DamagedFile
from samewise.runner.records.folder import RunFolder

TINY = (*DIGITS, "model.width=4", "max_steps=2")
LINKS = ("metrics.jsonl", "trace.jsonl", "sender.log", ".lock", "artifacts")


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("is_there", [True, False], ids=["to a file", "to nothing"])
def test_training_writes_through_no_link_in_the_run_folder(samewise, run, tmp_path, name, is_there) -> None:
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")  # it starts again, and would write each of them from the beginning
    if (run / name).is_dir():
        shutil.rmtree(run / name)
    (run / name).unlink(missing_ok=True)
    mine = tmp_path / "mine"
    if is_there:
        mine.write_text("mine\nwithout an end")
    (run / name).symlink_to(mine)
    done = samewise("train", *TINY, "name=one")
    assert done.returncode == 2, done.stdout
    assert f"{name}: is damaged: it is a link, which may lead to any file of yours" in done.stderr
    assert mine.exists() == is_there
    assert not is_there or mine.read_text() == "mine\nwithout an end"


@pytest.fixture
def beside(run, tmp_path) -> Path:
    """A checkpoint with links to the user's files beside its own files."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "key").write_text("SECRET")
    kept = (run / "checkpoints" / "best").resolve()
    (kept / "more").symlink_to(mine / "key")
    (kept / "folder").symlink_to(mine)
    return kept


def _logged(run: Path, copy: Path) -> list[str]:
    from samewise.runner.tracking import logged_model

    logged_model.add_checkpoint(RunFolder(run), RunFolder(copy))
    return sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if not path.is_dir())


def test_a_logged_model_holds_only_its_checkpoint_files_and_no_links(run, beside, tmp_path) -> None:
    at = f"checkpoints/{beside.name}"
    assert _logged(run, tmp_path / "copy") == [f"{at}/manifest.json", f"{at}/state.pt"]
    for make in (lambda path: path.symlink_to(tmp_path / "mine" / "key"), os.mkfifo):
        (beside / "state.pt").unlink()
        make(beside / "state.pt")
        with pytest.raises(DamagedFile, match="is damaged: it is "):
            _logged(run, tmp_path / "another")
    shutil.rmtree(beside)
    with pytest.raises(ConfigError, match="has no checkpoint that could be logged"):
        _logged(run, tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_an_archive_is_named_as_one_without_advice_to_unpickle_it(samewise, run, home) -> None:
    import tarfile

    with tarfile.open(home / "result.bundle", "w") as archive:
        archive.add(run / "config.yaml", "run/config.yaml")
    for command in ("digest", "eval", "diff"):
        done = samewise(command, "result.bundle", *([run] if command == "diff" else []))
        assert done.returncode == 2
        assert "tar -xf" in done.stderr
        assert "weights_only" not in done.stderr
    assert "is not an override; hint: give one run at a time" in samewise("eval", run, run).stderr
