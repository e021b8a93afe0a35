"""The code that an experiment reaches is part of its identity: changed code makes another run, and differences are named."""

import pytest
from samewise_runner_lab_of_code import EDITS, at_work_in, edit, fingerprint_in, write


@pytest.fixture
def lab(tmp_path, monkeypatch):
    with at_work_in(tmp_path / "project", monkeypatch) as project:
        yield project


@pytest.fixture
def fingerprint(lab):
    return fingerprint_in(lab)


SAME = {
    "a comment": ("lab_of_code/net.py", "import torch\n", "import torch  # the library\n# and more\n"),
    "a docstring": ("lab_of_code/net.py", "class Net(nn.Module):\n", 'class Net(nn.Module):\n    """A net."""\n'),
    "formatting": ("lab_of_code/parts/layers.py", "nn.Linear(64, WIDTH)", "nn.Linear(\n        64,\n        (WIDTH),\n    )"),
    "a file that nothing imports": ("lab_of_code/unused.py", "", "\nMORE = 1\n"),
    "a function that nothing names": ("lab_of_code/parts/layers.py", "", "\ndef more():\n    import json\n    return head()\n"),
    "a class and a constant that nothing names": ("lab_of_code/net.py", "\n\nclass Net", "\nMORE = 1\n\nclass More(nn.Module):\n    size = MORE\n\nclass Net"),
}
MORE = "\ndef more():\n    return 1\n"
REACHED = {
    "a name": "MORE = layers.more",
    "a name in a string": "MORE = 'layers:more'",
    "another name": "from .parts.layers import more as less\nMORE = less",
    "a computed name in a module": "MORE = getattr(layers, 'm' + 'ore')",
    "a module that is passed on": "print(layers)",
    "a module's namespace": "MORE = layers.__dict__['m' + 'ore']",
    "a computed name": "MORE = globals()",
    "a module by name": "import importlib\nMORE = importlib.import_module('lab_of_code.parts.layers')",
}
"""What makes a function in `layers` count, by one more line in another file."""


def test_editing_reached_code_changes_the_fingerprint_and_reformatting_does_not(fingerprint, lab):
    first = fingerprint()
    found = {first}
    for file, old, new, _ in EDITS.values():
        text = edit(lab / file, old, new)
        found.add(fingerprint())
        write(lab / file, text)
    assert len(found) == 1 + len(EDITS)
    for what, (file, old, new) in SAME.items():
        text = edit(lab / file, old, new)
        assert fingerprint() == first, what
        write(lab / file, text)


@pytest.mark.parametrize("reached", REACHED.values(), ids=list(REACHED))
def test_a_function_counts_as_soon_as_its_name_or_a_computed_one_is_used(fingerprint, lab, reached):
    edit(lab / "lab_of_code" / "net.py", "import layers\n", f"import layers\n{reached}\nprint(MORE)\n")
    found = set()
    for text in ("", MORE, MORE.replace("1", "2")):
        before = edit(lab / "lab_of_code" / "parts" / "layers.py", "", text)
        found.add(fingerprint())
        write(lab / "lab_of_code" / "parts" / "layers.py", before)
    assert len(found) == 3


def test_a_computed_import_makes_the_whole_package_count(fingerprint, lab):
    edit(lab / "lab_of_code" / "net.py", "import torch\n", "import torch, importlib\nPART = importlib.import_module('lab_of_code.' + 'un' + 'used')\n")
    first = fingerprint()
    edit(lab / "lab_of_code" / "unused.py")
    assert fingerprint() != first
    edit(lab / "lab_of_code" / "net.py", "'lab_of_code.' + 'un' + 'used'", "'lab_of_code.parts.layers'")
    first = fingerprint()
    edit(lab / "lab_of_code" / "unused.py")
    assert fingerprint() == first
