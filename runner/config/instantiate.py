"""Makes objects of `_target_`s; the only place that does, so that a config cannot run a command.

A `_target_` may name a class or function of the kind that its place takes (`slots`), *defined in*
one of the packages for that place, and reached through nothing but modules of these packages. So
`torch.os.system`, `torch.load` and `torchvision.datasets.utils.download_url` are refused, as is a
launcher among the callbacks.
"""

import errno
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import tarfile
import types
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from omegaconf import DictConfig, ListConfig

from samewise.runner.config.slots import (
    DATASET,
    MAP_STYLE,
    REFUSED,
    describe_kinds,
    kinds_at,
    packages_at,
    place_of,
    return_class,
    takes,
    within,
)
from samewise.runner.config.tree import plain
from samewise.runner.errors import (
    ConfigError,
    DataError,
    Problem,
    SamewiseError,
    describe_exit,
    first_few,
    nearest,
    raised_at,
    requested_memory,
    summarise_error,
)
from samewise.runner.processes.memory import refuse_too_much_memory, require_few
from samewise.runner.processes.torch_settings import unchanged_torch_settings

_INSTEAD = {
    "torch.hub.load": "it downloads a repository and runs its code: have a "
    "function in a package of yours "
    "call it, `def net(...) -> nn.Module:`, "
    "and declare that with --package NAME; weights alone are read by initialise.weights=FILE",
    "torch.load": "weights are read by initialise.weights=FILE",
    "torch.jit.load": "weights are read by initialise.weights=FILE",
}
"""What is meant by names of functions that do more than make a component."""

LIBRARIES = ("torchvision.datasets", "torchaudio.datasets")
"""Their classes may download from the addresses they know, and from no other."""
PACKAGES = (*LIBRARIES, "samewise.datasets")

_WITH_SCHEME = re.compile(r"<?[^/:]+:")
"""`file:/etc/passwd`, `data:;base64,...`, `URL:...`: what urllib opens without a `//`."""

# They extract downloads without a filter of their own. Python 3.11.0 to 3.11.3 have none.
if hasattr(tarfile, "data_filter"):
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)

SPECIAL = ("_target_", "_partial_", "_args_")


def instantiate(node: Any, path: str, /, *, allowed: Sequence[str]) -> Any:
    """Build what a config describes: a mapping with `_target_` becomes an object.

    Other values stay, and their parts are built.

    ConfigError if a target is not allowed or does not exist, or its constructor fails; the
    constructor's own exception is the cause.

    Args:
        node: A config node or plain value. `_args_` are positional arguments; with `_partial_:
            true` the result is a `functools.partial`.
        path: The node's path, for messages.
        allowed: The user's own packages, which targets may name too: `project.packages`.
    """
    value = plain(node) if isinstance(node, DictConfig | ListConfig) else node
    if isinstance(value, Mapping):
        mapping = cast(Mapping[str, Any], value)
        if "_target_" in mapping:
            return _build(mapping, path, allowed)
        return {
            key: instantiate(part, f"{path}.{key}", allowed=allowed)
            for key, part in mapping.items()
        }
    if isinstance(value, list | tuple):
        return [
            instantiate(part, f"{path}.{index}", allowed=allowed)
            for index, part in enumerate(cast(Sequence[Any], value))
        ]
    return value


def _build(node: Mapping[str, Any], path: str, allowed: Sequence[str]) -> Any:
    component = locate(node["_target_"], path, allowed)
    is_own = within(component.__module__, allowed)
    ConfigError.raise_all(
        Problem(f"{path}.{key}", "no such key", value, hint=nearest(key, SPECIAL))
        for key, value in node.items()
        if key.startswith("_") and key.endswith("_") and key not in SPECIAL
    )
    positional = [
        instantiate(part, f"{path}._args_.{index}", allowed=allowed)
        for index, part in enumerate(node.get("_args_") or ())
    ]
    arguments = {
        key: instantiate(part, f"{path}.{key}", allowed=allowed)
        for key, part in node.items()
        if key not in SPECIAL
    }
    if within(component.__module__, LIBRARIES):
        from PIL import EpsImagePlugin

        # An EPS file, under any name, is a program for Ghostscript; samewise's own data sets do not
        # let Pillow open any
        EpsImagePlugin.gs_binary = False
    if within(component.__module__, PACKAGES):
        component = functools.partial(make_harmless, component, path)
    if node.get("_partial_", False):
        return functools.partial(component, *positional, **arguments)
    if is_own:  # the user's own code may allow more
        return call(component, path, *positional, **arguments)
    try:
        # Otherwise a size with a zero too many makes the kernel kill the process
        with refuse_too_much_memory():
            return call(component, path, *positional, **arguments)
    except MemoryError as error:
        raise ConfigError(_failure(component, path, error, arguments)) from error


