"""Tables and pictures in an untrusted data set stay within the limits of memory and time, and a damaged table raises an error that names its file."""

import resource
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samewise.datasets.parts import arrow_rows
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.lists import read_rows
from samewise.runner.errors import DataError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")


def write(folder: Path, *batches: Any) -> Path:
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return folder / "data.arrow"


def test_null_rows_are_counted_before_they_are_allocated(tmp_path: Path) -> None:
    """288 bytes took 6.7 GB."""
    file = write(tmp_path, pa.record_batch([pa.nulls(200_000_000)], names=["label"]))
    assert file.stat().st_size < 1000
    with pytest.raises(DataError, match="has 200,000,000 rows"):
        arrow_rows.tables(str(file), {"label": "label"})


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_repeated_text_counts_towards_the_limit_each_time(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWISE_MAX_FILE_BYTES", "100000000")
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), ["x" * 1_000_000])
    file = write(tmp_path, pa.record_batch([column], names=["label"]))
    if form == "parquet":
        from pyarrow import parquet

        parquet.write_table(pa.table({"label": column}), file := tmp_path / "data.parquet")
    assert file.stat().st_size < 2_000_000
    with pytest.raises(DataError, match=r"bytes, more than the limit"):
        arrow_rows.tables(str(file), {"label": "label"})


def test_offsets_outside_the_file_are_reported_as_damage(tmp_path: Path) -> None:
    file = write(tmp_path, pa.record_batch([pa.array(["ab", "cd", "ef"])], names=["label"]))
    sound, wrong = (b"".join(number.to_bytes(4, "little") for number in (0, 2, 4, last)) for last in (6, 1 << 30))
    assert file.read_bytes().count(sound) == 1
    assert arrow_rows.tables(str(file), {"label": "label"})[0]["train"].num_rows == 3
    file.write_bytes(file.read_bytes().replace(sound, wrong))
    with pytest.raises(DataError, match=r"data\.arrow.*is damaged"):
        arrow_rows.tables(str(file), {"label": "label"})


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def png(packed: bytes) -> bytes:
    """8 x 8 pixels."""
    chunks = ((b"IHDR", struct.pack("!IIBBBBB", 8, 8, 8, 2, 0, 0, 0)), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data)) for kind, data in chunks)


def test_a_png_that_holds_more_than_its_pixels_is_not_unpacked(tmp_path: Path) -> None:
    """2 MB took a minute."""
    (tmp_path / "a.png").write_bytes(png(zlib.compress(bytes(25 * 8))))
    assert read_image(tmp_path / "a.png").shape == (3, 8, 8)
    (tmp_path / "a.png").write_bytes(png(zlib.compress(bytes(1 << 27), 1)))
    with pytest.raises(DataError, match="more than 8 x 8 pixels take"):
        read_image(tmp_path / "a.png")


def test_a_table_that_repeats_values_beyond_the_limits_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 kB took more memory than there was."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"

    def rows() -> list[Any]:
        return [row.values for row in read_rows(file, ("file", "label"), item="image", setting="dataset.table_path")]

    def write(rows: int, name: str) -> None:
        repeated = [arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, arrow.int32()), [one]) for one in (name, "x")]
        parquet.write_table(arrow.table(repeated, names=["file", "label"]), file, compression="zstd")

    write(3, "a.png")
    assert rows() == [{"file": "a.png", "label": "x"}] * 3
    monkeypatch.setenv("SAMEWISE_MAX_ROWS", "1000")
    write(1001, "a.png")
    with pytest.raises(DataError, match=r"has 1,001 rows.*SAMEWISE_MAX_ROWS"):
        rows()
    monkeypatch.setenv("SAMEWISE_MAX_FILE_BYTES", str(1 << 28))
    write(1000, "a" * (1 << 20))
    with pytest.raises(DataError, match=r"has 1,048,577,000 bytes.*SAMEWISE_MAX_FILE_BYTES"):
        rows()
    parquet.write_table(arrow.table({"file": [["a"]], "label": ["x"]}), file)
    with pytest.raises(DataError, match="not text or numbers"):
        rows()
