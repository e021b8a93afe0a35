"""Print a script that lets the shell complete commands, groups, choices and keys."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from samewise.runner.commands import commands

SHELLS = ("bash", "zsh", "fish")

OVERRIDES = ("train", "check", "show")
"""Commands whose arguments are overrides."""

INERT = re.compile(r"[\w./=+@~:, -]+")
"""What the shell may be given: it evaluates words, and `$(command).yaml` can be a file's name."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete commands in")
    parser.epilog = """\
examples:
  eval "$(samewise completion bash)"                    in ~/.bashrc
  eval "$(samewise completion zsh)"                     in ~/.zshrc
  samewise completion fish | source                     in ~/.config/fish/config.fish"""


def run(args: argparse.Namespace) -> int:
    _plugin(args.shell).install()
    return 0


def answer(argv: Sequence[str]) -> int:
    """Answer the shell scripts' call `samewise -sc query=SHELL`: print the completions of the line in COMP_LINE; nothing if anything fails."""
    shell = argv[0].removeprefix("query=") if argv else ""
    if shell not in SHELLS or "COMP_LINE" not in os.environ:
        return 2
    try:
        _plugin(shell).query("config")
    except Exception:  # a half-typed line often does not compose, and an error would be printed into the prompt
        return 1
    return 0


def _plugin(shell: str):  # pyright: ignore[reportUnknownParameterType]  (Hydra's plugins are not typed; importing them here keeps this module light)
    """Hydra's completion for `shell`, extended by the commands and this program's name."""
    from hydra._internal.core_plugins.bash_completion import BashCompletion
    from hydra._internal.core_plugins.fish_completion import FishCompletion

    from samewise.runner.config import loader, project

    class Taught:
        """Mixed into Hydra's classes: completes a command's name, then the command's arguments."""

        def _query(self, config_name: str | None, line: str) -> list[str]:
            return [match for match in self._matches(config_name, line) if INERT.fullmatch(match)]

        def _matches(self, config_name: str | None, line: str) -> list[str]:
            words = line.split()
            if not words or (len(words) == 1 and not line.endswith(" ")):
                return [f"{name} " if shell == "fish" else name for name in commands() if name.startswith(words[0] if words else "")]
            rest = " ".join(word for word in words[1:] if not word.startswith("-")) + (" " if line.endswith(" ") else "")
            if words[0] == "list":
                return [group for group in loader.groups(self.config_loader) if group.startswith(rest.strip())]  # type: ignore[attr-defined]
            if words[0] == "completion":
                return [name for name in SHELLS if name.startswith(rest.strip())]
            if words[0] not in OVERRIDES:
                return []
            found: list[str] = super()._query(config_name, rest if rest.strip() else "")  # type: ignore[misc]
            return [match for match in found if not match.startswith(("hydra", "+hydra", "~hydra", "config", "schema"))]

    class Bash(Taught, BashCompletion):
        @staticmethod
        def _get_exec() -> str:
            return "samewise"

    class Fish(Taught, FishCompletion):
        @staticmethod
        def _get_exec() -> list[tuple[str, str]]:
            return [("samewise", "")]

    found = loader.config_loader(project.find())
    if shell == "zsh":  # Hydra's script for bash, which zsh runs once bash completions are enabled
        if len(sys.argv) > 1 and sys.argv[1] == "completion":
            print("autoload -Uz compinit bashcompinit && compinit && bashcompinit")
        return Bash(found)
    return Fish(found) if shell == "fish" else Bash(found)
