"""Errors that are for a person: what is wrong, where, what was expected, and the nearest right name."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import sysconfig
import textwrap
import threading
import traceback
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from samewise.runner.secrets import redact, redact_values

_STORAGE = {errno.EIO, errno.EROFS, errno.ESTALE, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENODEV, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of a file system, at whatever call they come: no code of samewise's is to blame."""
_LONGEST = 300
"""Letters of what a library says."""
_HOMES = {Path(__file__).parents[1], Path(__file__).resolve().parents[1]}
_NOT_THE_USERS = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
        *(home / part for home in _HOMES for part in ("runner", "recipes", "datasets")),
    )
)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Args:
        path: Where: a config path (`optimizer.lr`), or a file.
        message: What is wrong, as a sentence without a full stop.
        value: The offending value, shown as `repr`; leave it out if there is none.
        expected: What would have been right.
        hint: What to do: the nearest right name, or a command.
        where: `FILE:LINE` of a config file that sets it, where it is not an override.
    """

    path: str
    message: str
    value: object = ...
    expected: str = ""
    hint: str = ""
    where: str = ""

    def __str__(self) -> str:
        to_do = f"hint: {self.hint}" if self.hint else f"expected: {self.expected}" if self.expected else ""  # the first line is read first, and often alone
        head = ": ".join(filter(None, [self.where, self.path, _without(self.message, self.path, self.value)]))
        value = f"    value:    {truncate(repr(redact_values({self.path: self.value})[self.path]), 200)}" if self.value is not ... else ""
        expected = f"    expected: {self.expected}" if self.expected and self.hint else ""
        return "\n".join(filter(None, ["; ".join(filter(None, [head, to_do])), value, expected]))


class SamewiseError(Exception):
    """Something a user can act on. Printed without a traceback; `exit_code` is the command's."""

    exit_code = 1

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem("", p) for p in problems)
        super().__init__("\n".join(map(str, self.problems)))

    def _render_traceback_(self) -> list[str]:
        """What IPython, and so a notebook, shows of it; `%tb` shows the traceback."""
        return describe(self)[1].splitlines()


class ConfigError(SamewiseError):
    """The input was wrong: a config, a path, an argument."""

    exit_code = 2


class NotTrusted(ConfigError):
    """What was received is intact, but its user has not said to trust it, so nothing of it was run."""

    exit_code = 4


class DataError(ConfigError):
    """A data set is missing, incomplete or malformed."""


class DamagedFile(ConfigError):
    """A file of ours can be read and is not what was written there. What cannot be read now is not damaged: it may be read later."""


class CheckpointError(SamewiseError):
    """A checkpoint is missing, cut short or altered."""

    exit_code = 2


class DamagedCheckpoint(CheckpointError):
    """Its bytes can be read and are not those that were written. What cannot be read now is not damaged: it may be read later."""


class TrainingError(SamewiseError):
    """Training itself failed: a non-finite loss, a full disk."""


class PeerFailed(SamewiseError):
    """Another process of the run failed, and this one ended with it. `is_told`: the other has said why, so nothing more needs to be said."""

    def __init__(self, *problems: Problem | str, is_told: bool = True, exit_code: int = 1) -> None:
        super().__init__(*problems)
        self.is_told = is_told
        self.exit_code = exit_code


INTERRUPTED = 3
"""The exit code of a command that was stopped and can be given again."""


class Interrupted(SamewiseError):
    """Asked to stop; saved, and resumable by the same command."""

    exit_code = INTERRUPTED


