"""Conversion of data sets to shards: formats, which samples are in which shard, what is missing.

The shards are the same bytes for any number of processes, and however often the work was stopped.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from pyarrow import Table, parquet

from samewise.runner.config.compose import Composed
from samewise.runner.config.schema import Loader as Settings
from samewise.runner.config.schema import splits_in
from samewise.runner.data.dataset import fingerprint
from samewise.runner.data.keyed import Failure, KeyedDataset
from samewise.runner.data.loading import Loader
from samewise.runner.data.order import Indices, InOrder, Shuffled
from samewise.runner.errors import ConfigError, DataError, SamewiseError
from samewise.runner.interfaces import class_names
from samewise.runner.records.files import read_mapping, write_atomically, write_json
from samewise.runner.shards import storage
from samewise.runner.shards.reader import KEY, PLAN, choice_for
from samewise.runner.training.components import make_dataset, make_part

Keyed = Sequence[tuple[str, Mapping[str, Any]]]
"""Samples: the key of each, which is the name of its file or another text, and its fields."""


def open_splits(composed: Composed) -> dict[str, Any]:
    """Make the data sets of a config that have samples, by split.

    Raises:
        ConfigError: A setting of the data is wrong, or a data set has no encoded files.
    """
    # The data need not fit the rest of the config, nor have classes
    unused = ("recipe", "model", "transforms", "dataset.num_classes")
    ConfigError.raise_all(x for x in composed.problems if not x.path.startswith(unused))
    make, splits = partial(make_part, composed.cfg, composed.project), dict[str, Any]()
    for name in splits_in(composed.cfg.dataset):
        splits[name] = make_dataset(composed.cfg, make, name)
        ConfigError.raise_if(
            not callable(getattr(splits[name], "fields", None)),
            f"dataset.{name}",
            "has no files, each of which is a sample, to copy as they are",
            type(splits[name]).__name__,
            "images, recordings or texts in files, tables or shards; or a data set with a method "
            "fields(index)",
        )
    return {name: x for name, x in splits.items() if len(x)}


def require_plan(out: Path, plan: Mapping[str, Any]) -> None:
    """Raise a ConfigError if there is a folder of shards, also unfinished, with another plan.

    Args:
        out: The folder.
        plan: What `conversion.json` has to say, or a part of it.
    """
    for folder in (out, _unfinished(out)):
        present = read_mapping(folder / PLAN)
        # The command may have been stopped before it wrote the plan
        ConfigError.raise_if(
            folder.exists() and (present or folder == out) and not plan.items() <= present.items(),
            "--out",
            "exists, and does not hold these data with these options",
            str(folder),
            hint="choose another folder, or remove it",
        )


def _unfinished(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def spaced_samples(dataset: Any, most: int) -> Keyed:
    """Return up to so many samples of a data set, evenly spaced."""
    places = np.linspace(0, len(dataset) - 1, min(len(dataset), most), dtype=np.int64)
    return [dataset.fields(place) for place in places.tolist()]


def size_of(fields: Mapping[str, Any]) -> int:
    """Return the bytes of a sample's content."""
    return sum(len(value) for value in fields.values() if isinstance(value, bytes | str))


def _encode(value: Any) -> bytes:
    """Return files as they are, texts in UTF-8, and other values as JSON."""
    text = value if isinstance(value, bytes | str) else json.dumps(value)
    return text.encode() if isinstance(text, str) else text


def _tar(samples: Keyed) -> bytes:
    """Return WebDataset's layout: KEY.ENDING has the content, KEY.json all other fields."""
    raw, stems = io.BytesIO(), set[str]()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for key, fields in samples:
            file = Path(key)
            # A member's ending begins at the first dot of its name
            stem = str(file.with_name(file.stem.replace(".", "_")))
            # Files may differ in their endings only
            stem = f"{stem}-{len(stems)}" if stem in stems else stem
            stems.add(stem)
            # A text is the content if there is no other
            contents = {x: y for x, y in fields.items() if isinstance(y, bytes)} or {
                "text": fields["text"]
            }
            members: dict[str, Any] = {
                file.suffix[1:] or name: content for name, content in contents.items()
            }
            members["json"] = {x: y for x, y in fields.items() if x not in contents}
            for ending, content in members.items():
                header = tarfile.TarInfo(f"{stem}.{ending}")
                header.size = len(encoded := _encode(content))
                archive.addfile(header, io.BytesIO(encoded))
    return raw.getvalue()


