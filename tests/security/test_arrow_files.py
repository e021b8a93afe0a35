"""Tables in an untrusted data set stay within the memory limits, and a damaged table raises an error that names its file."""

from pathlib import Path
from typing import Any

import pytest

from samewise.datasets.parts import arrow_rows
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
