"""The `samewise` command: finds the command's module, parses arguments, runs it, prints errors."""

import argparse
import atexit
import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

from samewise.runner.commands import commands
from samewise.runner.errors import (
    INTERRUPTED,
    ConfigError,
    PeerFailed,
    Problem,
    SamewiseError,
    describe,
    did_you_mean,
    nearest,
    traceback_of,
)
from samewise.runner.secrets import filter_output

_INSTEAD = {
    "resume": "`samewise train` with the same overrides resumes where the run was stopped",
    "test": "`samewise eval RUN --split test`",
    "validate": "`samewise eval RUN`",
    "infer": "`samewise predict RUN FILE`",
}
"""Commands of other tools."""


def entry() -> None:
    """The console script."""
    os.environ["PYTHONSAFEPATH"] = (
        "1"  # so that no child process imports modules from the current folder
    )
    _open_closed_streams()
    # If native code crashes, this prints the line of Python
    faulthandler.enable(file=2)
    if sys.argv[1:2] in (["train"], ["sweep"]) and "RANK" not in os.environ:
        _report_signals()
    # A shell may have started the command with Ctrl-C ignored
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    code = main(sys.argv[1:])
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))  # all is done and said
    # Python's last milliseconds, in which it has handlers no more
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    # Otherwise Python ends by SIGINT, not with this code, if it was interrupted in an exec of text
    # (as dataclasses do), and whoever caught that
    exec("")
    if "RANK" in os.environ:  # of torchrun
        from samewise.runner.processes.this_process import end_rank

        end_rank(code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Point standard streams that were closed (`>&-`) at the null device.

    Otherwise the next file that is opened would receive what is printed.
    """
    # Each call takes the lowest free number, so this fills the closed ones
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        # Python opens files that child processes do not inherit; they need these too
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or open(number, mode, closefd=False)  # noqa: SIM115
        for number, (stream, mode) in enumerate(
            ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
        )
    )


def _report_signals() -> None:
    """End the command at SIGTERM, SIGUSR1 or SIGHUP with a message and its exit code.

    Training handles them itself; this covers the seconds of imports before it, and the end.
    """
    process = os.getpid()

    def stop(number: int, frame: object) -> None:
        if os.getpid() != process:  # a forked child
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # Not print, which the signal may have interrupted: Python's buffers cannot be entered twice
        os.write(
            2,
            f"interrupted: stopped by {signal.Signals(number).name}; run the same command "
            "again\n".encode(),
        )
        os._exit(INTERRUPTED)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the command at once if Ctrl-C arrives while torch is imported.

    torch imports NumPy from C, and drops the KeyboardInterrupt that leaves NumPy half imported.
    """
    at = frame
    while at is not None:
        if at.f_code.co_name == "<module>" and at.f_globals.get("__name__") == "torch":
            os.write(2, b"interrupted; run the same command again\n")
            os._exit(INTERRUPTED)
        at = at.f_back
    signal.default_int_handler(number, frame)


@filter_output()
def main(argv: Sequence[str]) -> int:
    """Run one command; return the exit code, as `--help` lists them."""
    debug = "--debug" in argv
    try:
        code = _find_command(list(argv))()
        sys.stdout.flush()  # if it cannot be written, this is an error of the command
        return code
    except BaseException as error:
        if debug:
            print(traceback_of(error), end="", file=sys.stderr)
        code, text = describe(error)
        if not isinstance(error, PeerFailed) or not error.is_told:
            print(text, file=sys.stderr)
        return code


def _find_command(argv: list[str]) -> Callable[[], int]:
    """Parse the arguments into a function that runs the command and returns its exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        return partial(_show, _help())
    if argv[0] in ("-V", "--version"):
        from samewise import __version__

        return partial(_show, f"samewise {__version__}")
    commands_by_name = commands()
    ConfigError.raise_if(
        argv[0] not in commands_by_name,
        "",
        "unknown command",
        argv[0],
        "one of the commands that `samewise --help` lists",
        _INSTEAD.get(argv[0]) or nearest(argv[0], commands_by_name),
    )
    command = commands_by_name[argv[0]]
    parser = Parser(
        prog=f"samewise {command.name}",
        description=command.summary + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.command_words = argv[1:]
    run = command.load(parser)
    if "--debug" not in parser._option_string_actions:  # pyright: ignore[reportPrivateUsage]  (argparse has no public way to ask)
        parser.add_argument(
            "--debug", action="store_true", help="show a traceback when something fails"
        )
    try:
        # Options may stand between overrides
        arguments = parser.parse_intermixed_args(argv[1:])
    except SystemExit as stop:  # --help; a SystemExit from a command itself is an error
        code = stop.code if isinstance(stop.code, int) else 2
        return lambda: code
    return partial(run, arguments)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors suggest what was meant."""

    command_words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError for wrong arguments.

        An unknown option is reported first, since argparse would take its value for another
        argument.
        """
        help_ = f"`{self.prog} --help` explains the command"
        options = [name for action in self._actions for name in action.option_strings]
        for place, word in enumerate(self.command_words):
            name, _, value = word.partition("=")
            if (
                re.match(r"--?[a-zA-Z]", name)
                and name not in options
                and not (name[1] != "-" and name[:2] in options)
            ):
                value = value or next(
                    (
                        after
                        for after in self.command_words[place + 1 : place + 2]
                        if not after.startswith("-")
                    ),
                    "VALUE",
                )
                raise ConfigError(
                    Problem(
                        self.prog,
                        "no such option",
                        name,
                        hint=self._meant(name, value, options) or help_,
                    )
                )
        if choice := re.match(r"(.*?): invalid choice: '(.*?)' \(choose from (.*)\)", message):
            where, value, names = choice.groups()
            raise ConfigError(
                Problem(
                    self.prog,
                    f"{where}: no such choice",
                    value,
                    f"one of: {names}".replace("'", ""),
                    did_you_mean(value, re.findall(r"[\w-]+", names)) or help_,
                )
            )
        raise ConfigError(Problem(self.prog, message, hint=help_))

    def _meant(self, name: str, value: str, options: Sequence[str]) -> str:
        if bare := did_you_mean(name.lstrip("-"), [option.lstrip("-") for option in options]):
            return bare.replace("'", "'--", 1)
        if name in ("--resume", "--continue"):
            return "run the same command again without it: it resumes where the run was stopped"
        if len(name) == 2:
            return f"settings are written without dashes and in full: KEY={value}"
        if "--sort" in options and name in ("--best", "--top", "--by", "--metric"):
            return "--sort METRIC lists the best first, for example --sort valid/accuracy"
        return (
            "settings are written without dashes: "
            f"{self._setting(name.lstrip('-').replace('-', '_'), value)}"
            if any(action.dest == "overrides" for action in self._actions)
            else ""
        )

    def _setting(self, key: str, value: str) -> str:
        """`max_epochs=3` for `epochs` and `3`, as the overrides that are given compose."""
        from samewise.runner.config import project
        from samewise.runner.config.compose import compose

        choices = [word for word in self.command_words if re.match(r"[a-z/]+=\w", word)]
        try:
            problems = compose(
                [*choices, f"{key}={value}"], project=project.find(), strict=False
            ).problems
        except SamewiseError:
            return f"{key}={value}"
        hint = next((problem.hint for problem in problems if problem.path == key), "")
        suggestion = re.match(r"did you mean '?([\w.]+)'?\?", hint)
        return f"{suggestion[1] if suggestion else key}={value}"


def _show(text: str) -> int:
    print(text)
    return 0


def _help() -> str:
    entries = commands().values()
    width = max(len(command.name) for command in entries)
    return "\n".join(
        [
            "usage: samewise COMMAND [arguments]",
            "",
            "An experiment gives the same bits every time.",
            "",
            "commands:",
            *[f"  {command.name:<{width}}  {command.summary}" for command in entries],
            "",
            "examples:",
            "  samewise list experiment",
            "  samewise show experiment=resnet18_digits",
            "  samewise train experiment=resnet18_digits optimizer.lr=0.05",
            "",
            "exit codes:",
            "  0  done",
            "  1  training failed; or, for verify, diff and reproduce: the bits differ or "
            "cannot be compared; for gate: not accepted",
            "  2  the input was wrong: a config, an option, a file that is damaged or was altered",
            "  3  interrupted; run the same command again to resume",
            "  4  reproduce: the bundle is intact, but nothing was run without --trust",
            "",
            "`samewise COMMAND --help` explains a command.",
        ]
    )
