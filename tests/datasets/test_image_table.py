"""Images and labels that a table lists."""

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
    if form == "json":
        path.write_text(json.dumps(rows))
    else:
        with open(path, "w", newline="", encoding="utf-8-sig") as handle:
            writer = csv.DictWriter(handle, list(rows[0]), delimiter="\t" if form == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def load(path: Path, split: str = "train", **options: object) -> ImageTable:
    return ImageTable(**{"table_path": str(path), "split": split, "image": "file", "label": "kind", "shares": SHARES, **options})  # type: ignore[arg-type]


def test_faults_in_a_table_are_reported(root: Path) -> None:
    table = write(root, "csv")
    with pytest.raises(DataError, match=r"table.csv:2: has no column 'kidn'(.|\n)*did you mean 'kind'"):
        load(table, label="kidn")
    with pytest.raises(DataError, match="row 2: has nothing in the column 'kind'"):
        load(write(root, "json", [ROWS[0], {**ROWS[1], "kind": None}]))
    for form in ("csv", "tsv"):
        with pytest.raises(DataError, match=":3: has nothing in the column 'kind'"):
            load(write(root, form, [ROWS[0], {**ROWS[1], "kind": " "}, *ROWS[2:]]))
    with pytest.raises(DataError, match=r"has two class names that look the same: '9 ' \(spelt with U\+0020 SPACE\) and '9'"):
        load(write(root, "csv", [{**ROWS[0], "kind": "9 "}, *ROWS[1:]]))
    table = write(root, "csv")
    (root / "twice.csv").write_text("file,kind,kind\na,1,2\n")
    with pytest.raises(DataError, match="it has two columns 'kind'"):
        load(root / "twice.csv")
    with pytest.raises(DataError, match=r"has 3 classes \(9, 10, 11\)(.|\n)*dataset\.num_classes=3"):
        load(table, num_classes=4)
    with pytest.raises(DataError, match=r"is listed in table\.csv but missing, as are \d+ more"):
        load(table, root=str(root / "photos"))
    with pytest.raises(DataError, match="lists a file twice"):
        load(write(root, "json", [*ROWS, ROWS[0]]))
    with pytest.raises(DataError, match="lists a file twice"):
        load(write(root, "csv", [*ROWS, {**ROWS[0], "file": f"./photos/../{ROWS[0]['file']}"}]))
    with pytest.raises(DataError, match=r"row 2: holds several values in the column 'kind'(.|\n)*\['9', '10'\]"):
        load(write(root, "json", [ROWS[0], {**ROWS[1], "kind": ["9", "10"]}]))  # type: ignore[dict-item]
    with pytest.raises(DataError, match="row 2: has nothing in the column 'kind'"):
        load(write(root, "json", [ROWS[0], {**ROWS[1], "kind": float("nan")}]))  # type: ignore[dict-item]
    for name, text in (("a.json", "[{"), ("a.parquet", "x")):
        (root / name).write_text(text)
        with pytest.raises(DataError, match="is not a list of images, or is damaged"):
            load(root / name)
    with pytest.raises(DataError, match=r"the list of images cannot be read(.|\n)*dataset\.table_path"):
        load(root / "none.csv")


@pytest.mark.parametrize(
    ("listed", "cause"),
    [
        ("photos\\1.png", "write '/' between folders, not '\\\\': photos/1.png"),
        ("photos/1.PNG", "the list has '1.PNG', the folder '1.png'"),
        ("photos/1.jpg", "there is 1.png"),
        ("photos/cafe\u0301.png", r"spelt with U\+0301 COMBINING ACUTE ACCENT\), the folder 'caf\u00e9.png' \(spelt with U\+00E9"),
        ("gone/1.png", "dataset.root=FOLDER"),
    ],
)
def test_the_cause_of_a_missing_file_is_named(root: Path, listed: str, cause: str) -> None:
    (root / "photos" / "0.png").rename(root / "photos" / "caf\u00e9.png")
    (root / "list.csv").write_text(f"file,kind\n{listed},a\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"list\.csv but missing; hint: .*{cause}"):
        load(root / "list.csv", shares={})


@pytest.mark.parametrize(
    ("label", "what"),
    [("caf\u00e9", r"U\+00E9 LATIN SMALL LETTER E WITH ACUTE"), (" cafe\u0301", r"U\+0020 SPACE"), ("cafe\u0301\u200b", r"U\+200B ZERO WIDTH SPACE")],
)
def test_labels_that_differ_only_in_what_cannot_be_seen_are_refused(root: Path, label: str, what: str) -> None:
    with pytest.raises(DataError, match=rf"two class names that look the same: (.|\n)*{what}"):
        load(write(root, "csv", [{**ROWS[0], "kind": "cafe\u0301"}, {**ROWS[1], "kind": label}]), shares={})


@pytest.mark.parametrize("stored", [b"GIF89a", {"bytes": b"GIF89a", "path": "a.gif"}])
def test_a_table_that_contains_its_images_names_the_data_set_that_reads_them(tmp_path: Path, stored: object) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    parquet.write_table(arrow.table({"file": [stored], "kind": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet: has .*binary.* in the column 'file', not text or numbers; hint: dataset=hugging_face_images"):
        load(tmp_path / "t.parquet")


def test_a_column_holds_the_weights_of_the_samples(root: Path) -> None:
    data = load(write(root, "csv"), weight="kind")
    assert data.weights.tolist() == [float(data.classes[data[index]["label"]]) for index in range(len(data))]
