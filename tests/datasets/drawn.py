"""Draws odd files of data sets, and compares what readers give with what independent ones give.

Tests import this as `samewise_datasets_drawn`.
"""

import codecs
import contextlib
import csv
import io
import json
import math
import os
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from pyarrow import parquet

from samewise.runner.errors import ConfigError

MARKS = {
    "utf-8-sig": codecs.BOM_UTF8,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
}
WORDS = (
    *("cat", "dog", "a b", "Cat", "10", "9", "01", "it's", 'say "x"', "a,b", "a;b", "caf\u00e9"),
    *("cafe\u0301", "\u0130I", "\u4e2d\u6587", "d\u043eg", "x_y", "-1", "1e3", "nan", "#1", "%41"),
)
"""Names of files, folders and classes."""


class Refused(Exception):
    """The independent reader cannot tell what a file says."""


def refuse(condition: Any, reason: str) -> None:
    if condition:
        raise Refused(reason)


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Take an error of a library that reads the file for its refusal."""
    try:
        yield
    except errors as error:
        raise Refused(f"{type(error).__name__}: {error}") from None


class Case:
    """A folder of files that a random source makes odd.

    `sound` stays true until something is written that a reader may refuse.
    """

    def __init__(self, random: Random, folder: Path) -> None:
        self.random, self.folder, self.sound = random, folder, True

    def pick(self, usual: Sequence[Any], odd: Sequence[Any] = (), *, share: float = 0.12) -> Any:
        """Return one of the usual values, or rarely an odd one."""
        if odd and self.random.randrange(1000) < 1000 * share:
            self.sound = False
            return self.random.choice(odd)
        return self.random.choice(usual)

    def words(self, count: int) -> list[str]:
        """Return distinct names, also if case and Unicode forms are not told apart."""
        names = dict[str, str]()
        for _ in range(20 * count):
            if len(names) == count:
                break
            name = self.random.choice(WORDS)
            names.setdefault(unicodedata.normalize("NFKC", name).casefold(), name)
        return list(names.values())

    def write(self, path: Path, text: str) -> None:
        """Write a text in some encoding, with some line ends."""
        ends = self.pick(["\n", "\r\n", "\r"])
        text = text.rstrip("\n") + self.pick(["\n", "", "\n\n"])
        encoding = self.pick(["utf-8", *MARKS], ["latin-1", "gbk", "utf-16-le", "bare"], share=0.06)
        raw = text.replace("\n", ends)
        if encoding == "bare":
            path.write_bytes(raw.encode("utf-16-be"))
        elif self.sound or encoding in ("utf-8", *MARKS):
            path.write_bytes(MARKS.get(encoding, b"") + raw.encode(encoding.removesuffix("-sig")))
        else:
            path.write_bytes(raw.encode(encoding, "replace"))

    def spell(self, path: Path) -> str:
        """Return another spelling of a folder's or file's path."""
        kind = self.pick(["absolute", "relative", "link", "dots", "slash"])
        if kind == "relative":
            return os.path.relpath(path)
        if kind == "dots":
            return f"{path.parent}/../{path.parent.name}/./{path.name}"
        if kind == "link":
            link = self.folder.with_name(f"{self.folder.name}-link")
            if not link.is_symlink():
                link.symlink_to(self.folder)
            return str(link / path.relative_to(self.folder))
        return f"{path.parent}//{path.name}" if kind == "slash" else str(path)

    def number(self, value: float) -> Any:
        """Return a number, as some program writes it, or what is none."""
        return self.pick(
            [*[value] * 6, float(value)],
            [
                *(str(value), f"{value},5", "1,000", "nan", "", None, -value - 1, 10**30, 1e300),
                *(True, float("nan"), float("inf"), [value], value + 0.7, "x", 0),
            ],
            share=0.006,
        )


def text_of(path: Path) -> str:
    """Return a text in UTF-8, or as its byte order mark says, with newlines at its lines' ends."""
    raw = path.read_bytes()
    mark = next((mark for mark in MARKS.items() if raw.startswith(mark[1])), ("utf-8", b""))
    with refusing(UnicodeDecodeError):
        text = raw.removeprefix(mark[1]).decode(mark[0].removesuffix("-sig"))
    return io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True)


