"""Images and labels that a table lists."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from samewise.datasets.image_table import ImageTable
from samewise.runner.errors import DataError

SHARES = {"valid": 0.3, "test": 0.2}
ROWS = [{"file": f"photos/{number}.png", "kind": str(9 + number % 3), "part": ("train", "train", "val")[number % 3]} for number in range(30)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for number in range(30):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / "photos" / f"{number}.png")
    return tmp_path


def write(root: Path, form: str, rows: list[dict[str, str]] = ROWS) -> Path:
    path = root / f"table.{form}"
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist([{**row, "kind": int(row["kind"])} for row in rows]), path)
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "jsonl":
        path.write_text("\n".join(json.dumps({**row, "kind": int(row["kind"])}) for row in rows))
    else:
        with open(path, "w", newline="", encoding="utf-8-sig") as handle:
            writer = csv.DictWriter(handle, list(rows[0]), delimiter="\t" if form == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def made(path: Path, split: str = "train", **options: object) -> ImageTable:
    return ImageTable(**{"table_path": str(path), "split": split, "image": "file", "label": "kind", "shares": SHARES, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_every_form_of_a_table_gives_the_same_samples(root: Path, form: str) -> None:
    data = {split: made(write(root, form), split) for split in ("train", "valid", "test")}
    assert sum(map(len, data.values())) == 30
    assert data["train"].classes == ["9", "10", "11"]
    for one in data.values():
        for index in range(len(one)):
            assert one[index]["label"] == int(one[index]["image"][0, 0, 0]) % 3
    assert data["valid"].fingerprint() == made(write(root, "csv"), "valid").fingerprint()


def test_a_column_may_say_the_splits_and_names_may_be_absolute(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    table = write(root, "csv")
    assert {made(table, "valid", split_column="part")[index]["label"] for index in range(10)} == {2}
    assert len(made(table, "test", split_column="part")) == 0
    absolute = write(root, "json", [{**row, "file": str(root / row["file"])} for row in ROWS])
    assert made(absolute).fingerprint() == made(table).fingerprint()
    elsewhere = table.rename(tmp_path_factory.mktemp("tables") / "t.csv")
    assert made(elsewhere, root=str(root)).fingerprint() == made(absolute).fingerprint()


def test_what_is_wrong_with_a_table_is_said(root: Path) -> None:
    table = write(root, "csv")
    with pytest.raises(DataError, match=r"row 1 has no 'kidn'(.|\n)*did you mean 'kind'"):
        made(table, label="kidn")
    with pytest.raises(DataError, match=r"has 3 classes \(9, 10, 11\)(.|\n)*dataset\.num_classes=3"):
        made(table, num_classes=4)
    with pytest.raises(DataError, match=r"is listed in table\.csv but missing, one of"):
        made(table, root=str(root / "photos"))
    with pytest.raises(DataError, match="lists an image twice"):
        made(write(root, "json", [*ROWS, ROWS[0]]))
    for name, text in (("a.json", "[{"), ("a.xlsx", "x"), ("a.jsonl", "{"), ("a.json", "{}"), ("a.parquet", "x")):
        (root / name).write_text(text)
        with pytest.raises(DataError, match="is not such a table, or is damaged"):
            made(root / name)
    with pytest.raises(DataError, match=r"the table cannot be read(.|\n)*dataset\.table_path"):
        made(root / "none.csv")
