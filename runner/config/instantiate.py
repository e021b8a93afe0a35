"""The only place where a `_target_` becomes an object, behind the allow-list: a config from a stranger cannot run a command.

What a `_target_` may name: a public class, function or classmethod that is *defined in* an allowed package, reached through nothing but
modules of allowed packages. So `torch.os.system`, `torch.load` and `torchvision.datasets.utils.download_url` are refused, as is
`samewise.runner.records.files.write_atomically`: of samewise itself only what is meant to be a component is allowed.
"""

from __future__ import annotations

import errno
import functools
import importlib
import importlib.util
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from omegaconf import DictConfig, ListConfig

from samewise.runner.config.tree import plain
from samewise.runner.errors import ConfigError, Problem, SamewiseError, ends_process, nearest

ALLOWED = (
    "torch.nn",
    "torch.optim",
    "torchvision.models",
    "torchvision.transforms",
    "torchvision.datasets",
    "torchvision.ops",
    "torchaudio.models",
    "torchaudio.transforms",
    "torchaudio.datasets",
    "torchaudio.functional",
    "torchmetrics",
    "samewise.recipes",
    "samewise.datasets",
    "samewise.runner.callbacks",
    "samewise.runner.data",
    "samewise.runner.launchers",
    "samewise.runner.optim",
    "samewise.runner.precision",
    "samewise.runner.strategies",
    "samewise.runner.sweepers",
)
"""Packages that every config may name."""

CLASSES_ONLY = ("torchvision.datasets", "torchaudio.datasets", "samewise.datasets")
"""Here functions fetch and unpack files from any address into any folder; components are classes."""

REFUSED = ("torchvision.datasets.utils", "torchaudio.datasets.utils", "torchmetrics.utilities", "torch.nn.parallel")
"""Parts of allowed packages that hold no components."""

LIBRARY_DATA = ("torchvision.datasets", "torchaudio.datasets")
"""Their classes may download from the addresses they know, and from no other."""

SPECIAL = ("_target_", "_partial_", "_args_")


def instantiate(node: Any, path: str, /, *, allowed: Sequence[str], **extra: Any) -> Any:
    """Build what a config describes: a mapping with `_target_` becomes an object, anything else stays what it is, with its parts built.

    Args:
        node: A config node or plain value. `_args_` are positional arguments; with `_partial_: true` the result is a `functools.partial`.
        path: The node's path, for messages.
        allowed: Packages that targets may name beside `ALLOWED`: `project.packages`.
        extra: Further arguments of the outermost target; they win over the config's.

    Raises:
        ConfigError: a target is not allowed or does not exist, or its constructor fails; the constructor's own exception is the cause.
    """
    value = plain(node) if isinstance(node, DictConfig | ListConfig) else node
    if isinstance(value, Mapping):
        mapping = cast(Mapping[str, Any], value)
        if "_target_" in mapping:
            return _build(mapping, path, allowed, extra)
        assert not extra, f"{path} has no _target_ to take {sorted(extra)}"
        return {key: instantiate(part, f"{path}.{key}", allowed=allowed) for key, part in mapping.items()}
    assert not extra, f"{path} is not a component, so it cannot take {sorted(extra)}"
    if isinstance(value, list | tuple):
        return [instantiate(part, f"{path}.{index}", allowed=allowed) for index, part in enumerate(cast(Sequence[Any], value))]
    return value


def _build(node: Mapping[str, Any], path: str, allowed: Sequence[str], extra: Mapping[str, Any]) -> Any:
    made = locate(node["_target_"], path, allowed)
    unknown = [key for key in node if key.startswith("_") and key.endswith("_") and key not in SPECIAL]
    if unknown:
        raise ConfigError(Problem(f"{path}.{unknown[0]}", "no such key", node[unknown[0]], hint=nearest(unknown[0], SPECIAL)))
    positional = [instantiate(part, f"{path}._args_.{index}", allowed=allowed) for index, part in enumerate(node.get("_args_") or ())]
    named = {key: instantiate(part, f"{path}.{key}", allowed=allowed) for key, part in node.items() if key not in SPECIAL}
    named |= extra
    _refuse_addresses(made, path, positional, named)
    if node.get("_partial_", False):
        return functools.partial(made, *positional, **named)
    return call(made, path, *positional, **named)


def call(made: Callable[..., Any], path: str, /, *positional: Any, **named: Any) -> Any:
    """Call a constructor (or a partial of one), its failure told as a problem at `path`.

    Raises:
        ConfigError: it failed; errors of samewise itself keep their kind and get `path` before theirs.
    """
    try:
        return made(*positional, **named)
    except SamewiseError as error:
        raise type(error)(*[_under(path, problem) for problem in error.problems]) from error
    except (MemoryError, KeyboardInterrupt):
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise ConfigError(Problem(path, f"{_name(made)} failed: {error}")) from error
    except SystemExit as error:
        message, where = ends_process(_name(made), error)
        raise ConfigError(Problem(path, message, hint=where)) from error
    except Exception as error:
        raise ConfigError(_failure(made, path, error)) from error


