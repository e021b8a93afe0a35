"""Whatever a config says, composing and checking it runs nothing, writes nothing, connects to nothing, and ends with a message.

An audit hook of the interpreter watches what happens: it sees files opened for writing, processes and connections, whoever asks for them.
"""

import contextlib
import functools
import importlib
import os
import pkgutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samewise.runner.config import compose, slots
from samewise.runner.config.check.components import problems_in
from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.override_text import read_overrides
from samewise.runner.config.project import Project
from samewise.runner.errors import SamewiseError

BARE = Project(Path("/"))
PLACES = [pattern.replace("*", "x") for pattern in slots.KINDS]
DEEDS = {
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "os.remove", "os.rename", "os.mkdir", "os.rmdir"),
    "shutil.rmtree",
}

OURS = ("samewise.recipes", "samewise.datasets", "samewise.runner.launchers", "samewise.runner.records")

_seen: list[str] = []
_watching = [False]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching[0]:
        return
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if event in DEEDS or (writes and not str(arguments[0]).endswith(".pyc") and "__pycache__" not in str(arguments[0])):
        _seen.append(f"{event} {arguments!r}"[:200])


sys.addaudithook(_hook)


@contextlib.contextmanager
def require_no_effects() -> Iterator[None]:
    """Require that the block does nothing to the machine; the only error that it may raise is a SamewiseError."""
    _seen.clear()
    _watching[0] = True
    try:
        with contextlib.suppress(SamewiseError):
            yield
    finally:
        _watching[0] = False
    assert not _seen


def test_the_hook_sees_what_a_config_must_not_do(tmp_path: Path) -> None:
    for deed in (lambda: (tmp_path / "mark").write_text("x"), lambda: os.system("true"), lambda: (tmp_path / "mark").unlink()):
        with pytest.raises(AssertionError), require_no_effects():
            deed()


@functools.cache
def names() -> list[str]:
    """Dotted names of everything in the packages that a config may name, and in others of samewise: public or not, meant to be named or not."""
    found = list[str]()
    packages = (
        {package for place in PLACES for package in slots.packages_at(place)} | set(slots.REFUSED) | {"samewise.runner.launchers", "samewise.runner.records"}
    )
    for package in sorted(packages):
        root = importlib.import_module(package)
        below = [one.name for one in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}.")] if package in OURS else []
        for module in (package, *below):
            found += [f"{module}.{name}" for name in vars(importlib.import_module(module))]
    inside = [f"{name}.{attribute}" for name in found[::7] for attribute in _attributes(name)]
    return [*found, *inside, "os.system", "builtins.eval", "subprocess.run", "pathlib.Path", "shutil.rmtree"]


def _attributes(name: str) -> list[str]:
    module, _, last = name.rpartition(".")
    one = getattr(importlib.import_module(module), last, None)
    return [*vars(one)][:20] if isinstance(one, type | types.ModuleType) else []


SCALARS = st.one_of(
    st.integers(-3, 70), st.floats(), st.booleans(), st.none(), st.text(max_size=8), st.sampled_from(["/tmp/mark", "~", "file:///etc/passwd", "${seed}", "???"])
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6)
KEYS = st.sampled_from(["path", "root", "model", "file", "url", "_args_", "_partial_", "_recursive_", "download", "params", "lr", "fn", "weights"]) | st.text(
    max_size=5
)


@st.composite
def nodes(draw: st.DrawFn) -> dict[str, Any]:
    node = {"_target_": draw(st.sampled_from(names())), **draw(st.dictionaries(KEYS, VALUES, max_size=3))}
    return node | ({"inner": draw(nodes())} if draw(st.integers(0, 4)) == 0 else {})


def check_components(node: dict[str, Any], place: str) -> None:
    whole: Any = node
    for key in reversed(place.split(".")):
        whole = {key: whole}
    with require_no_effects():
        assert isinstance(problems_in(whole, BARE), list)


def refuse_other_kinds(target: str, place: str, mark: Path) -> None:
    """Only a component of the place's kind is called; one that does not take the argument refuses it before it does anything."""
    with require_no_effects():
        made = instantiate({"_target_": target, "zzz": str(mark)}, place, allowed=())
        assert any(kind.includes(type(made)) for kind in slots.kinds_at(place))
    assert not mark.exists()


def parse_saved(text: str) -> None:
    with require_no_effects():
        whole = compose.parse(text)
        with contextlib.suppress(SamewiseError):
            compose.dump(whole)


def read_lines(lines: list[str]) -> None:
    with require_no_effects():
        read_overrides(lines)


YAML = st.one_of(
    st.text(max_size=60),
    VALUES.map(lambda value: yaml.safe_dump(value, allow_unicode=True)),
    st.dictionaries(st.sampled_from(["seed", "model", "loader", "name", "hydra", "tracking", "defaults", "launcher"]), VALUES, max_size=4).map(yaml.safe_dump),
    st.sampled_from(["!!python/object/apply:os.system ['touch /tmp/mark']", "a: &a [*a]", "a: !!binary x", "? {a: b}\n: c", "seed: 1e999", "- " * 200 + "x"]),
)
LINES = st.lists(
    st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~"]), st.text(max_size=10), st.text(max_size=15)) | st.text(max_size=20), max_size=3
)
QUICK = {"components": 150, "targets": 600, "saved": 60, "lines": 190}
"""Cases of each kind, 1000 in all; the long tests take twenty times as many."""


def run(kind: str, count: int, tmp_path: Path) -> None:
    strategies: dict[str, tuple[Any, ...]] = {
        "components": (check_components, nodes(), st.sampled_from(PLACES)),
        "targets": (refuse_other_kinds, st.sampled_from(names()), st.sampled_from(PLACES), st.just(tmp_path / "mark")),
        "saved": (parse_saved, YAML),
        "lines": (read_lines, LINES),
    }
    function, *drawn = strategies[kind]
    wrapped = settings(max_examples=count, deadline=None, database=None, derandomize=count < 1000, suppress_health_check=list(HealthCheck))(
        given(st.tuples(*drawn))(lambda case: function(*case))
    )
    wrapped()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", QUICK)
def test_a_strange_config_does_nothing_to_the_machine(kind: str, times: int, tmp_path: Path) -> None:
    run(kind, times * QUICK[kind], tmp_path)
