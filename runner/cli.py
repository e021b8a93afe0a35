"""The `samewise` command: find the command's module, read its arguments, run it, say what went wrong. `train` itself is here."""

from __future__ import annotations

import argparse
import ast
import errno
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.errors import ConfigError, PeerFailed, Problem, SamewiseError, ends_process, nearest
from samewise.runner.records.folder import read_json

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed

INTERRUPTED = 3


def entry() -> None:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run one command.

    Returns:
        0 done, 1 training failed, 2 the input was wrong, 3 interrupted but resumable.
    """
    debug = "--debug" in argv
    try:
        return _dispatch(list(argv))
    except BrokenPipeError:  # `samewise show | head`
        sys.stderr.close()
        return 0
    except BaseException as error:
        if debug:
            traceback.print_exc()
        return _say(error)


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of `train`."""
    from samewise.runner.commands import add_overrides

    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("-m", "--multirun", action="store_true", help="a sweep, as `samewise sweep`; several values (a=1,2) make one by themselves")
    parser.epilog = """\
examples:
  samewise train experiment=resnet18_digits
  samewise train experiment=resnet18_digits optimizer.lr=0.05 max_epochs=3
  samewise train model=resnet50 dataset=cifar10 optimizer=adamw batch_size=128 seed=1
  samewise train experiment=resnet18_digits debug=tiny

the keys most used:
  experiment=NAME            a whole recipe; `samewise list experiment` shows them
  seed=0                     the key of all randomness
  max_epochs=10 max_steps=N  how long to train
  batch_size=64              samples an optimizer step sees
  accumulate=4               the same batch in four smaller pieces, for less memory
  optimizer=sgd optimizer.lr=0.1 scheduler=cosine
  device=cuda precision=bf16
  loader.num_workers=4       the same bits with any number
  run_root=runs              where runs are kept

The same command again resumes a run that was stopped, and reports one that is done."""


def train(args: argparse.Namespace) -> int:
    """Train an experiment, or go on with it, or report that it is done."""
    from samewise.runner.commands import composed_from

    if args.multirun or _is_sweep(args.overrides):
        from samewise.runner.commands.sweep import start

        return start(args)
    return train_composed(composed_from(args, strict=False), as_json=args.json, debug=args.debug)


def train_composed(composed: Composed, *, as_json: bool = False, debug: bool = False) -> int:
    """What `train` does with a composed config.

    Args:
        composed: The experiment, with its problems where there are any.
        as_json: Print the summary as JSON.
        debug: Show the traceback of a rank that failed.

    Returns:
        The exit code.
    """
    from samewise.runner.config.check import check, settings_are_sound
    from samewise.runner.records.summary import print_summary
    from samewise.runner.training import determinism
    from samewise.runner.training.launch import is_rank, launch, processes, rank

    cfg, project, folder = composed.cfg, composed.project, composed.folder
    sound = settings_are_sound(composed)
    if sound and not is_rank():
        uri = cfg.tracking.uri if cfg.tracking.enabled else None
        done = _finished(composed)
        if done is not None:
            print_summary(done, folder, uri=uri, as_json=as_json, fresh=False)
            return 0
    if sound:
        determinism.prepare(cfg.reproducibility)  # environment variables, before anything imports torch
    if is_rank():
        return rank(composed, as_json=as_json, look=partial(_finished, composed), check=partial(check, composed, project))
    check(composed, project)
    wanted = processes(composed)
    if wanted > 1:
        return launch(composed, wanted, as_json=as_json, debug=debug)

    from samewise.runner.training.build import build
    from samewise.runner.training.loop import fit

    summary = fit(build(composed, project, folder))
    print_summary(summary, folder, uri=cfg.tracking.uri if cfg.tracking.enabled else None, as_json=as_json)
    return 0


def _is_sweep(overrides: Sequence[str]) -> bool:
    """Whether any override has several values. What cannot be read is none: composing tells of it."""
    from samewise.runner.config.overrides import has_several_values

    return any(has_several_values(text) for text in overrides)


