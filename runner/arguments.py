"""Checks the arguments of the functions in `api`: wrong types and unknown names are errors.

The messages use Python's terms.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from samewise.runner.errors import ConfigError, Problem, SamewiseError, did_you_mean, nearest

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_VALUED = {
    "run-root": "run_root=%s",
    "package": 'packages=["%s"]',
    "config-dir": 'config_dirs=["%s"]',
    "where": 'where=["%s"]',
    "metric": 'metrics=["%s"]',
    **{name: f'{name}="%s"' for name in ("checkpoint", "weights", "sort", "output")},
    **{
        name: f"{name}=%s"
        for name in (
            "threshold",
            "batch",
            "steps",
            "audit",
            "tolerance",
            "seeds",
            "until",
            "budget",
        )
    },
    "out": 'output="%s"',
}
_SWITCHES = {
    "trust": "trust=True",
    "fresh": "fresh=True",
    "diff": "diff=True",
    "anyway": "anyway=True",
    "retry-failed": "retry_failed=True",
}
"""Options of the commands, as arguments here: those that take a value, and the others."""
_NAMED = {"RUN": "run", "FILE": "files", "--out": "output"}
PATH = (str, os.PathLike)
_TAKES: Mapping[str, tuple[str, str, tuple[type, ...]]] = {
    **dict.fromkeys(
        ("run_root", "output", "pictures"), ("is not a folder", "a string or a path", PATH)
    ),
    "weights": ("is not a callback's name", "a string: 'ema'", (str,)),
    "sort": ("is not a column or a metric", "a string: 'valid/accuracy'", (str,)),
    "uri": ("is not an address", "a string: 'sqlite:///mlflow.db'", (str,)),
    **dict.fromkeys(
        ("fresh", "diff", "wait", "retry_failed", "trust", "bare", "coarse", "anyway"),
        ("is not a switch", "True or False", (bool,)),
    ),
    "checkpoint": ("is not a checkpoint", "'best', 'last' or a step", (str, Integral)),
    "threshold": ("is not a valid score", "a number from 0 to 1", (Real,)),
    "batch": ("is not a valid number of files", "a whole number from 1", (Integral,)),
    "steps": ("is not a number of steps", "a whole number from 1", (Integral,)),
    "audit": ("is not a number of parts", "a whole number from 1", (Integral,)),
    "seeds": ("is not a number of pairs", "a whole number from 1", (Integral,)),
    "until": ("is not a width", "a number", (Real,)),
    "budget": ("is not a number of steps", "a whole number from 1", (Integral,)),
    "tolerance": ("is not a share", "a number from 0 to 1", (Real,)),
}
_SEVERAL: Mapping[str, tuple[str, str, tuple[type, ...]]] = {
    "where": ("is not a condition", "a string, or a list of strings: 'state=finished'", (str,)),
    "metrics": ("is not a metric", "a name, or a list of names: 'valid/loss'", (str,)),
    "to": ("is not a format", "a name, or a list of names: 'onnx'", (str,)),
    "packages": ("is not a package", "a name, or a list of names: 'mylab'", (str,)),
    "config_dirs": ("is not a folder", "a string or a path, or a list of them", PATH),
}
"""Allowed arguments: how messages describe them, what is expected, and their types; one of them,
and one or a list."""
_COMMANDS = re.compile(r"(`[^`]*`)")


def for_python(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function to refuse arguments of wrong types.

    Its errors name arguments (`run_root=`) where those of a command name options (`--run-root`).
    """
    signature = inspect.signature(function)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

    @wraps(function)
    def call(*args: _P.args, **keywords: _P.kwargs) -> _R:
        try:
            _require_known(function.__name__, signature, keywords)
            _require_types(
                function.__name__, signature.bind_partial(*args, **keywords).arguments, defaults
            )
            return function(*args, **keywords)
        except SamewiseError as error:
            error.problems = tuple(
                replace(
                    parameter,
                    path=_NAMED.get(
                        parameter.path,
                        parameter.path[2:].replace("-", "_")
                        if parameter.path.startswith("--")
                        else parameter.path,
                    ),
                    **{
                        name: _in_python_terms(getattr(parameter, name))
                        for name in ("message", "expected", "hint")
                    },
                )
                for parameter in error.problems
            )
            # The text that Python shows was made when the error was created
            error.args = ("\n".join(map(str, error.problems)),)
            raise

    return call


