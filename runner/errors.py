"""Errors for users: what is wrong, where, what was expected, and the nearest valid name."""

import difflib
import errno
import os
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samewise.runner.secrets import redact, redact_values

_STORAGE = {
    errno.EIO,
    errno.EFBIG,
    errno.EROFS,
    errno.ESTALE,
    errno.EACCES,
    errno.EPERM,
    errno.ENXIO,
    errno.ENODEV,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
"""Errors of a file system, at whatever call they come: no code of samewise's is to blame."""
_LONGEST = 300
"""Maximum length of a library's message."""
# The package's folders may be links: a traceback names either place
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
        where: `FILE:LINE` of the config file that sets it, unless an override does.
    """

    path: str
    message: str
    value: object = ...
    expected: str = ""
    hint: str = ""
    where: str = ""

    def __str__(self) -> str:
        # The first line is read first, and often alone
        to_do = (
            f"hint: {self.hint}"
            if self.hint
            else f"expected: {self.expected}"
            if self.expected
            else ""
        )
        head = ": ".join(
            filter(None, [self.where, self.path, _strip_file(self.message, self.path, self.value)])
        )
        value = (
            "    value:    "
            f"{truncate(repr(redact_values({self.path: self.value})[self.path]), 200)}"
            if self.value is not ...
            else ""
        )
        expected = f"    expected: {self.expected}" if self.expected and self.hint else ""
        return "\n".join(filter(None, ["; ".join(filter(None, [head, to_do])), value, expected]))


class SamewiseError(Exception):
    """An error that a user can act on, printed without a traceback.

    `exit_code` is the command's.
    """

    exit_code = 1

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem("", p) for p in problems)
        super().__init__("\n".join(map(str, self.problems)))

    @classmethod
    def raise_if(
        cls,
        applies: object,
        path: str,
        message: str,
        value: object = ...,
        expected: str = "",
        hint: str = "",
        where: str = "",
    ) -> None:
        """Raise the error with this `Problem` if it applies.

        The arguments are evaluated in any case: where each sample or step passes, write `if`.
        """
        if applies:
            raise cls(Problem(path, message, value, expected, hint, where))

    @classmethod
    def raise_all(cls, problems: Iterable[Problem]) -> None:
        """Raise the error with these problems, if there are any."""
        if listed := tuple(problems):
            raise cls(*listed)

    def _render_traceback_(self) -> list[str]:
        """The error as IPython, and so a notebook, shows it; `%tb` shows the traceback."""
        return describe(self)[1].splitlines()


class ConfigError(SamewiseError):
    """Invalid input: a config, a path, an argument."""

    exit_code = 2


class NotTrusted(ConfigError):
    """Received content is intact, but the user has not trusted it, so nothing of it was run."""

    exit_code = 4


class DataError(ConfigError):
    """A data set is missing, incomplete or malformed."""


class DamagedFile(ConfigError):
    """One of samewise's files can be read but does not contain what was written.

    A file that cannot be read now may be readable later, and is not damaged.
    """


class CheckpointError(SamewiseError):
    """A checkpoint is missing, truncated or altered."""

    exit_code = 2


class DamagedCheckpoint(CheckpointError):
    """A checkpoint can be read but does not contain what was written.

    One that cannot be read now may be readable later, and is not damaged.
    """


class TrainingError(SamewiseError):
    """Training failed: a non-finite loss, a full disk."""


class PeerFailed(SamewiseError):
    """Another process of the run failed, which ended this one.

    `is_told`: the other has reported its reason, so nothing more is printed.
    """

    def __init__(self, *problems: Problem | str, is_told: bool = True, exit_code: int = 1) -> None:
        super().__init__(*problems)
        self.is_told = is_told
        self.exit_code = exit_code


INTERRUPTED = 3
"""The exit code of a command that was stopped and can be given again."""


class Interrupted(SamewiseError):
    """The run was asked to stop; it has saved and can be resumed by the same command."""

    exit_code = INTERRUPTED


def nearest(name: str, choices: Iterable[str]) -> str:
    """`did you mean 'x'?` for the choice most like `name`.

    If none is similar and they are few, all choices.
    """
    names: Sequence[str] = sorted(set(map(str, choices)))
    alike = [x for x in names if x.lower() == str(name).lower()] or same_words(str(name), names)
    # F1 for f1_score
    longer = [x for x in names if str(name).lower().startswith(f"{x.lower()}_")]
    closer = [
        x
        for x in difflib.get_close_matches(str(name), names, cutoff=0.75)
        if x.startswith(tuple(f"{short}_" for short in longer))
    ]
    # Closer: lr_factor, not lr, for lr_facto
    close = (
        alike or closer or longer or difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    )
    if close:
        return f"did you mean '{close[0]}'?"
    if not names:
        return ""
    return f"one of: {first_few(names, 12)}"


def same_words(name: str, names: Iterable[str]) -> list[str]:
    """The names with the same words in another order: `num_classes` for `classes_num`."""
    parts = sorted(re.split(r"[_.]", name.lower()))
    return [x for x in names if len(parts) > 1 and sorted(re.split(r"[_.]", x.lower())) == parts]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`did you mean 'x'?`, or empty if no name is similar."""
    hint = nearest(name, names)
    return hint if hint.startswith("did you mean") else ""


def first_few(names: Sequence[str], most: int) -> str:
    """`a, b, c, and 2 more`."""
    return ", ".join(names[:most]) + (
        f", and {len(names) - most} more" if len(names) > most else ""
    )


def truncate(text: str, longest: int, *, ending: str = "...") -> str:
    """Shorten a text to at most so many letters, keeping its beginning and adding `ending`."""
    return text if len(text) <= longest else text[: longest - len(ending)] + ending


def limit_from(variable: str, usual: int) -> int:
    """The limit that an environment variable sets, else the default.

    Raises a ConfigError unless it is a whole number greater than 0.
    """
    setting = os.environ.get(variable)
    ConfigError.raise_if(
        setting is not None and (not setting.isdecimal() or not int(setting)),
        variable,
        "this environment variable is not a valid limit",
        setting,
        "a whole number greater than 0",
    )
    return usual if setting is None else int(setting)


def make_room(code: int | None, place: str | Path) -> str:
    """`free some space`, or what else is used up, for an error of writing; empty for others."""
    if code == errno.EDQUOT:
        return "free some of your quota"
    if code != errno.ENOSPC:
        return ""
    path = Path(place).absolute()
    status = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
    # Some file systems, such as btrfs, have no fixed number of inodes, and say 0
    if status.f_files and not status.f_favail:
        return "delete some files, as no inodes are left (df -i)"
    return "free some space"


def none_hint(output: object) -> str:
    """The hint for a model that returns None."""
    return "its forward returns nothing: is the `return` missing?" if output is None else ""


def require_at_least(numbers: Mapping[str, float], *, least: float = 1) -> None:
    """Raise a ConfigError for the first of some settings (by path) that is below `least`."""
    for path, value in numbers.items():
        ConfigError.raise_if(value < least, path, f"must be at least {least}", value)


def number_of(count: int, noun: str) -> str:
    """`1 point`, `2 points`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def requested_memory(error: BaseException) -> str:
    """The amount that an allocator refused, in words; empty for other errors."""
    match = re.search(
        r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|\w?iB)", str(error), re.IGNORECASE
    )
    if match is None:
        return "asks for more memory than is available" if isinstance(error, MemoryError) else ""
    size = f"{float(match[1]) / 1e9:,.3g} GB" if match[2] == "bytes" else f"{match[1]} {match[2]}"
    return f"asks for {size} of memory at once, which is not available"


def first_line(error: BaseException, *, after: str = "") -> str:
    """The first line of an error's message, or of what follows `after` in it.

    The type's name if it has none.
    """
    text = str(error).rpartition(after)[2] if after else str(error)
    lines = text.strip().splitlines()
    return lines[0] if lines else type(error).__name__


def summarise_error(error: BaseException) -> str:
    """Return an error's message on one line, without a library's tracebacks and advice."""
    text = " ".join(
        re.split(
            r"^\s*(?:Traceback \(most recent call last\)|\[start of |The following exceptions)",
            str(error),
            maxsplit=1,
            flags=re.MULTILINE,
        )[0].split()
    )
    return truncate(text, _LONGEST) or type(error).__name__


def raised_at(error: BaseException, *, anywhere: bool = True) -> str:
    """Return where an error was raised: file, line, function and the line's text.

    The user's line counts, even if a library raised the error below it. If no line is the user's, a
    library's is returned with `anywhere`, else nothing.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(("<", *_NOT_THE_USERS))]
    at = next(reversed(own or (frames if anywhere else [])), None)
    return (
        f"raised at {at.filename}:{at.lineno}, in {at.name}: {(at.line or '')[:_LONGEST]}"
        if at
        else ""
    )


def strip_heading(text: str) -> str:
    """The output of `describe` without `error:` or the number of problems."""
    first, _, rest = text.partition("\n")
    return (
        textwrap.dedent(rest)
        if rest and first.endswith(":")
        else re.sub(r"^(error|interrupted): ", "", text)
    )


def traceback_of(error: BaseException) -> str:
    """Return the traceback to show: a SamewiseError's cause has the frames that failed."""
    cause = error.__cause__ if isinstance(error, SamewiseError) else None
    return "".join(traceback.format_exception(cause or error))


def describe_exit(who: str, error: SystemExit) -> tuple[str, str]:
    """The message and hint for a `sys.exit` that would end a training."""
    return f"{who} ends the process: sys.exit({error.code!r})", raised_at(error)


def describe(error: BaseException) -> tuple[int, str]:
    """The exit code for an error, and its message without secrets."""
    code, message = _describe(error)
    return code, redact(message)


def _describe(error: BaseException) -> tuple[int, str]:
    if isinstance(error, SamewiseError):
        if len(error.problems) == 1:
            return (
                error.exit_code,
                f"{'interrupted' if error.exit_code == INTERRUPTED else 'error'}: "
                f"{error.problems[0]}",
            )
        return error.exit_code, "\n".join(
            [
                f"{len(error.problems)} problems:",
                *[f"  {line}" for problem in error.problems for line in str(problem).splitlines()],
            ]
        )
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted; run the same command again"
    if isinstance(error, OSError) and (room := make_room(error.errno, str(error.filename or "."))):
        where = f" at {error.filename}" if error.filename else ""
        return 1, f"error: the disk is full{where}; hint: {room}, then run the same command again"
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return (
            1,
            f"error: {error.filename or 'a file'}: {error.strerror}; hint: check the "
            "storage and the permissions, then run the same command again",
        )
    if isinstance(error, SystemExit):
        message, where = describe_exit("something", error)
        return 1, f"error: {message}; hint: {where}"
    if isinstance(error, MemoryError):
        return (
            1,
            "error: there is not enough memory; hint: a smaller model, batch_size or "
            "loader.num_workers; --debug shows where",
        )
    message = f": {detail}" if (detail := summarise_error(error)) != type(error).__name__ else ""
    return (
        1,
        f"error: {type(error).__name__}{message}; hint: run again with --debug for the traceback",
    )


def _strip_file(message: str, *told: object) -> str:
    """Remove the file, which is reported separately, and the error's number from a message."""
    for x in told:
        if isinstance(x, str) and os.sep in x:
            message = re.sub(rf"(:? |^)(['\"]){re.escape(x)}\2", "", message)
    return re.sub(r"\[Errno \d+\] ", "", message)