def _finished(composed: Composed) -> dict[str, Any] | None:
    """The summary of a run that is done. A damaged one is none, and one below a run_root that is no folder, of which `check` tells.

    Raises:
        ConfigError: it is there and cannot be read, or was trained with other code.
    """
    from samewise.runner.config.saved import answers
    from samewise.runner.records.sources import require_same

    try:
        summary = read_json(composed.folder.summary)
    except (NotADirectoryError, ValueError):
        return None
    except OSError as error:
        hint = "nothing is trained as long as the run may be done; see to the storage, then give the same command again"
        raise ConfigError(Problem(str(composed.folder.summary), f"cannot be read: {error.strerror}", hint=hint)) from None
    if not isinstance(summary, dict) or summary.get("status") != "finished" or not answers(composed.folder, composed.cfg):
        return None
    require_same(composed.folder, lambda: composed.cfg.reproducibility)
    return summary


@dataclass(frozen=True)
class Command:
    """One command: how it is configured and run, known without importing it.

    Args:
        name: As typed.
        summary: One line, the first of its module's docstring.
        path: The module's file; None for `train`.
    """

    name: str
    summary: str
    path: Path | None = None

    def load(self) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
        """Import the command's module, and only that."""
        if self.path is None:
            return configure, train
        module = importlib.import_module(f"samewise.runner.commands.{self.path.stem}")
        return module.configure, module.run


def commands() -> dict[str, Command]:
    """Every command by name, `train` first: a file in commands/ is a command."""
    found = {"train": Command("train", str(train.__doc__).strip().rstrip("."))}
    for file in sorted((Path(__file__).parent / "commands").glob("*.py")):
        if not file.name.startswith("_"):
            name = file.stem.replace("_", "-")
            first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            found[name] = Command(name, first.removeprefix(f"`samewise {name}`: ").rstrip("."), file)
    return found


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if argv[0] in ("-V", "--version"):
        from samewise import __version__

        print(f"samewise {__version__}")
        return 0
    if argv[0] in ("-sc", "--shell-completion"):  # what the scripts of `samewise completion` call
        from samewise.runner.commands.completion import answer

        return answer(argv[1:])
    known = commands()
    if argv[0] not in known:
        raise ConfigError(Problem("", "there is no such command", argv[0], "a command that `samewise --help` lists", nearest(argv[0], known)))
    command = known[argv[0]]
    arrange, run = command.load()
    parser = argparse.ArgumentParser(
        prog=f"samewise {command.name}", description=command.summary + ".", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    arrange(parser)
    if "--debug" not in parser._option_string_actions:  # pyright: ignore[reportPrivateUsage]  (argparse has no public way to ask)
        parser.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    try:
        given = parser.parse_intermixed_args(argv[1:])
    except SystemExit as stop:  # --help (0) and usage errors (2); what a command itself raises is an error
        return stop.code if isinstance(stop.code, int) else 2
    return run(given)


def _help() -> str:
    known = commands().values()
    width = max(len(command.name) for command in known)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in known]
    return "\n".join(
        [
            "usage: samewise COMMAND [arguments]",
            "",
            "An experiment gives the same bits every time.",
            "",
            "commands:",
            *lines,
            "",
            "examples:",
            "  samewise list experiment",
            "  samewise show experiment=resnet18_digits",
            "  samewise train experiment=resnet18_digits optimizer.lr=0.05",
            "",
            "`samewise COMMAND --help` explains a command.",
        ]
    )


def _say(error: BaseException) -> int:
    """Tell a person what went wrong, on stderr; the exit code."""
    code, text = told(error)
    if not isinstance(error, PeerFailed) or not error.is_told:
        print(text, file=sys.stderr)
    return code


def told(error: BaseException) -> tuple[int, str]:
    """The exit code for an error, and what a person is told of it."""
    if isinstance(error, SamewiseError):
        count = len(error.problems)
        lines = [f"  {line}" for problem in error.problems for line in str(problem).splitlines()]
        head = "interrupted:" if error.exit_code == INTERRUPTED else f"{count} problems:" if count > 1 else "error:"
        return error.exit_code, "\n".join([head, *lines])
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; the same command goes on from the last checkpoint"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" at {error.filename}" if error.filename else ""
        hint = "free some space, then give the same command again; it goes on from the last checkpoint"
        return 1, f"error:\n  the disk is full{where}\n    hint:     {hint}"
    if isinstance(error, SystemExit):
        message, where = ends_process("something", error)
        return 1, f"error:\n  {message}\n    hint:     {where}"
    message = " ".join(str(error).split())
    return 1, f"error:\n  {type(error).__name__}: {message}\n    hint:     run again with --debug for the traceback"
