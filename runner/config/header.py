"""The comments at the head of a run's config.yaml: the choice of each group, and a short label of the overrides. Imports neither torch nor mlflow."""

from __future__ import annotations

import json
from collections.abc import Mapping

from samewise.runner.records.files import describe_misfit, parse_json
from samewise.runner.secrets import redact

_CHOICES, _LABEL = "# choices: ", "# label: "


def write(choices: Mapping[str, str], label: str) -> str:
    """The lines, with line ends; the label only if there is one."""
    return f"{_CHOICES}{json.dumps(choices)}\n" + (f"{_LABEL}{json.dumps(label)}\n" if label else "")


def read(text: str) -> tuple[dict[str, str], str]:
    """(choices, label) of a config, empty if it has none; a ValueError for a line that `write` does not write."""
    first, second = [*text.split("\n", 2)[:2], ""][:2]
    choices = parse_json(first.removeprefix(_CHOICES)) if first.startswith(_CHOICES) else {}
    label = parse_json(second.removeprefix(_LABEL)) if second.startswith(_LABEL) else ""
    if wrong := describe_misfit(choices, {str: str}, "choices") or describe_misfit(label, str, "label"):
        raise ValueError(wrong)
    return choices, redact(label)
