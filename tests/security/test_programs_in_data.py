"""Files in an untrusted data set run no program, lead to no other file, and write nothing outside their folder."""

import importlib
import io
import os
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
from torchaudio.datasets.utils import _extract_tar

from samewise.datasets.parts.audio_files import read_audio
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.video_files import read_frames
from samewise.runner.errors import DataError

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
