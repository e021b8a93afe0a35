"""Create a project that is ready for `samewise train`."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from samewise.runner.config.project import find
from samewise.runner.errors import ConfigError, Problem

STARTER = Path(__file__).with_name("starter")
"""The project as it is made; `mylab` stands for the package's name there."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the project's folder: a new one, or one that is empty")
    parser.add_argument("--package", metavar="NAME", help="the name of the project's package (default: the folder's name)")
    parser.epilog = """\
examples:
  samewise init shapes            a project in ./shapes with the package `shapes`
  samewise init . --package lab   in the current folder, if it is empty

what it creates:
  pyproject.toml          [tool.samewise]: the package that configs may name, the folder of configs, the experiment that plain `samewise train` trains
  NAME/data.py, model.py  a data set and a model of your own
  configs/                a choice for each of them, and the experiment `first`
  .schema/, .vscode/      for editors, which then complete and check the configs; `samewise schema` writes .schema/ again
  tests/, Makefile        `make test` trains a tiny version twice and compares the weights

then:
  cd shapes
  samewise train
  samewise train optimizer.lr=0.01"""


def run(args: argparse.Namespace) -> int:
    folder: Path = args.folder.expanduser()
    package = args.package or re.sub(r"\W+", "_", folder.resolve().name.lower(), flags=re.ASCII).strip("_")
    if problem := _not_empty_error(folder) or _name_problem(package, args.package):
        raise ConfigError(problem)
    try:
        made = make(folder, package)
    except OSError as error:
        words = f"cannot be written: {error.strerror}"
        raise ConfigError(Problem("FOLDER", words, str(error.filename or folder), "a place that you can write to", "nothing was written")) from None
    print(f"made {folder}:")
    print("\n".join(f"  {name}" for name in made))
    _write_schema(folder)
    print("\nnext:" + (f"\n  cd {shlex.quote(str(folder))}" if folder.resolve() != Path.cwd() else "") + "\n  samewise train")
    return 0


def make(folder: Path, package: str) -> list[str]:
    """Write the project, all of it or nothing; return the names of its files. An OSError if it cannot be written."""
    whole = folder.resolve()
    there = next(place for place in (whole, *whole.parents) if place.is_dir())
    with tempfile.TemporaryDirectory(prefix=".samewise-init-", dir=there) as beside:
        for source in sorted(STARTER.rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                target = Path(beside) / str(source.relative_to(STARTER)).replace("mylab", package)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(source.read_text(encoding="utf-8").replace("mylab", package), encoding="utf-8")
        made = sorted(str(path.relative_to(beside)) for path in Path(beside).rglob("*") if path.is_file())
        folder.mkdir(parents=True, exist_ok=True)
        _move(Path(beside), folder)
    return made


def _write_schema(folder: Path) -> None:
    """Write the JSON Schemas to which .vscode/settings.json and the configs' first lines refer."""
    from samewise.runner.config.json_schema import write

    print("  .schema/ (for editors)", flush=True)
    write(find(folder), folder / ".schema")


def _move(source: Path, folder: Path) -> None:
    moved = list[Path]()
    try:
        for entry in sorted(source.iterdir()):
            moved.append(entry.rename(folder / entry.name))
    except BaseException:
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _not_empty_error(folder: Path) -> Problem | None:
    expected = "a folder that does not exist yet, or is empty"
    if folder.exists() and not folder.is_dir():
        return Problem(str(folder), "is a file", expected=expected)
    if folder.is_dir() and (there := sorted(path.name for path in folder.iterdir())):
        words = f"is not empty: {', '.join(there[:5])}{', ...' if len(there) > 5 else ''}"
        return Problem(str(folder), words, expected=expected, hint="to add what a project needs to an existing folder by hand, see docs/your_own.md")
    return None


def _name_problem(package: str, given: str | None) -> Problem | None:
    """Why a name cannot be a package's; one that is taken could not be imported, since the project's folder comes last on the path."""
    where, hint = ("--package", "") if given else ("FOLDER", "--package NAME gives the package another name")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", package):
        return Problem(where, "is not a valid name for a package", package, "letters, digits and _, beginning with a letter", hint)
    if keyword.iskeyword(package) or package in ("tests", "configs"):
        reason = "is a keyword of Python" if keyword.iskeyword(package) else "is the name of another folder in the project"
        return Problem(where, reason, package, "another name for the package", hint)
    found = importlib.util.find_spec(package)
    if found is not None and found.origin is not None:
        return Problem(where, f"is the name of an existing package or module, in {found.origin}", package, "a name that is not taken", hint)
    return None
