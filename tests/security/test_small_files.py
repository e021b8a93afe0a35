"""A small file that unpacks to a large one stays within the limits of memory and time: its unpacked size is limited, not only its bytes."""

import resource
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.lists import read_rows
from samewise.runner.errors import DataError


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