def call(component: Callable[..., Any], path: str, /, *positional: Any, **named: Any) -> Any:
    """Call a constructor (or a partial).

    Its failure becomes a ConfigError at `path`. Errors of samewise keep their kind and get `path`
    before theirs.
    """
    try:
        return component(*positional, **named)
    except SamewiseError as error:
        # A DataError is about a file, which may not exist
        is_file = isinstance(error, DataError)
        raise type(error)(
            *[_prefix_path(path, problem, is_file=is_file) for problem in error.problems]
        ) from error
    except (MemoryError, KeyboardInterrupt):
        raise
    except OSError as error:
        # A full disk is not the component's fault
        if error.errno == errno.ENOSPC:
            raise
        raise ConfigError(Problem(path, f"{_name(component)} failed: {error}")) from error
    except SystemExit as error:
        # A constructor that exits would end the training without a message
        message, where = describe_exit(_name(component), error)
        raise ConfigError(Problem(path, message, hint=where)) from error
    except Exception as error:
        raise ConfigError(_failure(component, path, error, named)) from error


def locate(target: Any, path: str, allowed: Sequence[str]) -> Callable[..., Any]:
    """The class or function that `target` names.

    ConfigError if it is not allowed, does not exist, or is not a component.

    Args:
        target: A dotted name: `torch.optim.SGD`.
        path: The path of the mapping that has it as `_target_`.
        allowed: The user's own packages, which it may name too.
    """
    where = f"{path}._target_" if path else "_target_"
    own, allowed = tuple(allowed), (*packages_at(path), *allowed)
    ConfigError.raise_if(
        not isinstance(target, str)
        or not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", target, re.ASCII),
        where,
        "is not the public name of a class or function",
        target,
        "a dotted name, such as torch.optim.SGD",
    )
    if not within(target, allowed):
        raise ConfigError(
            _refusal(
                where,
                target,
                f"is outside the packages that a config may name for {describe_kinds(path)}",
                allowed,
                own,
            )
        )

    target_object: Any = None
    parts = target.split(".")
    for count, part in enumerate(parts, start=1):
        name = ".".join(parts[:count])
        target_object = (
            _import(name, target, where, target_object)
            if count == 1
            or (isinstance(target_object, types.ModuleType) and not hasattr(target_object, part))
            else _attribute(target_object, part, target, where)
        )
        # `torch.os.system` begins in an allowed package and leaves it
        if count > 1 and not _reachable(target_object, allowed):
            raise ConfigError(
                _refusal(
                    where,
                    target,
                    f"leaves the packages that a config may name, at '{name}'",
                    allowed,
                    own,
                )
            )
    if not takes(path, target_object, own):
        raise ConfigError(_wrong_kind(where, target, target_object, path, own))
    return target_object