def _parquet(samples: Keyed) -> bytes:
    """Return a table with a column for each field, in at most eight row groups."""
    raw, rows = io.BytesIO(), [{KEY: key, **fields} for key, fields in samples]
    parquet.write_table(
        Table.from_pylist(rows),
        raw,
        # In training, a group is read at once and counts as a shard
        row_group_size=max(256, -(-len(rows) // 8)),
        # Files are compressed already, and no two are alike
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    return raw.getvalue()


def _mds(samples: Keyed) -> bytes:
    """Return a shard as `shards.chunks` describes it.

    Raises:
        DataError: The shard has 4 GiB or more, which its offsets cannot count.
    """
    columns, rows = _mds_columns(samples[0][1]), list[bytes]()
    for key, fields in samples:
        values = [_encode({KEY: key, **fields}[name]) for name in columns["column_names"]]
        rows.append(np.array([*map(len, values)], "<u4").tobytes() + b"".join(values))
    described = json.dumps(columns, sort_keys=True).encode()
    offsets = np.cumsum([4 * (len(rows) + 2) + len(described), *map(len, rows)])
    DataError.raise_if(offsets[-1] >> 32, "--to", "mds has less than 4 GiB in a shard")
    return b"".join([np.array([len(rows), *offsets], "<u4").tobytes(), described, *rows])


def _mds_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each shard and the index say of the samples."""
    names, kinds = sorted([KEY, *fields]), {bytes: "bytes", str: "str"}
    return {
        **dict.fromkeys(("compression", "size_limit")),
        "version": 2,
        "format": "mds",
        "hashes": [],
        "column_names": names,
        "column_encodings": [kinds.get(type(fields.get(name, "")), "json") for name in names],
        "column_sizes": [None] * len(names),
    }


def _mds_index(folder: Path, dataset: Any) -> dict[str, Any]:
    """Return the content of `index.json`, which MosaicML's streaming reads first."""
    columns, shards = _mds_columns(dataset.fields(0)[1]), sorted(folder.glob("*.mds"))
    return {
        "version": 2,
        "shards": [
            {
                **columns,
                "samples": int.from_bytes(storage.read(str(path), 0, 4), "little"),
                "raw_data": {"basename": path.name, "bytes": path.stat().st_size, "hashes": {}},
                "zip_data": None,
            }
            for path in shards
        ],
    }


_FORMATS: Mapping[str, Callable[[Keyed], bytes]] = {"tar": _tar, "parquet": _parquet, "mds": _mds}


class _Shards(dict[Path, tuple[Any, Indices]]):
    """The data set of each shard, and its samples' numbers there, by file.

    When a shard is requested it is written. `Loader` reads `span`: nothing is read ahead.
    """

    span = 0

    def __getitem__(self, path: Path) -> Any:
        dataset, places = super().__getitem__(path)
        try:
            return write_atomically(
                path, _FORMATS[path.suffix[1:]]([*map(dataset.fields, places.tolist())])
            )
        except SamewiseError as error:
            return Failure(error.problems, type(error))


def convert(
    splits: Mapping[str, Any],
    out: Path,
    kind: str,
    *,
    samples: int | None,
    mib: int,
    seed: int | None,
    processes: int,
    show: Callable[[Iterable[Any], int], Iterable[Any]],
) -> list[Path]:
    """Write shards, in a folder beside `out`, which gets its name when all of them are there.

    Shards that are already there are kept.

    Args:
        splits: The data sets by name, each with a method `fields`.
        out: The folder of the splits' folders.
        kind: The format: tar, parquet or mds.
        samples: Number of samples of a shard; None: as many as have `mib` on average.
        mib: Size of a shard in MiB.
        seed: Key of the order of the samples; None: the data set's own order.
        processes: Number of processes that write.
        show: Shows the progress over shards, whose number is the second argument.

    Returns:
        The shards.

    Raises:
        ConfigError: The folder has something else.
        DataError: A sample cannot be read, or a shard cannot be written.
    """
    sizes = [size_of(x) for _, x in spaced_samples(max(splits.values(), key=len), 256)]
    count = samples or max(1, round(mib * 2**20 / np.mean(sizes)))
    plan = {
        "format": kind,
        "dataset": choice_for(next(iter(splits.values())).fields(0)[1]),
        "samples": count,
        "seed": seed,
        "splits": {x: [len(y), fingerprint(y, f"dataset.{x}")] for x, y in splits.items()},
        "classes": max((class_names(x) for x in splits.values()), key=len),
    }
    unfinished = _unfinished(out)
    require_plan(out, plan)
    if not out.exists():
        for name in splits:
            (unfinished / name).mkdir(parents=True, exist_ok=True)
        write_json(unfinished / PLAN, plan)
        missing = _missing(splits, unfinished, kind, count, seed)
        settings = Settings(num_workers=processes if processes > 1 else 0)
        loader = Loader(cast(KeyedDataset, missing), cast(Any, missing.__iter__), settings)
        for _ in show(loader, len(missing)):
            pass
        for name, dataset in splits.items() if kind == "mds" else ():
            write_json(unfinished / name / "index.json", _mds_index(unfinished / name, dataset))
        unfinished.rename(out)
    return sorted(out.glob(f"*/*.{kind}"))


def _missing(
    splits: Mapping[str, Any], folder: Path, kind: str, count: int, seed: int | None
) -> _Shards:
    """Return the shards that are not there, after removing files that are not whole."""
    for temporary in folder.glob("*/.*.tmp"):
        temporary.unlink()
    return _Shards(
        {
            path: (dataset, indices[start : start + count])
            for name, dataset in splits.items()
            for order in [InOrder if seed is None else Shuffled]
            for indices in [order(dataset, seed=seed or 0).indices(0).numpy()]
            for start in range(0, len(indices), count)
            if not (path := folder / name / f"{start // count:05}.{kind}").exists()
        }
    )
