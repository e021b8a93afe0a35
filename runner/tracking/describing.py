"""Describes a run for trackers, from its folder: params, tags, a note and the data sets."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from samewise.runner.config.tree import at, flat
from samewise.runner.records import header, own_code, shapes, sources
from samewise.runner.records.files import read_mapping, read_text
from samewise.runner.records.folder import RunFolder

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

# 250, 6000 and 8000 characters are limits of MLflow, 64 that of W&B
_KEY_LENGTH = 250
_PARAM_LENGTH = 6000
_TAG_LENGTH = 500
_OWN_TAG_LENGTH = 8000
_WANDB_TAG_LENGTH = 64
NAME = "samewise.name"
"""Tag with the name of a renamed run."""
DESCRIPTION = "mlflow.note.content"
"""Tag that MLflow shows as a run's description."""
_NO_FACTS = frozenset(
    ["code_state", "code_used", "data", "decides", "git", "fingerprint", "level", "title"]
)
"""Entries of the environment that are no tags, or tags of another name."""
_CONTEXTS = {"train": "training", "valid": "validation", "test": "test"}


def key(name: str) -> str:
    """Return `name` as a valid MLflow name of a metric, param or tag.

    Such a name has letters, digits and `_-. /:`, no `..` in its path, and at most 250 characters.
    """
    parts = [
        part for part in re.sub(r"[^\w\-. /:]", "_", name).split("/") if part not in ("", ".", "..")
    ]
    return _fit("/".join(parts) or "_", _KEY_LENGTH)


class MetricKeys:
    """Valid MLflow names of a run's metrics, in the journal's order.

    Of several metrics with the same `key` the first has it; the others have a digest in theirs.

    Args:
        before: Names of the metrics that have been sent.
    """

    def __init__(self, before: Iterable[str] = ()) -> None:
        self._keys = dict[str, str]()
        self.taken = set[str]()
        for name in before:
            self.of(name)

    def of(self, name: str) -> str:
        """Return the metric's name in MLflow."""
        if name not in self._keys:
            self._keys[name] = (
                f"{key(name)[: _KEY_LENGTH - 9]}_{_digest(name)}"
                if key(name) in self.taken
                else key(name)
            )
            self.taken.add(self._keys[name])
        return self._keys[name]


