"""One word for one thing: no two public classes share a name. Hints are whole phrases."""

import ast
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXCEPTIONS = {"Loader": "a section of the config, and what it sets up", "Trace": "a section of the config, and what it sets up"}
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


VAGUE = frozenset(
    [
        "one",
        "ones",
        "found",
        "words",
        "given",
        "known",
        "held",
        "said",
        "told",
        "wanted",
        "mine",
        "theirs",
        "apart",
        "asked",
        "begun",
        "made",
        "seen",
        "meant",
        "named",
        "others",
        "gone",
        "left",
        "kept",
        "due",
        "unfit",
        "is_given",
        "stays",
        "sets",
    ]
)
"""Pronouns and participles, which do not say what they hold."""
CONTRACTS = {
    ("instantiate.py", "named"): "beside `positional`",
    ("errors.py", "told"): "beside a global of the better name",
    ("progress.py", "others"): "a key of tracking.json",
    ("boxes.py", "left"): "a coordinate",
    ("erasing.py", "left"): "a coordinate",
    ("geometry.py", "left"): "a coordinate",
}


def test_every_name_is_a_noun_and_every_docstring_begins_with_one_or_with_a_verb() -> None:
    vague, openings = set(), set()
    for folder in ("runner", "recipes", "datasets"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else ""
                if name in VAGUE:
                    vague.add((file.name, name))
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                    openings |= (
                        {(file.name, text.split("\n")[0])} if text.split()[0] in ("Of", "Those", "What", "That", "Where", "By", "Which", "Whose") else set()
                    )
    assert vague == CONTRACTS.keys()
    assert not openings