def share_of(name: str, key: str = "") -> float:
    """Return a name's place in [0, 1), which decides its split, whatever its Unicode form."""
    composed = unicodedata.normalize("NFC", name)
    digest = blake2b(f"{key}\0{composed}".encode("utf-8", "surrogateescape"), digest_size=6)
    return int(digest.hexdigest(), 16) / 2**48


SPLITS = ("train", "valid", "test")
SHARES = {"valid": 0.3, "test": 0.2}


def of_split(names: list[str], split: str) -> list[str]:
    """Return the names that SHARES assign to a split."""
    bounds = {"valid": (0, 0.3), "test": (0.3, 0.5), "train": (0.5, 1)}[split]
    chosen = [name for name in names if bounds[0] <= share_of(name) < bounds[1]]
    refuse(not chosen and split != "test", "an empty split")
    return chosen


def splits_of(names: list[str]) -> dict[str, list[str]]:
    return {split: of_split(names, split) for split in SPLITS}


def judge(case: Case, read: Callable[[], Any], reference: Callable[[], Any]) -> bool:
    """Compare a reader's samples with the independent reader's; return whether it read them.

    An error counts as well, if its first line names a file of the case and not all is sound.
    """
    try:
        expected = reference()
    except Refused as error:
        expected = error
    try:
        samples = read()
    except ConfigError as error:
        first_line = str(error).splitlines()[0]
        if case.sound or case.folder.parent.name not in first_line:
            raise AssertionError(f"refused: {error}") from error
        return False
    if isinstance(expected, Refused):
        raise AssertionError(f"read, but {expected}")
    require_same(samples, expected)
    return True