def _import(name: str, target: str, where: str, parent: Any) -> types.ModuleType:
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name)
    except (ImportError, ValueError):
        last = name.rpartition(".")[2]
        names = (
            [public for public in dir(parent) if not public.startswith("_")]
            if parent is not None
            else ()
        )
        fault = f"does not exist: no '{last}' in {name.rpartition('.')[0] or 'any package'}"
        hint = nearest(last, names) if names else ""
        if name == "timm":  # for an optimizer of timm, the only package that may be missing
            fault, hint = "needs timm", "pip install '.[timm]' in samewise's folder"
        raise ConfigError(Problem(where, fault, target, hint=hint)) from None
    try:
        # Imported before: no code of the module runs now
        if name in sys.modules:
            return importlib.import_module(name)
        with unchanged_torch_settings() as changed:
            module = importlib.import_module(name)
        # Every rank imports the module, and one warning is enough
        if changed and os.environ.get("RANK", "0") == "0":
            fault = (
                f"importing {name} changes settings of torch ({first_few(changed, 3)}), which "
                "is undone: they belong to the config"
            )
            print(
                "warning: "
                f"{Problem(where, fault, hint='choose a dtype or device where tensors and layers are made')}",
                file=sys.stderr,
            )
        return module
    except SamewiseError:
        raise
    except SystemExit as error:
        message, place = describe_exit(name, error)
        raise ConfigError(Problem(where, message, target, hint=place)) from error
    except Exception as error:
        raise ConfigError(
            Problem(where, f"cannot be imported: {type(error).__name__}: {error}", target)
        ) from error


def _attribute(owner: Any, name: str, target: str, where: str) -> Any:
    ConfigError.raise_if(
        not isinstance(owner, types.ModuleType | type),
        where,
        f"does not exist: '{name}' can only be in a module or a class",
        target,
    )
    try:
        return getattr(owner, name)
    except AttributeError:
        raise ConfigError(
            Problem(
                where,
                f"does not exist: no '{name}' in {owner.__name__}",
                target,
                hint=nearest(
                    name,
                    [
                        attribute
                        for attribute in dir(owner)
                        if not attribute.startswith("_")
                        and not _refused_prefix(
                            getattr(getattr(owner, attribute, None), "__module__", None)
                        )
                    ],
                ),
            )
        ) from None


def _reachable(located: Any, allowed: Sequence[str]) -> bool:
    """Modules on the way must be in an allowed package, or lead to one (`torch` to `torch.nn`)."""
    if not isinstance(located, types.ModuleType):
        return True
    name = located.__name__
    return (
        within(name, allowed) or any(package.startswith(name + ".") for package in allowed)
    ) and not within(name, tuple(REFUSED))


def _wrong_kind(where: str, target: str, located: Any, path: str, own: Sequence[str]) -> Problem:
    if refused := _refused_prefix(getattr(located, "__module__", None)):
        return Problem(
            where, f"is in {refused}, which a config may not name: it {REFUSED[refused]}", target
        )
    product = (
        located
        if isinstance(located, type)
        else return_class(located)
        if isinstance(located, types.FunctionType)
        else None
    )
    expected, hint = (
        describe_kinds(path),
        MAP_STYLE
        if product and DATASET in kinds_at(path) and not DATASET.includes(product)
        else "",
    )
    if (
        isinstance(located, types.FunctionType)
        and within(located.__module__, own)
        and return_class(located) is None
    ):
        annotation = located.__annotations__.get("return")
        hint = (
            "annotate what it returns, so that its kind is known before it is called: `def "
            f"{located.__name__}(...) -> CLASS:`"
            if annotation is None
            else f"`-> {getattr(annotation, '__name__', annotation)}` does not say that it always "
            "returns one: annotate it with one class"
        )
    return Problem(
        where,
        f"is not {expected}",
        target,
        f"a class that is {expected}, or a function annotated to return one",
        hint,
    )


