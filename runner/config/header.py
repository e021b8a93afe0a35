"""The comments that head a run's config.yaml: what was chosen in each group, and what was overridden, in a few words. Imports neither torch nor mlflow."""

from __future__ import annotations

import json
from collections.abc import Mapping

from samewise.runner.records.files import misfit, parse_json
from samewise.runner.secrets import redact

_CHOICES, _LABEL = "# choices: ", "# label: "


def write(choices: Mapping[str, str], label: str) -> str:
    """The lines, with their ends; the label's only where there is one."""
    return f"{_CHOICES}{json.dumps(choices)}\n" + (f"{_LABEL}{json.dumps(label)}\n" if label else "")


def read(text: str) -> tuple[dict[str, str], str]:
    """(choices, label) of a config, empty where it has none; a ValueError where a line is not what `write` writes."""
    first, second = [*text.split("\n", 2)[:2], ""][:2]
    choices = parse_json(first.removeprefix(_CHOICES)) if first.startswith(_CHOICES) else {}
    label = parse_json(second.removeprefix(_LABEL)) if second.startswith(_LABEL) else ""
    if wrong := misfit(choices, {str: str}, "choices") or misfit(label, str, "label"):
        raise ValueError(wrong)
    return choices, redact(label)