def params(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the flattened resolved config: `optimizer.lr` to `"0.1"`."""
    return {
        key(name): _fit(_text(value), _PARAM_LENGTH) for name, value in flat(config, lists=False)
    }


def choices(text: str) -> dict[str, str]:
    """Return the choice of each config group: `choices.model` to `"resnet18"`.

    `text` is config.yaml, whose first line has them.
    """
    return params({"choices": header.read(text)[0]})


def tags(
    folder: RunFolder,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    own: Mapping[str, Any],
) -> dict[str, str]:
    """Return the run's tags: its fingerprint, its level, where it ran, and the user's `own`."""
    fingerprint = str(environment.get("fingerprint") or folder.path.name)
    reproducibility = cast(Mapping[str, Any], config.get("reproducibility") or {})
    git = cast(Mapping[str, Any], environment.get("git") or {})
    values = {
        "samewise.fingerprint": fingerprint,
        "samewise.code": sources.code_name(folder.sources),
        "samewise.label": header.read(read_text(folder.config) or "")[1],
        "samewise.level": environment.get("level"),
        "samewise.reproducibility": reproducibility.get("level"),
        "samewise.folder": str(folder.path.absolute()),
        DESCRIPTION: environment.get("title"),
        "mlflow.source.name": "samewise",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git.get("commit"),
        "mlflow.source.git.branch": git.get("branch"),
        "mlflow.user": _user(),
    }
    facts = {name: value for name, value in environment.items() if name not in _NO_FACTS}
    facts["git"] = {"dirty": git["dirty"]} if "dirty" in git else {}
    # One digest of all files of samewise, each of which environment.json has
    facts["code"] = (
        own_code.digest(environment["code"])
        if isinstance(environment.get("code"), Mapping)
        else None
    )
    values |= {
        key(f"env.{name}"): _fit(_text(value), _TAG_LENGTH)
        for name, value in flat(facts, lists=False)
        if value not in (None, {}, [])
    }
    texts = {name: str(value) for name, value in values.items() if value not in (None, "")}
    return texts | {
        key(str(name)): _fit(str(value), _OWN_TAG_LENGTH)
        for name, value in own.items()
        if value is not None
    }


def own_tags(folder: RunFolder, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's tags: those of `tracking`, those that the run has earned, and its notes.

    A tag that was removed is None.
    """
    notes = read_mapping(folder.notes, shapes.NOTES)
    return {
        **(settings.get("tags") or {}),
        **read_mapping(folder.tags, shapes.TAGS),
        **notes.get("tags", {}),
        NAME: notes.get("name") or None,
    }


def wandb_tags(own: Mapping[str, Any]) -> list[str]:
    """Return the user's tags as W&B takes them, name and value in one short text."""
    return [
        f"{name}:{value}"[:_WANDB_TAG_LENGTH] for name, value in own.items() if value is not None
    ]


def inputs(config: Mapping[str, Any], environment: Mapping[str, Any]) -> list[DatasetInput]:
    """Return each split as an MLflow dataset input: name, digest, source, and counts as profile."""
    splits = cast(Mapping[str, Any], environment.get("data") or {})
    return [
        _dataset_input(str(split), facts, config)
        for split, facts in splits.items()
        if isinstance(facts, Mapping)
    ]


def pictures(folder: RunFolder) -> Iterator[tuple[str, Path]]:
    """Yield the PNG files among the artifacts, as name without extension and path."""
    # A link could lead to any file of the user's
    for path in sorted(folder.artifacts.rglob("*.png")):
        if not path.is_symlink():
            yield path.relative_to(folder.artifacts).with_suffix("").as_posix(), path


def run_name(folder: RunFolder, settings: Mapping[str, Any]) -> str:
    """Return the name that the user gave the run afterwards, or in `tracking`.

    Without one, the overrides with the experiment's name; without those, name and fingerprint.
    """
    name = folder.path.absolute().parent.name
    _, label = header.read(read_text(folder.config) or "")
    own = read_mapping(folder.notes, shapes.NOTES).get("name") or settings.get("run_name")
    return own or (f"{label} ({name})" if label else f"{name}-{folder.path.name}")


def _dataset_input(split: str, facts: Mapping[str, Any], config: Mapping[str, Any]) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = cast(Mapping[str, Any], config.get("dataset") or {})
    source = (
        facts.get("source") or dataset.get("root") or at(dataset, f"{split}._target_") or "unknown"
    )
    own_fields = {"name", "digest", "fingerprint", "source", "schema", "size"}
    profile = {
        "num_rows": facts.get("size"),
        **{name: value for name, value in facts.items() if name not in own_fields},
    }
    entity = Dataset(
        name=_fit(str(facts.get("name") or split), 500),
        # MLflow takes at most 36 characters
        digest=str(facts.get("digest") or facts.get("fingerprint") or "")[:36] or "unknown",
        source_type="local",
        source=json.dumps({"uri": str(source)}),
        schema=json.dumps(facts["schema"]) if facts.get("schema") else None,
        profile=json.dumps({name: value for name, value in profile.items() if value is not None}),
    )
    return DatasetInput(
        dataset=entity,
        tags=[InputTag(key="mlflow.data.context", value=_CONTEXTS.get(split, split))],
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _fit(text: str, length: int) -> str:
    """Return `text`, shortened if it is too long, with a digest that distinguishes long texts."""
    return text if len(text) <= length else f"{text[: length - 9]}_{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In containers a user id may have no name
        return None
