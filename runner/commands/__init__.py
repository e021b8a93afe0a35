"""List the commands, without importing them, and define the arguments that they share.

Each file NAME.py is a command: the first line of its docstring is its summary, `configure(parser)`
adds its arguments, `run(args)` returns its exit code, and `EXAMPLES` end its help.

Private: it may change at any time.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samewise.runner.config import project

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.config.project import Project


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for overrides and for the user's project."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="experiment=NAME, GROUP=CHOICE, KEY=VALUE, +NEW_KEY=VALUE or ~KEY",
    )
    add_project(parser)


def add_changes(parser: argparse.ArgumentParser) -> None:
    """Add overrides of a recorded run's config to a command."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="values to change in the run's config",
    )


def add_project(parser: argparse.ArgumentParser) -> None:
    """Add the options for the user's project, in addition to its pyproject.toml."""
    add_packages(parser)
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a config folder of yours (may be repeated)",
    )


def add_packages(parser: argparse.ArgumentParser) -> None:
    """Add the option for the user's own code, besides that of the surrounding project."""
    parser.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="NAME",
        help="a package of yours; configs may then use its classes (may be repeated)",
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option to use what someone else has made."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run a config or code from someone else that you trust; for a run's folder, the "
        "answer is remembered until its config changes",
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses a checkpoint of a run."""
    parser.add_argument(
        "--checkpoint",
        default="best",
        metavar="best|last|STEP|METRIC",
        help="which checkpoint to use; METRIC: one of evaluate.also (default: best)",
    )


def note_weights(composed: Composed, args: argparse.Namespace) -> None:
    """Note if the best checkpoint was chosen by a metric of other weights than those in use."""
    name, _, metric = str(composed.cfg.evaluate.monitor).partition("/")
    if args.checkpoint == "best" and metric.startswith("valid") and args.weights != name:
        print(
            f"note: the best checkpoint was chosen by {name}/{metric}; --weights {name} "
            "uses those weights",
            file=sys.stderr,
        )


def project_from(args: argparse.Namespace) -> Project:
    """Return the project around the current folder, extended by the arguments."""
    return project.find(packages=args.package, configs=args.config_dir)


def compose_arguments(args: argparse.Namespace, *, strict: bool = True) -> Composed:
    """Compose the arguments' experiment."""
    from samewise.runner.config.compose import compose

    return compose(args.overrides, project=project_from(args), strict=strict)


@dataclass(frozen=True)
class Command:
    """A command: its name and file."""

    name: str
    path: Path

    @property
    def summary(self) -> str:
        """First line of the module's docstring, read without an import."""
        with self.path.open(encoding="utf-8") as lines:
            return next(lines).strip().strip('"').rstrip(".")

    def load(self, parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
        """Import the command's module and no other, and set up the parser.

        Returns:
            The function that runs the command.
        """
        module = importlib.import_module(f"samewise.runner.commands.{self.path.stem}")
        module.configure(parser)
        parser.epilog = parser.epilog or getattr(module, "EXAMPLES", None)
        return module.run


def commands() -> dict[str, Command]:
    """Return all commands by name, `train` first."""
    files = [file for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("_")]
    all_commands = [
        Command(file.stem.replace("_", "-"), file)
        for file in sorted(files, key=lambda file: (file.stem != "train", file.stem))
    ]
    return {command.name: command for command in all_commands}
