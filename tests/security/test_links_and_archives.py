"""Nothing is written through a link in a folder that someone else made, and an archive is not read as one of our files."""

import importlib
import io
import os
import shutil
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from samewise_tiny import DIGITS
from torchaudio.datasets.utils import _extract_tar

from samewise.datasets.parts.audio_files import read_audio
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.video_files import read_frames
from samewise.runner.errors import ConfigError, DamagedFile, DataError
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
    done = samewise("train", *TINY, "name=one", code=2)
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
        done = samewise(command, "result.bundle", *([run] if command == "diff" else []), code=2)
        assert "tar -xf" in done.stderr
        assert "weights_only" not in done.stderr
    assert "is not an override; hint: give one run at a time" in samewise("eval", run, run).stderr


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Ghostscript on PATH; returns the file that it creates when it is started."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'mark'}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    assert subprocess.run(["gs"], check=True).returncode == 0
    (tmp_path / "mark").unlink()
    return tmp_path / "mark"


def test_a_program_named_png_is_not_run(tmp_path: Path, ghostscript: Path) -> None:
    (tmp_path / "a.png").write_bytes(EPS)
    with pytest.raises(DataError, match="is a text file, not an image"):
        read_image(tmp_path / "a.png")
    assert not ghostscript.exists()


@pytest.mark.usefixtures("ffmpeg")
def test_a_playlist_named_mp4_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{tmp_path}/other.ts\n#EXT-X-ENDLIST\n")
    with pytest.raises(DataError, match="a list of other files"):
        read_frames(tmp_path / "a.mp4", range)
    with pytest.raises(DataError, match="a list of other files"):
        read_audio(tmp_path / "a.mp4")


def _tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_an_archive_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    """By torchaudio's own function, which its data sets call on what they downloaded."""
    importlib.import_module("samewise.runner.config.instantiate")  # sets the filter before it makes a data set
    root = tmp_path / "root"
    root.mkdir()
    above = _tar(root / "above.tar", (tarfile.TarInfo("../mark"), b"x"))
    absolute = _tar(root / "absolute.tar", (tarfile.TarInfo(f"{tmp_path}/mark"), b"x"))
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
    through = _tar(root / "through.tar", (link, b""), (tarfile.TarInfo("link/mark"), b"x"))
    for archive in (above, absolute, through):
        with suppress(tarfile.FilterError):  # of an absolute name, only the part after the first / is used
            _extract_tar(str(archive), str(root))
        assert not (tmp_path / "mark").exists()
    _extract_tar(str(_tar(root / "honest.tar", (tarfile.TarInfo("a/b.txt"), b"x"))), str(root))
    assert (root / "a" / "b.txt").read_bytes() == b"x"
