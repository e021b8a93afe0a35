"""The commands, one a file: NAME.py with a docstring whose first line is its summary, `configure(parser)` and `run(args) -> int`; `EXAMPLES` end its help.

Here is what they share: the arguments that say which experiment. And the list of them, made without importing any.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samewise.runner.config import project

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.config.project import Project


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The overrides, and where the user's own project lies."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="experiment=NAME, GROUP=CHOICE, KEY=VALUE, +NEW_KEY=VALUE or ~KEY")
    add_project(parser)


def add_project(parser: argparse.ArgumentParser) -> None:
    """Where the user's own project lies, beside what its pyproject.toml says."""
    parser.add_argument("--package", action="append", default=[], metavar="NAME", help="a package of yours whose classes configs may name (may be repeated)")
    parser.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="a config folder of yours (may be repeated)")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Whether to use a folder that this user has not made."""
    parser.add_argument("--trust", action="store_true", help="use a folder that someone else has made and that you trust; remembered for it as it is now")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Which of a run's checkpoints."""
    help_ = "which checkpoint to use; METRIC: one of evaluate.also (default: best)"
    parser.add_argument("--checkpoint", default="best", metavar="best|last|STEP|METRIC", help=help_)


def project_from(args: argparse.Namespace) -> Project:
    """The project around the current folder, with what the arguments add."""
    return project.find(packages=args.package, configs=args.config_dir)


def compose_arguments(args: argparse.Namespace, *, strict: bool = True) -> Composed:
    """Compose the arguments' experiment."""
    from samewise.runner.config.compose import compose

    return compose(args.overrides, project=project_from(args), strict=strict)


@dataclass(frozen=True)
class Command:
    """One command: how it is configured and run, known without importing it. Its summary is the first line of its module's docstring."""

    name: str
    summary: str
    path: Path

    def load(self, parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
        """Import the command's module, and only that: gives the parser its arguments and its `EXAMPLES`, and returns what runs it."""
        module = importlib.import_module(f"samewise.runner.commands.{self.path.stem}")
        module.configure(parser)
        parser.epilog = parser.epilog or getattr(module, "EXAMPLES", None)
        return module.run


def commands() -> dict[str, Command]:
    """Every command by name, `train` first: a file in commands/ is a command."""
    found = dict[str, Command]()
    for file in sorted(Path(__file__).parent.glob("*.py"), key=lambda file: (file.stem != "train", file.stem)):
        if not file.name.startswith("_"):
            name = file.stem.replace("_", "-")
            first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            found[name] = Command(name, first.removeprefix(f"`samewise {name}`: ").rstrip("."), file)
    return found
