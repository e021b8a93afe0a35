"""The comments at the head of a run's config.yaml: choices, a label, and references.

Imports neither torch nor mlflow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from samewise.runner.records.files import parse_json
from samewise.runner.records.shapes import describe_misfit
from samewise.runner.secrets import redact

_CHOICES, _LABEL, _REFERENCES = "# choices: ", "# label: ", "# references: "


def write(
    choices: Mapping[str, str], label: str, references: Mapping[str, str] | None = None
) -> str:
    """The lines, with line ends; the label and the references only if they are given."""
    lines = [
        (_CHOICES, choices),
        *([(_LABEL, label)] if label else ()),
        *([(_REFERENCES, references)] if references is not None else ()),
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
    line = next((line for line in text.split("\n", 3)[:3] if line.startswith(_REFERENCES)), None)
    if line is None:
        return None
    references = parse_json(line.removeprefix(_REFERENCES))
    if wrong := describe_misfit(references, {str: str}, "references"):
        raise ValueError(wrong)
    return references
