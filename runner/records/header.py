"""The comments at the head of a run's config.yaml: choices, a label, and references.

Imports neither torch nor mlflow.
"""

import json
from collections.abc import Mapping

from samewise.runner.records.files import parse_json
from samewise.runner.records.shapes import describe_misfit
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
    first, second = [*text.split("\n", 2)[:2], ""][:2]
    choices = parse_json(first.removeprefix(_CHOICES)) if first.startswith(_CHOICES) else {}
    label = parse_json(second.removeprefix(_LABEL)) if second.startswith(_LABEL) else ""
    if wrong := describe_misfit(choices, {str: str}, "choices") or describe_misfit(
        label, str, "label"
    ):
        raise ValueError(wrong)
    # The file may be a stranger's, or of a version that did not redact labels
    return choices, redact(label)


def read_references(text: str) -> dict[str, str] | None:
    """Return the text of each reference (`{"dataset.train.root": "${dataset.root}"}`).

    None if the config does not record them.

    Raises:
        ValueError: The line is not one that `write` writes.
    """
    return _read_mapping(text, _REFERENCES)


def read_sources(text: str) -> dict[str, str]:
    """Return how the user named files that the config has by path: `run:first`, by setting.

    Raises:
        ValueError: As in `read_references`.
    """
    return _read_mapping(text, _SOURCES) or {}


def _read_mapping(text: str, name: str) -> dict[str, str] | None:
    line = next((line for line in text.split("\n", 4)[:4] if line.startswith(name)), None)
    if line is None:
        return None
    mapping = parse_json(line.removeprefix(name))
    if wrong := describe_misfit(mapping, {str: str}, name.strip("# :")):
        raise ValueError(wrong)
    return {key: redact(value) for key, value in mapping.items()} if name == _SOURCES else mapping