def _refusal(
    where: str, target: str, message: str, allowed: Sequence[str], own: Sequence[str]
) -> Problem:
    expected = f"a class or function of {', '.join(allowed)}"
    if refused := _refused_prefix(target):
        return Problem(
            where,
            f"is in {refused}, which a config may not name: it {REFUSED[refused]}",
            target,
            expected,
        )
    if elsewhere := place_of(target):
        kind, place = elsewhere
        return Problem(
            where,
            message,
            target,
            expected,
            f"it is {kind.description}, which belongs in `{place}`",
        )
    if where.startswith("scheduler") and target.startswith("torch.optim.lr_scheduler."):
        return Problem(
            where,
            message,
            target,
            expected,
            f"scheduler=torch scheduler.scheduler._target_={target}, and its settings "
            "below scheduler.scheduler",
        )
    if target in _INSTEAD:
        return Problem(where, message, target, expected, _INSTEAD[target])
    parts = target.split(".")
    heads = {package: ".".join(parts[: package.count(".") + 1]) for package in allowed}
    near = {
        f"{package}.{'.'.join(parts[package.count('.') + 1 :])}": head
        for package, head in heads.items()
        if get_close_matches(head, [package], cutoff=0.8)
    }
    if suggestion := get_close_matches(
        target, [name for name in near if not name.endswith(".") and name != target], n=1
    ):
        return Problem(where, message, target, expected, f"did you mean '{suggestion[0]}'?")
    own_function = parts[0] in ("torch", "torchvision", "torchaudio", "torchmetrics", "samewise")
    return Problem(
        where,
        message,
        target,
        expected,
        "write a function in a package of yours that calls it, annotated with the class that it "
        "returns, and declare that with --package NAME"
        if own_function
        else f"if you trust its code as your own: --package {parts[0]}, or packages = "
        f'["{parts[0]}"] under [tool.samewise] in pyproject.toml',
    )


def _refused_prefix(name: Any) -> str:
    """The part of the libraries that contains a dotted name and that configs may not name.

    Empty if there is none.
    """
    return next(
        (prefix for prefix in REFUSED if isinstance(name, str) and within(name, [prefix])), ""
    )


def _failure(
    component: Callable[..., Any], path: str, error: Exception, arguments: Mapping[str, Any]
) -> Problem:
    """The problem for a constructor's exception, with the nearest name for an unknown argument."""
    text, where = (
        summarise_error(error) if str(error).strip() else "",
        raised_at(error, anywhere=False),
    )
    if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
        # A line of the user's code may have given the argument, not the config
        if where:
            return Problem(path, f"{_name(component)} failed: {text}", hint=where)
        return Problem(f"{path}.{unknown[1]}", f"{_name(component)} has no such argument")
    if memory := requested_memory(error):
        sizes = {
            key: value
            for key, value in arguments.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        largest = max(sizes, key=lambda key: abs(sizes[key]), default="")
        return Problem(
            f"{path}.{largest}" if largest else path,
            f"{_name(component)} {memory}",
            sizes.get(largest, ...),
            hint="make it smaller",
        )
    return Problem(
        path,
        f"{_name(component)} failed: {text or type(error).__name__}",
        expected="" if text else "arguments that it accepts",
        hint=where,
    )


def _prefix_path(path: str, problem: Problem, *, is_file: bool) -> Problem:
    """The same problem with its path from the config's root.

    A problem with a file keeps its path.
    """
    root = path.partition(".")[0]
    if problem.path in ("", root):
        return Problem(path, problem.message, problem.value, problem.expected, problem.hint)
    if (
        is_file
        or problem.path.startswith((path, f"{root}."))
        or "/" in problem.path
        or os.path.exists(problem.path.partition(":")[0])
    ):
        return problem
    return Problem(
        f"{path}.{problem.path}", problem.message, problem.value, problem.expected, problem.hint
    )


def _name(component: Any) -> str:
    inner = (
        (component.args[0] if component.func is make_harmless else component.func)
        if isinstance(component, functools.partial)
        else component
    )
    return str(getattr(inner, "__qualname__", getattr(inner, "__name__", inner)))


def make_harmless(
    component: Callable[..., Any], path: str, /, *positional: Any, **keywords: Any
) -> Any:
    """Create a data set.

    ConfigError if it has an address to download from, or asks for thousands of processes.
    """
    try:
        # By name, since an address may be given by its position
        arguments = inspect.signature(component).bind_partial(*positional, **keywords).arguments
    except TypeError:  # creating it will report this more clearly
        arguments = keywords
    for key, value in arguments.items():
        if isinstance(value, int) and key.endswith("workers"):
            require_few(f"{path}.{key}", value)
        is_address = isinstance(value, str) and (
            "://" in value or _WITH_SCHEME.match(value.strip())
        )
        ConfigError.raise_if(
            is_address and str(component.__module__).startswith(LIBRARIES),
            f"{path}.{key}",
            "a config may not choose where to download from",
            value,
            "a name that the data set knows",
        )
    return component(*positional, **keywords)
