"""The commands, one a file: NAME.py with a docstring whose first line is its summary, `configure(parser)` and `run(args) -> int`.

Here is what they share: the arguments that say which experiment.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.config.project import Project


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The overrides, and where the user's own project lies."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="experiment=NAME, GROUP=CHOICE, KEY=VALUE, +NEW_KEY=VALUE or ~KEY")
    add_project(parser)


def add_project(parser: argparse.ArgumentParser) -> None:
    """Where the user's own project lies, beside what its pyproject.toml says."""
    parser.add_argument("--package", action="append", default=[], metavar="NAME", help="a package of your own that configs may name (may be repeated)")
    parser.add_argument("--config-dir", action="append", default=[], metavar="DIR", help="a config folder of your own (may be repeated)")


def project_from(args: argparse.Namespace) -> Project:
    """The project around the current folder, with what the arguments add."""
    from samewise.runner.config import project

    return project.find(packages=args.package, configs=args.config_dir)


def composed_from(args: argparse.Namespace, *, strict: bool = True) -> Composed:
    """Compose the arguments' experiment."""
    from samewise.runner.config.compose import compose

    return compose(args.overrides, project=project_from(args), strict=strict)