def _require_known(
    function: str, signature: inspect.Signature, keywords: Mapping[str, Any]
) -> None:
    """Raise a ConfigError for an argument that the function lacks; often it is an override."""
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    names = [name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_POSITIONAL]
    takes_overrides = not {"overrides", "experiment"}.isdisjoint(set(kinds) - set(names))
    problems = list[Problem]()
    for name, value in (
        keywords.items() if inspect.Parameter.VAR_KEYWORD not in kinds.values() else ()
    ):
        if name not in names:
            text = (
                "overrides are strings: "
                f"samewise.{function}({'run, ' if 'run' in kinds else ''}'{name}={value}')"
            )
            hint = did_you_mean(name, names) or (text if takes_overrides else nearest(name, names))
            problems.append(
                Problem(name, f"samewise.{function} has no such argument", value, hint=hint)
            )
    ConfigError.raise_all(problems)


def _require_types(
    function: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    """Raise a ConfigError for arguments of the wrong types."""
    problems = list[Problem]()
    for name, value in arguments.items():
        if name == "overrides" and (wrong := [x for x in value if not isinstance(x, str)]):
            run = "run, " if "run" in arguments else ""
            hint = (
                f"{run}*overrides"
                if isinstance(wrong[0], list | tuple)
                else f"{run}'device=cpu'"
                if run
                else "'experiment=NAME', 'optimizer.lr=0.05'"
            )
            problems.append(
                Problem(
                    name,
                    "are strings, each an argument of its own",
                    wrong[0],
                    hint=f"samewise.{function}({hint})",
                )
            )
        if name not in (*_TAKES, *_SEVERAL) or (value is None and defaults[name] is None):
            continue
        message, expected, kinds = _TAKES.get(name) or _SEVERAL[name]
        each = (
            value
            if name in _SEVERAL and isinstance(value, Sequence) and not isinstance(value, str)
            else [value]
        )
        problems += [
            Problem(name, message, x, expected)
            for x in each
            # True is an int in Python, but not a number of steps
            if not isinstance(x, kinds) or (bool not in kinds and isinstance(x, bool))
        ]
    ConfigError.raise_all(problems)


def _in_python_terms(text: str) -> str:
    """Rephrase a message in Python's terms; names of commands stay as they are."""
    parts = _COMMANDS.split(text)
    # Every other part is a command in backquotes, which keeps its options
    for place in range(0, len(parts), 2):
        for option, argument in _VALUED.items():
            parts[place] = re.sub(
                rf"--{option}[ =]([\w./-]*\w)",
                lambda match, argument=argument: argument % match[1],
                parts[place],
            )
            parts[place] = re.sub(rf"--{option}\b", argument.partition("=")[0], parts[place])
        for option, argument in _SWITCHES.items():
            parts[place] = re.sub(rf"--{option}\b", argument, parts[place])
    return "".join(parts)


def all_files(files: Sequence[Any]) -> list[Path]:
    """Collect all files passed to `predict`, including those in lists."""
    each = [
        path for group in files for path in (group if isinstance(group, list | tuple) else [group])
    ]
    ConfigError.raise_if(
        not each,
        "FILE",
        "no files to predict from were given",
        expected="images, videos, audio files or tables",
    )
    for path in each:
        ConfigError.raise_if(
            not isinstance(path, PATH),
            "files",
            "is not the name of a file",
            # A container by type and shape
            f"{type(path).__name__} {list(path.shape)}" if hasattr(path, "shape") else path,
            "strings or paths, or lists of them",
            "`model, transforms, config = samewise.load(run)` gives what takes samples: "
            "transforms(sample)",
        )
    return [Path(path) for path in each]


def several(values: Sequence[_T] | _T) -> Sequence[_T]:
    """Return a list of the strings or paths; a single one becomes a list of one."""
    return (values,) if isinstance(values, str | Path) else values  # pyright: ignore[reportReturnType]
