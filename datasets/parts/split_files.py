"""Assigns the files of a Hugging Face data set to its splits.

The data set itself may list them; otherwise file names decide, as in the library `datasets`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from samewise.datasets.parts.folders import list_files
from samewise.datasets.parts.lists import read_text
from samewise.runner.errors import DataError, Problem, first_few, first_line

MEANINGS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The library's names of splits, and the names here."""

EXPECTED = (
    "a folder written by save_to_disk, .arrow or .parquet files, a folder of them, or NAME of "
    "a data set in the cache of `datasets`"
)

_BETWEEN_WORDS = re.compile(r"[-._ 0-9]+")
_SHARD = re.compile(r"([^-]+)-\d{5}-of-\d{5}")
_HEADER = re.compile(r"\s*---\n(.*?)\n---(?:\n|$)", re.DOTALL)
_CONFIGS = re.compile(r"^configs:.*?(?=^[^\s#-]|\Z)", re.DOTALL | re.MULTILINE)
_LONGEST = 100_000
"""Most characters of a README's list of files."""


def files_by_split(place: Path) -> dict[str, list[Path]]:
    """Return the files of `train`, `valid` and `test`, as far as these splits exist.

    All files are `train` if nothing else is said. Other splits are left out.

    Args:
        place: A file; a folder that `save_to_disk` wrote, whose dataset_dict.json lists its splits;
            or a folder of files. A README.md in the folder may list the splits, under `configs`;
            else the names of files in the library's cache and in `data/` end in the split
            (`data/extra-00000-of-00002.parquet`); else a word in the name of a file or its folders
            names it (`train.clean/0000.parquet`).

    Raises:
        DataError: There are no files; some name their split and others do not, or two; two splits
            have the same meaning; or no split is known.
    """
    if place.is_file():
        return {"train": [place]}
    if (state := place / "state.json").is_file():
        return {"train": _saved_files(state)}
    if (dictionary := place / "dataset_dict.json").is_file():
        return _by_meaning(
            place,
            {
                name: _saved_files(place / name / "state.json")
                for name in _saved(dictionary, lambda content: content["splits"])
            },
        )
    files = [
        file
        for file in sorted(place / name for name in list_files(place, (".parquet", ".arrow")).names)
        if (file.suffix == ".parquet" or (file.suffix == ".arrow" and file.parent == place))
        # The library's map and filter write caches; folders with such names belong to no data set
        and not file.match("cache-*.arrow")
        and not any(part.startswith("__") for part in file.relative_to(place).parts[:-1])
    ]
    DataError.raise_if(
        not files,
        str(place),
        "contains no data set",
        expected=EXPECTED,
        hint="dataset=table reads images that a CSV or JSON file lists, "
        "dataset=image_folder and dataset=class_folders those in folders by class",
    )
    return _by_meaning(place, _listed(place, files) or _told_apart(place, files))


