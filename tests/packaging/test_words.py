"""One word for one thing: no two public classes share a name. Hints are whole phrases."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXCEPTIONS = {
    "Loader": "a section of the config, and what it sets up",
    "Trace": "a section of the config, and what it sets up",
}
"""Public classes that may share their name with another one, and why."""


@functools.cache
def class_definitions() -> dict[str, list[str]]:
    """The files that define each public top-level class."""
    found = defaultdict(list)
    for folder in ("runner", "recipes", "datasets"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(file.relative_to(ROOT)))
    return found


def test_no_two_public_classes_share_a_name() -> None:
    assert {name for name, files in class_definitions().items() if len(files) > 1} == set(EXCEPTIONS)
