"""Images and labels that a table lists."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest
from PIL import Image

from samewise.datasets.image_table import ImageTable
from samewise.datasets.parts.classes import sort_classes
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


def load(path: Path, split: str = "train", **options: object) -> ImageTable:
    return ImageTable(**{"table_path": str(path), "split": split, "image": "file", "label": "kind", "shares": SHARES, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_every_format_of_a_table_gives_the_same_samples(root: Path, form: str) -> None:
    data = {split: load(write(root, form), split) for split in ("train", "valid", "test")}
    assert sum(map(len, data.values())) == 30
    assert data["train"].classes == ["9", "10", "11"]
    for one in data.values():
        for index in range(len(one)):
            assert one[index]["label"] == int(one[index]["image"][0, 0, 0]) % 3
    assert data["valid"].fingerprint() == load(write(root, "csv"), "valid").fingerprint()


def test_a_column_may_give_the_splits_and_paths_may_be_absolute(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    table = write(root, "csv")
    assert {load(table, "valid", split_column="part")[index]["label"] for index in range(10)} == {2}
    assert len(load(table, "test", split_column="part")) == 0
    absolute = write(root, "json", [{**row, "file": str(root / row["file"])} for row in ROWS])
    assert load(absolute).fingerprint() == load(table).fingerprint()
    elsewhere = table.rename(tmp_path_factory.mktemp("tables") / "t.csv")
    assert load(elsewhere, root=str(root)).fingerprint() == load(absolute).fingerprint()


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        (["2", "01", "1", "10"], ["01", "1", "2", "10"]),
        (["10", "-1", "2", "0"], ["-1", "0", "2", "10"]),
        (["0.5", "10.0", "2.0"], ["0.5", "2.0", "10.0"]),
        (["10", "2", "nan"], ["10", "2", "nan"]),
        (["b", "10", "2"], ["10", "2", "b"]),
    ],
)
def test_classes_are_in_one_order_whatever_the_hash_seed(labels: list[str], order: list[str]) -> None:
    assert all(sort_classes(some) == order for some in itertools.permutations([*labels, labels[0]]))


def test_a_split_that_does_not_exist_is_named_and_spaces_do_not_count(root: Path) -> None:
    parts = ("train ", "Train", "unused")
    table = write(root, "csv", [{**row, "part": parts[number % 3] if number else "valid"} for number, row in enumerate(ROWS)])
    assert (len(load(table, split_column="part")), len(load(table, "valid", split_column="part"))) == (19, 1)
    wrong = write(root, "csv", [{**row, "part": "trian" if number < 3 else "train"} for number, row in enumerate(ROWS)])
    with pytest.raises(DataError, match=r"column part: names a split that does not exist, in 3 rows; hint: did you mean 'train'(.|\n)*'trian'"):
        load(wrong, split_column="part")


def test_faults_in_a_table_are_reported(root: Path) -> None:
    table = write(root, "csv")
    with pytest.raises(DataError, match=r"row 1 has no 'kidn'(.|\n)*did you mean 'kind'"):
        load(table, label="kidn")
    with pytest.raises(DataError, match="row 2 has an empty 'kind'"):
        load(write(root, "json", [ROWS[0], {**ROWS[1], "kind": None}]))
    for form in ("csv", "tsv"):
        with pytest.raises(DataError, match="row 2 has an empty 'kind'"):
            load(write(root, form, [ROWS[0], {**ROWS[1], "kind": " "}, *ROWS[2:]]))
    with pytest.raises(DataError, match=r"has a label with a space at its end(.|\n)*'9 '"):
        load(write(root, "csv", [{**ROWS[0], "kind": "9 "}, *ROWS[1:]]))
    table = write(root, "csv")
    (root / "twice.csv").write_text("file,kind,kind\na,1,2\n")
    with pytest.raises(DataError, match="it has two columns 'kind'"):
        load(root / "twice.csv")
    with pytest.raises(DataError, match=r"has 3 classes \(9, 10, 11\)(.|\n)*dataset\.num_classes=3"):
        load(table, num_classes=4)
    with pytest.raises(DataError, match=r"is listed in table\.csv but missing \(\d+ missing in all\)"):
        load(table, root=str(root / "photos"))
    with pytest.raises(DataError, match="lists an image twice"):
        load(write(root, "json", [*ROWS, ROWS[0]]))
    with pytest.raises(DataError, match="lists an image twice"):
        load(write(root, "csv", [*ROWS, {**ROWS[0], "file": f"./photos/../{ROWS[0]['file']}"}]))
    with pytest.raises(DataError, match=r"row 2, kind: holds several values(.|\n)*\['9', '10'\]"):
        load(write(root, "json", [ROWS[0], {**ROWS[1], "kind": ["9", "10"]}]))  # type: ignore[dict-item]
    with pytest.raises(DataError, match="row 2 has an empty 'kind'"):
        load(write(root, "json", [ROWS[0], {**ROWS[1], "kind": float("nan")}]))  # type: ignore[dict-item]
    for name, text in (("a.json", "[{"), ("a.xlsx", "x"), ("a.jsonl", "{"), ("a.json", "{}"), ("a.parquet", "x")):
        (root / name).write_text(text)
        with pytest.raises(DataError, match="is not such a table, or is damaged"):
            load(root / name)
    with pytest.raises(DataError, match=r"the table cannot be read(.|\n)*dataset\.table_path"):
        load(root / "none.csv")


@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_rows_that_a_quote_or_a_comma_would_hide_are_reported(root: Path, form: str) -> None:
    tab = "\t" if form == "tsv" else ","
    rows = [f"photos/{number}.png{tab}{number % 3}{tab}a note" for number in range(30)]
    table = root / f"notes.{form}"
    for number, text, words in (
        (10, '"left side', r":12: has a line break in the column 'note'"),
        (7, f"a{tab} note", r":9: has more fields than there are columns"),
    ):
        wrong = [*rows[:number], rows[number].replace("a note", text), *rows[number + 1 : 20], rows[20].replace("a note", '"right" side'), *rows[21:]]
        table.write_text("\n".join([f"file{tab}kind{tab}note", *wrong]))
        with pytest.raises(DataError, match=words):
            load(table)


def test_a_line_separator_in_a_text_ends_no_line(root: Path) -> None:
    table = root / "lines.jsonl"
    table.write_text(
        "\n".join(json.dumps({**row, "kind": "one\u2028two" if number % 2 else "three"}, ensure_ascii=False) for number, row in enumerate(ROWS)),
        encoding="utf-8",
    )
    assert load(table).classes == ["one\u2028two", "three"]


def test_all_labels_that_are_not_among_the_classes_are_named(root: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)photos/0.png belongs to an unknown class, one of 2; .*'9, 11'\n.*expected: 10, 12"):
        load(write(root, "csv"), classes=["10", "12"])