def _by_meaning(place: Path, files_by_name: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    names = dict[str, list[str]]()
    for name in files_by_name:
        names.setdefault(MEANINGS.get(name.lower(), name), []).append(name)
    files_by_meaning = {
        meaning: files_by_name[spellings[0]]
        for meaning, spellings in names.items()
        if meaning in MEANINGS.values()
    }
    for meaning in files_by_meaning:
        DataError.raise_if(
            len(names[meaning]) > 1,
            str(place),
            f"has {len(names[meaning])} splits that mean {meaning}",
            names[meaning],
            "one of them",
            "join them, or give the others another name",
        )
    DataError.raise_if(
        not files_by_meaning,
        str(place),
        "has no split for training",
        sorted(files_by_name),
        "train",
        "dataset.root can also be the folder, or the file, of one split",
    )
    return files_by_meaning


def _told_apart(place: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files by the splits that their names say."""
    splits = {file: _split_of(file, place) for file in files}
    if len({*splits.values()}) == 1 and not MEANINGS.keys() & {*splits.values()}:
        return {"train": [*files]}
    files_of_split = dict[str, list[Path]]()
    for file, name in splits.items():
        files_of_split.setdefault(
            name or _of_shard(file) or _of_converted(file.relative_to(place)), []
        ).append(file)
    if silent := files_of_split.get(""):
        raise DataError(
            Problem(
                str(place),
                "other files say which split they are of, but not "
                f"{first_few([str(file.relative_to(place)) for file in silent], 5)}",
                expected="the split in each file's name, as train-00000-of-00001.parquet, or its "
                "folder's",
                hint="rename those files, or move them elsewhere",
            )
        )
    return files_of_split


def _split_of(file: Path, place: Path) -> str:
    """Return the split that a file's name says last, or its folders; empty if none does.

    Examples are test for `my-train-test.parquet` and `default/test/0000.parquet`.
    """
    below = file.relative_to(place)
    if file.suffix == ".arrow" and (file.parent / "dataset_info.json").is_file():
        # The library's cache names its files NAME-SPLIT
        return _of_shard(file) or file.stem.rpartition("-")[2].lower()
    if below.parts[:-1] == ("data",) and (name := _of_shard(file)):
        return name
    name_of_split = dict[str, str]()
    for name in (file.stem, *reversed(below.parts[:-1])):
        if meanings := [
            MEANINGS[word] for word in _BETWEEN_WORDS.split(name.lower()) if word in MEANINGS
        ]:
            name_of_split.setdefault(meanings[-1], name)
    if len(name_of_split) > 1:
        names = " but ".join(f"{name!r} says {split}" for split, name in name_of_split.items())
        raise DataError(
            Problem(
                str(file),
                f"has two splits in its name: {names}",
                expected="one",
                hint="rename it, or set dataset.root to a folder below",
            )
        )
    return next(iter(name_of_split), "")


def _of_shard(file: Path) -> str:
    """Return the split in a name SPLIT-00000-of-00001; empty for other names."""
    return match[1].lower() if (match := _SHARD.search(file.stem)) else ""


def _of_converted(below: Path) -> str:
    """Return the split in SPLIT/0000.parquet, as Hugging Face converts data sets; else empty."""
    return (
        below.parts[-2].lower()
        if len(below.parts) > 1 and re.fullmatch(r"\d{4}", below.stem)
        else ""
    )


def _listed(place: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files that README.md lists for its only, or default, configuration; else empty."""
    readme = place / "README.md"
    text = _HEADER.match(read_text(readme)) if readme.is_file() else None
    block = _CONFIGS.search(text[1]) if text else None
    if block is None:
        return {}
    try:
        configs = _configs(block[0])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            Problem(
                str(readme),
                f"has a list of configs that cannot be read: {type(error).__name__}: "
                f"{first_line(error)}",
                expected="configs as https://huggingface.co/docs/hub/datasets-manual-configuration "
                "has them",
            )
        ) from None
    chosen = [x for x in configs if len(configs) == 1 or x[0] == "default" or x[1]]
    if len(chosen) != 1:
        names = [name for name, *_ in configs]
        folder = next(
            (place / name for name in names if "/" not in name and (place / name).is_dir()), None
        )
        raise DataError(
            Problem(
                str(readme),
                f"lists {len(names)} data sets, its configs",
                names,
                "one, or a default",
                f"dataset.root={folder}"
                if folder
                else f"datasets.load_dataset('{place}', '{names[0]}').save_to_disk('data'), then "
                "dataset.root=data",
            )
        )
    ((_, _, folder, patterns),) = chosen
    inside = [file for file in files if file.is_relative_to(place / folder)]
    if not patterns and inside:
        return _told_apart(place / folder, inside)
    files_of_split = dict[str, list[Path]]()
    for split, patterns_of_split in (patterns or {"train": [folder]}).items():
        files_of_split[split] = [
            file
            for file in inside
            if any(
                _matches(file.relative_to(place / folder).parts, Path(x).parts)
                for x in patterns_of_split
            )
        ]
        DataError.raise_if(
            not files_of_split[split],
            str(readme),
            f"lists files for {split} that are not here, or are neither .parquet nor .arrow",
            patterns_of_split,
            hint="download them too, or set dataset.root to the folder of others",
        )
    return files_of_split


def _configs(block: str) -> list[tuple[str, bool, str, dict[str, list[str]]]]:
    """Return (name, whether it is the default, folder, file patterns by split) of each config."""
    # PyYAML is a dependency of omegaconf
    import yaml

    if len(block) > _LONGEST:
        raise ValueError(f"it is longer than {_LONGEST:,} characters")
    try:
        configs = yaml.load(block, Loader=yaml.SafeLoader)["configs"]
    except yaml.YAMLError as error:
        raise ValueError(first_line(error)) from None
    parsed = list[tuple[str, bool, str, dict[str, list[str]]]]()
    for config in configs:
        data_files = config.get("data_files") or {}
        data_files = (
            [(part["split"], part["path"]) for part in data_files]
            if isinstance(data_files, list) and any(isinstance(part, dict) for part in data_files)
            else list(data_files.items())
            if isinstance(data_files, dict)
            else [("train", data_files)]
        )
        patterns = {
            split: [paths] if isinstance(paths, str) else [*paths] for split, paths in data_files
        }
        texts = [
            config["config_name"],
            config.get("data_dir") or "",
            *patterns,
            *(text for paths in patterns.values() for text in paths),
        ]
        if len(patterns) < len(data_files) or not all(isinstance(text, str) for text in texts):
            raise ValueError("a split is listed twice, or a name is not a text")
        parsed.append((texts[0], bool(config.get("default")), texts[1], patterns))
    return parsed


# Without the cache, a pattern with many ** takes exponential time
@lru_cache(maxsize=1 << 16)
def _matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether a path fits a pattern: `*` is any part of a name, `**` any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[count:], pattern[1:]) for count in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _saved_files(state: Path) -> list[Path]:
    return [
        state.parent / name
        for name in _saved(
            state, lambda content: [Path(x["filename"]).name for x in content["_data_files"]]
        )
    ]


def _saved(file: Path, names_in: Callable[[Any], list[str]]) -> list[str]:
    """Return the names that a file of save_to_disk lists."""
    try:
        names = names_in(json.loads(read_text(file)))
        if (
            not names
            or len({*names}) < len(names)
            # A name must not lead out of the folder
            or any("\0" in name or "/" in name or not name.strip(".") for name in names)
        ):
            raise ValueError(
                "its list is empty, names something twice, or has a name that is not valid"
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            Problem(
                str(file),
                f"is damaged: {type(error).__name__}: {first_line(error)}",
                expected="what save_to_disk wrote",
            )
        ) from None
    return names
