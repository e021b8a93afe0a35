"""List the commands, without importing them, and define the arguments that they share.

Each file NAME.py is a command: the first line of its docstring is its summary, `ARGUMENTS` are its
arguments, of which only one of `EXCLUSIVE` may be given, `run(args)` returns its exit code, and
`EXAMPLES` end its help. A command may add its arguments by `configure(parser)` instead.

Private: it may change at any time.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.config import project

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.config.project import Project


Arguments = dict[str, dict[str, Any]]
"""What argparse's `add_argument` takes, by the arguments' names: `--multirun`, or `-m --multirun`."""

PACKAGES: Arguments = {
    "--package": {
        "action": "append",
        "default": [],
        "metavar": "NAME",
        "help": "a package of yours; configs may then use its classes (may be repeated)",
    }
}
"""The user's own code, besides that of the surrounding project."""
PROJECT: Arguments = {
    **PACKAGES,
    "--config-dir": {
        "action": "append",
        "default": [],
        "metavar": "DIR",
        "help": "a config folder of yours (may be repeated)",
    },
}
"""The user's project, in addition to its pyproject.toml."""
OVERRIDES: Arguments = {
    "overrides": {
        "nargs": "*",
        "metavar": "OVERRIDE",
        "help": "experiment=NAME, GROUP=CHOICE, KEY=VALUE, +NEW_KEY=VALUE or ~KEY",
    },
    **PROJECT,
}
CHANGES: Arguments = {
    "overrides": {
        "nargs": "*",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "values to change in the run's config",
    }
}
"""Overrides of a recorded run's config."""
CHECKPOINT: Arguments = {
    "--checkpoint": {
        "default": "best",
        "metavar": "best|last|STEP|METRIC",
        "help": "which checkpoint to use; METRIC: one of evaluate.also (default: best)",
    }
}
RUN_ROOT: Arguments = {
    "--run-root": {
        "type": Path,
        "default": Path("runs"),
        "help": "where to look for runs (default: runs)",
    }
}
TRUST: Arguments = {
    "--trust": {
        "action": "store_true",
        "help": "run a config or code from someone else that you trust; for a run's folder, the "
        "answer is remembered until its config changes",
    }
}
JSON: Arguments = {"--json": {"action": "store_true", "help": "print a JSON object"}}


def add_arguments(
    parser: argparse.ArgumentParser, arguments: Arguments, *, exclusive: Collection[str] = ()
) -> None:
    """Add arguments to a parser.

    Args:
        parser: The parser.
        arguments: The arguments.
        exclusive: Those of which only one may be given.
    """
    group = parser.add_mutually_exclusive_group() if exclusive else parser
    for names, settings in arguments.items():
        (group if names in exclusive else parser).add_argument(*names.split(), **settings)


add_overrides = partial(add_arguments, arguments=OVERRIDES)
add_project = partial(add_arguments, arguments=PROJECT)
add_trust = partial(add_arguments, arguments=TRUST)


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
        if hasattr(module, "configure"):
            module.configure(parser)
        else:
            add_arguments(parser, module.ARGUMENTS, exclusive=getattr(module, "EXCLUSIVE", ()))
        parser.epilog = module.EXAMPLES
        return module.run


def commands() -> dict[str, Command]:
    """Return all commands by name, `train` first."""
    files = [file for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("_")]
    all_commands = [
        Command(file.stem.replace("_", "-"), file)
        for file in sorted(files, key=lambda file: (file.stem != "train", file.stem))
    ]
    return {command.name: command for command in all_commands}
