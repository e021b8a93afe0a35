"""Says which files of tests a change can touch, for `make test-changed`: those that import, or mention by name, something that depends on a changed file.

A module depends on what it imports, a config on the modules and configs that it names, a test on both, and on the helpers beside it that it names. Names are
compared as words, so that a test too many is run rather than one too few; where a change is of another kind (pyproject.toml, a new folder), all tests are.
"""

import functools
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("runner", "recipes", "datasets")
COMPOSES = "samewise.runner.config.compose"
CLI = "samewise.runner.cli"
REACHES_THE_CLI = re.compile(r"\b(samewise\(|promise\b|samewise_runner_jobs|samewise_forked|\"-m\", \"samewise\")")


def changed_files(base: str) -> set[str]:
    """What differs from where this branch left `base`, with what is not committed and not tracked yet."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")

    left = git("merge-base", "HEAD", base)[0]
    return {name for name in [*git("diff", "--name-only", "--no-renames", left), *git("ls-files", "--others", "--exclude-standard")] if name}


def module_of(name: str) -> str:
    return "samewise." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def import_graph() -> grimp.ImportGraph:
    """Of a copy in which samewise/ is a real folder with `__init__.py` throughout: grimp does not follow the links of .package."""
    with tempfile.TemporaryDirectory() as copy:
        for part in PARTS:
            shutil.copytree(ROOT / part, Path(copy, "samewise", part), ignore=shutil.ignore_patterns("__pycache__"))
        for folder in [Path(copy, "samewise"), *(path for path in Path(copy, "samewise").rglob("*") if path.is_dir())]:
            (folder / "__init__.py").touch()
        sys.path.insert(0, copy)
        try:
            return grimp.build_graph("samewise", cache_dir=None)
        finally:
            sys.path.remove(copy)


@functools.cache
def words(text: str) -> frozenset[str]:
    """Names in a text: dotted ones whole and in every beginning, what `from a import b` brings as a.b, and all single words."""
    found = set(re.findall(r"\w+", text))
    for dotted in re.findall(r"\w+(?:\.\w+)+", text):
        parts = dotted.split(".")
        found |= {".".join(parts[:end]) for end in range(2, len(parts) + 1)}
    for place, names in re.findall(r"from (samewise[\w.]*) import (\([^)]*\)|[^\n]*)", text):
        found |= {place, *(f"{place}.{name}" for name in re.findall(r"\w+", names))}
    return frozenset(found)


@functools.cache
def texts_of_tests() -> tuple[dict[str, str], dict[str, str]]:
    """Every file below tests/; and each of them with the helpers beside it that it names."""
    tests = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    helpers = [name for name in tests if not Path(name).name.startswith(("test_", "conftest"))]
    beside = {name: [one for one in helpers if name.startswith(f"{Path(one).parent}/")] for name in tests}
    known_as = {one: rf"\bsamewise_{Path(one).stem}\b" if one.count("/") == 1 else rf"(\b|_){Path(one).stem}\b" for one in helpers}
    named = {name: [tests[one] for one in beside[name] if re.search(known_as[one], text)] for name, text in tests.items()}
    return tests, {name: "\n".join([text, *named[name]]) for name, text in tests.items()}


def affected_tests(changed: Iterable[str]) -> list[str]:
    """The files of tests to run; `["tests"]` for all."""
    changed = set(changed)
    tests, with_helpers = texts_of_tests()
    selected = {name for name in tests if name in changed and Path(name).name.startswith("test_")}
    names = set[str]()
    modules = set[str]()
    for name in changed - selected:
        top, _, rest = name.partition("/")
        if top in PARTS and name.endswith(".py"):
            modules.add(module_of(name))
        elif top == "configs":
            names.add(Path(name).stem)
        elif top == "tests" and Path(rest).name.startswith("test_"):
            continue  # a test that is gone
        elif top == "tests" and "/" in rest:
            selected |= {test for test in tests if test.startswith(f"{Path(name).parent}/")}
        elif name.endswith(".md") or top in ("docs", "examples"):
            selected |= {test for test in tests if test.startswith(("tests/docs/", "tests/packaging/"))}
        elif top in ("Makefile", ".ci", ".github", "LICENSE", "CITATION.cff", "Dockerfile", ".dockerignore", ".pre-commit-config.yaml"):
            selected |= {test for test in tests if test.startswith("tests/packaging/")}
        else:
            return ["tests"]
    names |= dependents(modules, names)
    for name, text in with_helpers.items():
        if names & words(text) or (CLI in names and REACHES_THE_CLI.search(text)):
            selected.add(name)
    return sorted(name for name in selected if Path(name).name.startswith("test_"))


def dependents(modules: set[str], configs: set[str]) -> set[str]:
    """Names of the modules and configs that depend on these, themselves included; an experiment depends on every config that the root config names."""
    graph = import_graph()
    texts = {path: words(path.read_text()) for path in (ROOT / "configs").rglob("*.yaml")}
    found = modules | configs
    while True:
        more = {path.stem for path, mentioned in texts.items() if mentioned & found}
        more |= {module for one in found & graph.modules for module in graph.find_downstream_modules(one)}
        if "config" in found | more:
            more |= {COMPOSES}
        if more <= found:
            through_all = {"configs"} if found & {path.stem for path in texts} else set[str]()  # the name of the folder, in a test that goes through them
            return found - {"config"} | through_all
        found |= more


if __name__ == "__main__":
    print("\n".join(affected_tests(changed_files(sys.argv[1]))))