def locate(target: Any, path: str, allowed: Sequence[str]) -> Callable[..., Any]:
    """The class or function that `target` names.

    Args:
        target: A dotted name: `torch.optim.SGD`.
        path: The path of the mapping that has it as `_target_`.
        allowed: Packages that it may name beside `ALLOWED`.

    Raises:
        ConfigError: it is not allowed, does not exist, or is not a component.
    """
    where = f"{path}._target_" if path else "_target_"
    allowed = (*ALLOWED, *allowed)
    if not isinstance(target, str) or not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", target, re.ASCII):
        raise ConfigError(Problem(where, "is not the public name of a class or function", target, "a dotted name, such as torch.optim.SGD"))
    if not _within(target, allowed):
        raise ConfigError(_refusal(where, target, "is outside the packages that a config may name", allowed))

    found: Any = None
    parts = target.split(".")
    for count, part in enumerate(parts, start=1):
        name = ".".join(parts[:count])
        if count == 1 or (isinstance(found, types.ModuleType) and not hasattr(found, part)):
            found = _import(name, target, where, found)
        else:
            found = _attribute(found, part, target, where)
        if count > 1 and not _reachable(found, allowed):
            raise ConfigError(_refusal(where, target, f"leaves the packages that a config may name, at '{name}'", allowed))
    if not _is_component(found, allowed):
        raise ConfigError(_refusal(where, target, "is not a class or function that a config may name", allowed))
    return found


def _refuse_addresses(made: Callable[..., Any], path: str, positional: Sequence[Any], named: Mapping[str, Any]) -> None:
    if _within(made.__module__, LIBRARY_DATA):
        for key, value in [*enumerate(positional), *named.items()]:
            if isinstance(value, str) and "://" in value:
                raise ConfigError(Problem(f"{path}.{key}", "a config may not choose where to download from", value, "a name that the data set knows"))


def _import(name: str, target: str, where: str, parent: Any) -> types.ModuleType:
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name)
    except (ImportError, ValueError):
        last = name.rpartition(".")[2]
        known = [public for public in dir(parent) if not public.startswith("_")] if parent is not None else ()
        raise ConfigError(
            Problem(where, f"does not exist: no '{last}' in {name.rpartition('.')[0] or 'any package'}", target, hint=nearest(last, known) if known else "")
        ) from None
    try:
        return importlib.import_module(name)
    except SamewiseError:
        raise
    except SystemExit as error:
        message, place = ends_process(name, error)
        raise ConfigError(Problem(where, message, target, hint=place)) from error
    except Exception as error:
        raise ConfigError(Problem(where, f"cannot be imported: {type(error).__name__}: {error}", target)) from error


def _attribute(owner: Any, name: str, target: str, where: str) -> Any:
    if not isinstance(owner, types.ModuleType | type):
        raise ConfigError(Problem(where, f"does not exist: '{name}' is looked up in something that is neither a module nor a class", target))
    try:
        return getattr(owner, name)
    except AttributeError:
        known = [public for public in dir(owner) if not public.startswith("_")]
        raise ConfigError(Problem(where, f"does not exist: no '{name}' in {owner.__name__}", target, hint=nearest(name, known))) from None


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def _reachable(found: Any, allowed: Sequence[str]) -> bool:
    """Modules on the way must be in an allowed package, or lead to one (`torch` on the way to `torch.nn`)."""
    if not isinstance(found, types.ModuleType):
        return True
    name = found.__name__
    return (_within(name, allowed) or any(package.startswith(name + ".") for package in allowed)) and not _within(name, REFUSED)


def _is_component(found: Any, allowed: Sequence[str]) -> bool:
    """A class, a module's own function, or a classmethod; not an instance's method, which would run on whatever a config passes as `self`."""
    if inspect.ismethod(found):
        return isinstance(found.__self__, type) and _is_component(found.__self__, allowed) and _at_home(found.__func__, allowed)
    if isinstance(found, type):
        return _at_home(found, allowed)
    return isinstance(found, types.FunctionType) and "." not in found.__qualname__ and _at_home(found, allowed) and not _within(found.__module__, CLASSES_ONLY)


def _at_home(found: type | Callable[..., Any], allowed: Sequence[str]) -> bool:
    home = str(getattr(found, "__module__", ""))
    return _within(home, allowed) and not _within(home, REFUSED) and not found.__name__.startswith("_")


def _refusal(where: str, target: str, message: str, allowed: Sequence[str]) -> Problem:
    close = nearest(target, allowed) if "." in target else ""
    hint = "your own packages are declared in pyproject.toml ([tool.samewise] packages = [...]) or with --package"
    return Problem(where, message, target, f"a class or function of {', '.join(allowed)}", f"{close} {hint}" if close.startswith("did") else hint)


def _failure(made: Callable[..., Any], path: str, error: Exception) -> Problem:
    """A constructor's exception, with the nearest name where an argument is not known."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown:
        return Problem(f"{path}.{unknown[1]}", f"{_name(made)} has no such argument", hint=nearest(unknown[1], _arguments_near(error)))
    text = " ".join(str(error).split())
    return Problem(path, f"{_name(made)} failed: {text or type(error).__name__}", expected="" if text else "arguments that it accepts")


def _arguments_near(error: Exception) -> Sequence[str]:
    """The parameters of the function that refused an argument, by its name in the message."""
    owner = re.match(r"(\w+)\.__init__\(\)", str(error))
    trace = error.__traceback__
    while owner and trace:
        kind = trace.tb_frame.f_globals.get(owner[1])
        if isinstance(kind, type):
            return [name for name in inspect.signature(kind).parameters if name not in ("self", "args", "kwargs")]
        trace = trace.tb_next
    return ()


def _under(path: str, problem: Problem) -> Problem:
    """The same problem, seen from the config's root. A problem with a file keeps its path."""
    if not problem.path:
        return Problem(path, problem.message, problem.value, problem.expected, problem.hint)
    if problem.path.startswith(path) or "/" in problem.path:
        return problem
    return Problem(f"{path}.{problem.path}", problem.message, problem.value, problem.expected, problem.hint)


def _name(made: Any) -> str:
    inner = made.func if isinstance(made, functools.partial) else made
    return str(getattr(inner, "__qualname__", getattr(inner, "__name__", inner)))