def nearest(name: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'?` for the choice most like `name`, or the choices themselves when none is near and they are few."""
    known: Sequence[str] = sorted(set(map(str, choices)))
    alike = [one for one in known if one.lower() == str(name).lower()] or same_words(str(name), known)
    longer = [one for one in known if str(name).lower().startswith(f"{one.lower()}_")]  # f1 for f1_score
    close = alike or longer or difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    if not known:
        return ""
    return f"one of: {first_few(known, 12)}"


def same_words(name: str, known: Iterable[str]) -> list[str]:
    """The names of the same words in another order: `num_classes` for `classes_num`."""
    words = sorted(re.split(r"[_.]", name.lower()))
    return [one for one in known if len(words) > 1 and sorted(re.split(r"[_.]", one.lower())) == words]


def close(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or nothing where no name is near."""
    hint = nearest(name, known)
    return hint if hint.startswith("did you mean") else ""


def first_few(names: Sequence[str], most: int) -> str:
    """`a, b, c, and 2 more`."""
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def truncate(text: str, longest: int, *, ending: str = "...") -> str:
    """A text of at most so many letters; of a longer one the beginning, and the ending."""
    return text if len(text) <= longest else text[: longest - len(ending)] + ending


def limit_from(variable: str, usual: int) -> int:
    """The limit that an environment variable sets; the usual one where it is not set. Raises a ConfigError where it is not a whole number greater than 0."""
    given = os.environ.get(variable)
    if given is not None and (not given.isdecimal() or not int(given)):
        raise ConfigError(Problem(variable, "this environment variable is not a valid limit", given, "a whole number greater than 0"))
    return usual if given is None else int(given)


def of_nothing(output: object) -> str:
    """The hint where a model returns None."""
    return "its forward returns nothing: is the `return` missing?" if output is None else ""


def require_positive(numbers: Mapping[str, int]) -> None:
    """Raise a ConfigError for the first of some settings, by their paths, that is not at least 1."""
    for path, value in numbers.items():
        if value < 1:
            raise ConfigError(Problem(path, "must be at least 1", value))


def number_of(count: int, noun: str) -> str:
    """`1 point`, `2 points`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def memory_asked_for(error: BaseException) -> str:
    """What an allocator refused, in words; empty where the error is another."""
    asked = re.search(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|\w?iB)", str(error), re.IGNORECASE)
    if asked is None:
        return "asks for more memory than is available" if isinstance(error, MemoryError) else ""
    size = f"{float(asked[1]) / 1e9:,.3g} GB" if asked[2] == "bytes" else f"{asked[1]} {asked[2]}"
    return f"asks for {size} of memory at once, which is not available"


def first_line(error: BaseException, *, after: str = "") -> str:
    """The first line of what an error says, or of what follows `after` in it; the name of its type where it says nothing."""
    text = str(error).rpartition(after)[2] if after else str(error)
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__


def in_short(error: BaseException) -> str:
    """What an error says, on one line: without the tracebacks and the pages of advice that some libraries put into their messages."""
    text = " ".join(
        re.split(r"^\s*(?:Traceback \(most recent call last\)|\[start of |The following exceptions)", str(error), maxsplit=1, flags=re.MULTILINE)[0].split()
    )
    return truncate(text, _LONGEST) or type(error).__name__


def raised_at(error: BaseException, *, anywhere: bool = True) -> str:
    """Where an error was raised: the file, the line, the function, and the line's text; the user's own, where a library raised it.

    Where no line is the user's, a library's is told with `anywhere`, else nothing.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_NOT_THE_USERS))]
    at = next(reversed(own or (frames if anywhere else [])), None)
    return f"raised at {at.filename}:{at.lineno}, in {at.name}: {(at.line or '')[:_LONGEST]}" if at else ""


def without_heading(said: str) -> str:
    """What `describe` says, without `error:` or the number of problems."""
    first, _, rest = said.partition("\n")
    return textwrap.dedent(rest) if rest and first.endswith(":") else re.sub(r"^(error|interrupted): ", "", said)


def traceback_of(error: BaseException) -> str:
    """The traceback to show: that of the error behind one of ours, where there is one, so that its last frames are those that failed."""
    cause = error.__cause__ if isinstance(error, SamewiseError) else None
    return "".join(traceback.format_exception(cause or error))


class EndsAtOnce(SystemExit):
    """An `os._exit`, which would leave nobody to say that it ended the process."""


@contextmanager
def report_exits() -> Generator[None]:
    """Have an `os._exit` of Python code within raise `EndsAtOnce`; in another thread, where nothing would come of that, it ends the process as a failure."""
    process, leave = os.getpid(), os._exit

    def told(status: int) -> NoReturn:
        if os.getpid() != process:  # forked
            leave(status)
        if threading.current_thread() is not threading.main_thread():
            print(f"error: a thread ends the process: os._exit({status})", file=sys.stderr, flush=True)
            leave(status or 1)
        raise EndsAtOnce(status)

    os._exit = told
    try:
        yield
    finally:
        os._exit = leave


def ends_process(who: str, error: SystemExit) -> tuple[str, str]:
    """Message and hint for a `sys.exit` or an `os._exit` that would end a training."""
    return f"{who} ends the process: {'os._exit' if isinstance(error, EndsAtOnce) else 'sys.exit'}({error.code!r})", raised_at(error)


def describe(error: BaseException) -> tuple[int, str]:
    """The exit code for an error, and the message to show or to write down, without secrets."""
    code, message = _described(error)
    return code, redact(message)


def _described(error: BaseException) -> tuple[int, str]:
    if isinstance(error, SamewiseError):
        if len(error.problems) == 1:
            return error.exit_code, f"{'interrupted' if error.exit_code == INTERRUPTED else 'error'}: {error.problems[0]}"
        lines = [f"  {line}" for problem in error.problems for line in str(problem).splitlines()]
        return error.exit_code, "\n".join([f"{len(error.problems)} problems:", *lines])
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; run the same command again to resume from the last checkpoint"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename}" if error.filename else ""
        return 1, f"error: the disk is full{where}; hint: free some space, then run the same command again to resume from the last checkpoint"
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return 1, f"error: {error.filename or 'a file'}: {error.strerror}; hint: check the storage and the permissions, then run the same command again"
    if isinstance(error, SystemExit):
        message, where = ends_process("something", error)
        return 1, f"error: {message}; hint: {where}"
    if isinstance(error, MemoryError):
        return 1, "error: there is not enough memory; hint: a smaller model, batch_size or loader.num_workers; --debug shows where"
    message = f": {said}" if (said := in_short(error)) != type(error).__name__ else ""
    return 1, f"error: {type(error).__name__}{message}; hint: run again with --debug for the traceback"


def _without(message: str, *told: object) -> str:
    """A library's message without the file that is told beside it, and without the number of a system's error."""
    for one in told:
        if isinstance(one, str) and os.sep in one:
            message = re.sub(rf"(:? |^)(['\"]){re.escape(one)}\2", "", message)
    return re.sub(r"\[Errno \d+\] ", "", message)