def require_same(samples: Any, expected: Any, where: str = "") -> None:
    """Require equal samples, in the same order; arrays within their tolerance."""
    if isinstance(expected, dict):
        for key in expected:
            require_same(samples[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(samples) == len(expected), f"{where}: {len(samples)}, not {len(expected)}"
        for place, (sample, item) in enumerate(zip(samples, expected, strict=True)):
            require_same(sample, item, f"{where}[{place}]")
    elif isinstance(expected, Near):
        array = np.asarray(samples)
        assert array.shape == expected.array.shape, f"{where}: {array.shape}"
        difference = np.abs(array.astype(np.float64) - expected.array).max(initial=0)
        assert difference <= expected.most, f"{where}: differs by {difference}"
    else:
        assert samples == expected, f"{where}: {samples!r}, not {expected!r}"


class Near:
    """Array that a reader's must equal, up to a difference."""

    def __init__(self, array: Any, most: float) -> None:
        self.array, self.most = np.asarray(array, dtype=np.float64), most


FORMATS = ("JPEG", "PNG", "BMP", "DIB", "GIF", "PPM", "TIFF", "WEBP")
ENDINGS = {"JPEG": ".jpg", "PNG": ".png", "BMP": ".bmp", "GIF": ".gif", "TIFF": ".tif"} | {"PPM": ".ppm", "WEBP": ".webp"}
MODES = {
    "JPEG": ["RGB", "RGB", "L", "CMYK"],
    "PNG": ["RGB", "L", "P", "RGBA", "LA", "1", "I;16"],
    "BMP": ["RGB", "L", "P", "1"],
    "GIF": ["RGB", "L", "P"],
    "TIFF": ["RGB", "L", "P", "RGBA", "CMYK", "1", "I;16"],
    "PPM": ["RGB", "L", "1", "I;16"],
    "WEBP": ["RGB", "RGBA"],
}


def draw_image(case: Case, width: int, height: int, *, upright: bool = True) -> tuple[bytes, str]:
    """Return an image file's content, and its usual ending."""
    form = case.pick(["JPEG", "PNG", "PNG", *ENDINGS])
    mode = case.pick(MODES[form])
    numbers = np.random.default_rng(case.random.randrange(1 << 16))
    if mode == "I;16":
        image = Image.fromarray(numbers.integers(0, 1 << 16, (height, width)).astype(np.uint16))
    else:
        image = Image.fromarray(numbers.integers(0, 256, (height, width, 3)).astype(np.uint8))
        image = image.convert("L").convert("LA") if mode == "LA" else image.convert(mode)
    options = dict[str, Any]()
    if form in ("JPEG", "PNG", "WEBP", "TIFF") and not case.random.randrange(4):
        orientations = [1, 2, 3, 4, 5, 6, 7, 8, 0, 9]
        exif = Image.Exif()
        exif[0x0112] = case.pick(orientations[: 10 if upright else 4])
        options["exif"] = exif.tobytes()
    if form == "WEBP":
        options["lossless"] = True
    if form == "JPEG":
        options |= {"quality": 95, "progressive": case.pick([False, True])}
    file = io.BytesIO()
    image.save(file, form, **options)
    return damage(case, file.getvalue()), ENDINGS[form]


def damage(case: Case, raw: bytes, *, share: float = 0.04) -> bytes:
    """Return the bytes, rarely changed or cut short."""
    kind = case.pick(["whole"], ["cut", "flip", "empty", "text", "more", "zeros"], share=share)
    place = case.random.randrange(max(1, len(raw)))
    return {
        "whole": lambda: raw,
        "cut": lambda: raw[:place],
        "flip": lambda: raw[:place] + bytes(x ^ 0x41 for x in raw[place:][:1]) + raw[place + 1 :],
        "empty": lambda: b"",
        "text": lambda: b"version https://git-lfs.github.com/spec/v1\n",
        "more": lambda: raw + bytes(range(40)),
        "zeros": lambda: raw[:place] + bytes(len(raw) - place),
    }[kind]()


def pixels_of(raw: bytes, mode: str = "RGB", *, upright: bool = False) -> Near:
    """Return [C, H, W] of an image, by Pillow.

    Raises:
        Refused: Pillow does not read it.
    """
    # Pillow refuses a PNG for damage in a chunk that says nothing of the pixels
    if raw.startswith(b"\x89PNG") and raw[37:41] == b"eXIf" and not upright:
        raw = raw[:33] + raw[45 + int.from_bytes(raw[33:37], "big") :]
    with refusing(Exception), Image.open(io.BytesIO(raw), formats=FORMATS) as image:
        form = image.format
        image.load()
        opened = ImageOps.exif_transpose(image) if upright else image
        if opened.mode.startswith("I"):
            array = np.rint(np.asarray(opened, dtype=np.float64) * 255 / 65535)
            opened = Image.fromarray(array.astype(np.uint8))
        array = np.asarray(opened.convert(mode))
    array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    tolerances = {"RGB": 3, "L": 24} if form == "JPEG" else {"RGB": 0, "L": 2}
    return Near(array, tolerances[mode])


def write_table(case: Case, path: Path, rows: list[dict[str, Any]], *, tab_quotes: bool = True) -> dict[str, Any]:
    """Write a table in one of its formats; return how a plain reader opens it."""
    form = case.pick(["csv", "csv", "tsv", "json", "jsonl", "parquet"])
    if form == "parquet":
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            parquet.write_table(pa.table(columns), path.with_suffix(".parquet"))
            return {"form": form, "path": path.with_suffix(".parquet")}
        form = "json"
    path = path.with_suffix(case.pick([f".{form}", f".{form.upper()}", ".txt"]))
    if form == "json":
        case.write(path, json.dumps(rows, ensure_ascii=case.pick([True, False]), indent=1))
    elif form == "jsonl":
        lines = [json.dumps(row, ensure_ascii=case.pick([True, False])) for row in rows]
        case.write(path, case.pick(["\n", "\n\n"]).join(lines))
    else:
        mark = "\t" if form == "tsv" else case.pick([",", ",", ";"])
        mark = "," if path.suffix == ".txt" and mark == ";" else mark
        text = io.StringIO()
        quoting = case.pick([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
        if mark == "\t" and not tab_quotes:
            quoting = csv.QUOTE_NONE
        quotes = {"quotechar": None} if quoting == csv.QUOTE_NONE else {}
        writer = csv.writer(text, delimiter=mark, quoting=quoting, lineterminator="\n", **quotes)
        writer.writerow(rows[0])
        for row in rows:
            values = list(row.values())
            writer.writerow(case.pick([values], [[*values, "more"], values[:1], values[:-1]], share=0.008))
            if case.pick([False], [True], share=0.008):
                text.write('"')
        case.write(path, text.getvalue())
        return {"form": form, "path": path, "mark": mark, "quoting": quoting}
    return {"form": form, "path": path}


def table_rows(form: str, path: Path, mark: str = "", *, quoting: int = 0) -> list[dict[str, Any]]:
    """Return a table's rows, by the libraries that write such tables."""
    if form == "parquet":
        return parquet.read_table(path).to_pylist()
    text = text_of(path)
    with refusing(ValueError, csv.Error):
        if form == "json":
            return json.loads(text)
        if form == "jsonl":
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        table = csv.DictReader(io.StringIO(text, newline=""), delimiter=mark, quoting=quoting)
        rows = list(table)
    if any(None in row or "\n" in "".join(filter(None, row.values())) for row in rows):
        raise Refused("a row has more fields, or a line break")
    return rows


def cell(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None or value != value or isinstance(value, list | dict) or not str(value).strip():
        raise Refused(f"no {column}")
    return str(value)


def path_in_list(case: Case, folder: Path, name: str) -> str:
    """Return a spelling of a file's path in a list in the folder."""
    path = folder / name
    link = case.folder / "link"
    if not link.is_symlink():
        link.symlink_to(folder)
    return case.pick(
        [
            *[name] * 8,
            *(f"./{name}", str(path), f"{folder}/../{folder.name}/{name}", str(link / name)),
            *(f"../{folder.name}/{name}", f"sub/../{name}" if (folder / "sub").is_dir() else name),
        ],
        [
            *(name.replace("/", "\\"), f" {name}", name.swapcase(), f"{folder.name}/{name}", ""),
            *(unicodedata.normalize("NFD", name), unicodedata.normalize("NFC", name), f"{name}\0"),
            *(f"{name}\0/x", "."),
        ],
        share=0.008,
    )


def resolved(folder: Path, listed: str) -> str:
    """Return a listed file's name relative to the folder, however it is spelt."""
    if "\0" in listed:
        return listed
    path = folder / listed
    return os.path.relpath(os.path.join(os.path.realpath(path.parent), path.name), folder)


def identity(folder: Path, listed: str) -> str:
    """Return the name of a listed file, which is there."""
    refuse(not (folder / (name := resolved(folder, listed))).is_file(), f"no file {listed!r}")
    return name


def number_of(value: Any, *, whole: bool = False) -> float:
    refuse((whole and isinstance(value, bool)) or not isinstance(value, int | float | str), f"no number: {value!r}")
    with refusing(ValueError, OverflowError):
        number = int(value) if whole and isinstance(value, str) else float(value)
    refuse(not math.isfinite(number) or (whole and number != int(number)), f"no number: {value!r}")
    return int(value) if whole else number


def try_cases(tmp_path: Path, test: Callable[[Case], bool], *, share: float) -> None:
    """Run a test on drawn cases.

    SAMEWISE_FUZZ says how many are drawn in all tests together; each takes its share.
    SAMEWISE_FUZZ_SEED draws others: a number, or "random".
    """
    count = max(1, round(int(os.environ.get("SAMEWISE_FUZZ", "200")) * share))
    number = os.environ.get("SAMEWISE_FUZZ_SEED", "0")

    were_read = list[bool]()

    def run(random: Random) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as home:
            (folder := Path(home) / "case").mkdir()
            were_read.append(test(Case(random, folder)))

    options = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=number == "0",
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    draws = given(st.randoms(note_method_calls=False, use_true_random=True))(run)
    (options(draws) if number in ("0", "random") else seed(int(number))(options(draws)))()
    print(f"{sum(were_read)} of {len(were_read)} cases were read")
    assert len(were_read) < 100 or 5 * sum(were_read) > len(were_read)
