"""Print a script that lets the shell complete commands, groups, choices and keys."""

from __future__ import annotations

import argparse
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from samewise.runner.commands import commands

SHELLS = ("bash", "zsh", "fish")

OVERRIDES = ("train", "check", "show")
"""Commands whose arguments are overrides."""

INERT = re.compile(r"[\w./=+@~:, -]+")
"""Matches that are safe in a shell: it evaluates words, and `$(command).yaml` can be a file's name.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete commands in")
    parser.epilog = """\
examples:
  eval "$(samewise completion bash)"                    in ~/.bashrc
  eval "$(samewise completion zsh)"                     in ~/.zshrc
  samewise completion fish | source                     in ~/.config/fish/config.fish"""


def run(args: argparse.Namespace) -> int:
    print(_SCRIPTS[args.shell])
    return 0


_BASH = """\
_samewise_completion()
{
    local words=($COMP_LINE)
    local matches=$(COMP_LINE=$COMP_LINE "${words[0]}" -sc query=bash)
    COMPREPLY=($(compgen -o nospace -o default -W "$matches" -- "${words[$COMP_CWORD]}"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _samewise_completion samewise"""
_FISH = """\
function samewise_completion
    set -lx COMP_LINE (commandline -cp)
    set -l words (commandline -cpo)
    eval "$words[1] -sc query=fish"
end
complete -c samewise -x -a '(samewise_completion)'"""
_SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{_BASH}",
    "fish": _FISH,
}


def answer(argv: Sequence[str]) -> int:
    """Print the completions of the line in COMP_LINE; nothing if anything fails.

    The shell scripts call `samewise -sc query=SHELL`.
    """
    shell = argv[0].removeprefix("query=") if argv else ""
    if shell not in SHELLS or "COMP_LINE" not in os.environ:
        return 2
    try:
        matches = sorted(filter(INERT.fullmatch, set(_matches(os.environ["COMP_LINE"]))))
    except Exception:
        # A half-typed line often does not compose, and an error would disturb the prompt
        return 1
    print("\n".join(matches) if shell == "fish" else " ".join(matches))
    return 0


def _matches(line: str) -> Iterable[str]:
    """Return the possible completions of a line's last word."""
    # The mark keeps the empty word after a trailing space
    *earlier, word = f"{line}|".split()[1:]
    earlier, word = [word for word in earlier if not word.startswith("-")], word.removesuffix("|")
    if not earlier:
        return (name for name in commands() if name.startswith(word))
    command, *overrides = earlier
    if command == "completion":
        return (name for name in SHELLS if name.startswith(word))
    if command == "list":
        return (group for group in _loader().groups() if group.startswith(word))
    return (
        (match for match in _of_overrides(overrides, word) if match.startswith(word))
        if command in OVERRIDES
        else ()
    )


def _loader():
    from samewise.runner.config import loader, project

    return loader.Loader(project.find())


def _of_overrides(earlier: Sequence[str], word: str) -> Iterator[str]:
    """Yield groups, choices, keys and values that an override may name, and files as values."""
    from hydra.errors import ConfigCompositionException
    from omegaconf import OmegaConf

    from samewise.runner.config.tree import at, plain

    key, sign, value = word.partition("=")
    if value.startswith((".", "/")):
        yield from (f"{key}={path}" for path in glob.glob(f"{glob.escape(value)}*"))
        return
    loader, prefix = _loader(), word[:1] if word[:1] in ("+", "~") else ""
    groups = loader.groups()
    if sign and (choices := groups.get(key.removeprefix(prefix))):
        yield from (f"{key}={choice}" for choice in choices)
        return
    for group, choices in groups.items() if not sign else ():
        if f"{prefix}{group}".startswith(word) and "/" not in group[len(word) - len(prefix) :]:
            has_groups = any(other.startswith(f"{group}/") for other in groups)
            yield f"{prefix}{group}{'/' if has_groups and not choices else '=' if not has_groups and prefix != '~' else ''}"
    try:
        cfg = loader.compose(earlier)
    except ConfigCompositionException:
        return
    if sign:
        value = at(plain(cfg), key)
        if value is not None and not isinstance(value, dict | list):
            yield f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        return
    parent = key.rpartition(".")[0]
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    values = at(values, parent) if parent else values
    for name, part in (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else ()
    ):
        yield f"{parent}{'.' if parent else ''}{name}{'.' if isinstance(part, dict | list) else '='}"
