"""The comments at the head of a run's config.yaml: choices, a label, and references.

Imports neither torch nor mlflow.
"""

import json
from collections.abc import Mapping
from typing import Any

from samewise.runner.records.files import parse_json
from samewise.runner.records.shapes import TEXTS, describe_misfit
from samewise.runner.secrets import redact

_CHOICES, _LABEL, _REFERENCES, _SOURCES = (
    f"# {name}: " for name in ("choices", "label", "references", "sources")
)


def write(
    choices: Mapping[str, str],
    label: str,
    references: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
) -> str:
    """The lines, with line ends; those after the first only if they are given."""
    lines = [
        (_CHOICES, choices),
        *([(_LABEL, label)] if label else ()),
        *([(_REFERENCES, references)] if references is not None else ()),
        *([(_SOURCES, sources)] if sources else ()),
    ]
    return "".join(f"{name}{json.dumps(value)}\n" for name, value in lines)


def read(text: str) -> tuple[dict[str, str], str]:
    """(choices, label) of a config, empty if it has none.

    A ValueError for a line that `write` does not write.
    """
    # The file may be a stranger's, or of a version that did not redact labels
    return _value(text, _CHOICES, {}), redact(_value(text, _LABEL, ""))


def read_references(text: str) -> dict[str, str] | None:
    """Return the text of each reference (`{"dataset.train.root": "${dataset.root}"}`).

    None if the config does not record them.

    Raises:
        ValueError: The line is not one that `write` writes.
    """
    return _value(text, _REFERENCES, None)


def read_sources(text: str) -> dict[str, str]:
    """Return how the user named files that the config has by path: `run:first`, by setting.

    Raises:
        ValueError: As in `read_references`.
    """
    return {key: redact(value) for key, value in _value(text, _SOURCES, {}).items()}


def _value(text: str, name: str, default: Any) -> Any:
    line = next((line for line in text.split("\n", 4)[:4] if line.startswith(name)), None)
    if line is None:
        return default
    value = parse_json(line.removeprefix(name))
    if wrong := describe_misfit(value, str if name == _LABEL else TEXTS, name.strip("# :")):
        raise ValueError(wrong)
    return value
