"""Matches a config's patterns to parameters, in the same way for `param_groups` and `initialise`.

A parameter that several layers share (tied weights) matches under each of its names, and as a part
of each of these layers.

A pattern is one of

    norm, bias, embedding, linear, convolution, recurrent    a kind: KINDS says which modules;
    `bias` goes by the parameter's name head
    the layer that has the model's last parameter, which others may share type:Conv2d,
    type:torch.nn.Conv2d                         the module's class, or a class it derives from
    layer4.*                                                  the parameter's whole name, with *, ?
    and [...] re:^layer[34]                                             a regular expression that is
    found in the name
"""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any, Final, cast, final

from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.processes.this_process import on_signals
from samewise.runner.torch_private import ConvNd, NormBase

_LONGEST_S = 2.0
"""Of computing, for one pattern and all names: thousands of names take milliseconds."""

KINDS: Final[Mapping[str, tuple[type[nn.Module], ...]]] = {
    # batch and instance norms of all dimensions, and SyncBatchNorm, are NormBase: the set of
    # torchvision's set_weight_decay, and RMSNorm
    "norm": (NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "linear": (nn.Linear, nn.Bilinear),
    "convolution": (ConvNd,),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
}


@final
@dataclass(frozen=True)
class Named:
    """A parameter (or a buffer, see `frozen`) with its first name in the model's order, and the
    module that contains it.
    """

    name: str
    parameter: Tensor
    module: nn.Module
    others: tuple[tuple[str, nn.Module], ...] = ()
    """Its further names and the modules there, if it is shared, in the model's order."""
    last: int = -1
    """The place of its last name among all of the model's."""

    @property
    def names(self) -> list[str]:
        """All of its names."""
        return [self.name, *(name for name, _ in self.others)]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that contain it, by name."""
        return [self.module, *(module for _, module in self.others)]

    @property
    def is_bias(self) -> bool:
        """Whether its first name is that of a bias."""
        return _is_bias(self.name)

    def is_below(self, prefixes: Sequence[str]) -> bool:
        """Whether one of its names is, or lies below, one of these."""
        return any(
            name == prefix or name.startswith(f"{prefix}.")
            for name in self.names
            for prefix in prefixes
        )


def _is_bias(name: str) -> bool:
    """Whether a parameter is named as a bias (`bias`, `bias_hh_l0`, `in_proj_bias`), parametrised
    or not.
    """
    name = (
        f".{name}".partition(".parametrizations.")[2].partition(".")[0] or name.rpartition(".")[2]
    )
    return name == "bias" or name.startswith("bias_") or name.endswith("_bias")


def named_parameters(model: nn.Module, prefixes: Sequence[str] = ()) -> list[Named]:
    """The parameters in the model's order, shared ones once, only those below `prefixes` (none:
    all).
    """
    modules, found = dict(model.named_modules(remove_duplicate=False)), dict[int, Named]()
    for number, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        before, module = found.get(id(parameter)), holder(modules, name)
        if before is None:
            found[id(parameter)] = Named(name, parameter, module, last=number)
        else:
            found[id(parameter)] = replace(
                before, others=(*before.others, (name, module)), last=number
            )
    return [one for one in found.values() if not prefixes or one.is_below(prefixes)]


def matching(pattern: Any, parameters: Sequence[Named], *, path: str) -> list[Named]:
    """The parameters that match `pattern`, or any of several, in order.

    ConfigError, at `path`, if a pattern is malformed or matches none. In a list, a kind or a
    regular expression, which suit several models, may match none.
    """
    patterns = (
        [pattern]
        if isinstance(pattern, str)
        else list(cast("Sequence[Any]", pattern))
        if isinstance(pattern, Sequence)
        else []
    )
    if not patterns or not all(isinstance(one, str) and one for one in patterns):
        raise ConfigError(
            Problem(
                path,
                "is not a pattern",
                pattern,
                "a kind, head, type:CLASS, re:EXPRESSION or a parameter name with *, or a "
                "list of them",
            )
        )
    with _limit_time(path, pattern):
        predicates = {one: _predicate(one, path, parameters) for one in patterns}
        matched = {
            one: {named.name for named in parameters if holds(named)}
            for one, holds in predicates.items()
        }
    found = set[str]().union(*matched.values())
    amiss = (
        [
            one
            for one in matched
            if not matched[one] and not (one in KINDS or one == "bias" or one.startswith("re:"))
        ]
        if found
        else []
    )
    if amiss or not found:
        wrong = [(one, one) for one in amiss] or [(pattern, patterns[0])]
        raise ConfigError(
            *(
                Problem(
                    path, "matches no parameter of the model", value, hint=_hint(one, parameters)
                )
                for value, one in wrong
            )
        )
    return [one for one in parameters if one.name in found]


@contextmanager
def _limit_time(path: str, pattern: Any) -> Generator[None]:
    """Limit matching to some seconds of CPU time: nested repetitions in a regular expression can
    take years. Not in other threads.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        words = (
            f"takes too long to match: after {_LONGEST_S:.0f} s of CPU time, some parameter "
            "names have not been tried"
        )
        raise ConfigError(Problem(path, words, pattern, hint="avoid nested repeats, such as (a+)+"))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with on_signals((signal.SIGVTALRM,), stop):
        signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def holder(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The module that a parameter belongs to.

    For a parametrised one, the module whose weight it computes.
    """
    outside, parametrised, _ = f".{name}".partition(".parametrizations.")
    return modules[outside[1:] if parametrised else name.rpartition(".")[0]]


def _predicate(pattern: str, path: str, parameters: Sequence[Named]) -> Callable[[Named], bool]:
    if pattern == "bias":
        return lambda one: any(map(_is_bias, one.names))
    if pattern == "head":
        last = max(parameters, key=lambda one: one.last).modules[-1] if parameters else None
        return lambda one: any(module is last for module in one.modules)
    if pattern in KINDS:
        return lambda one: any(isinstance(module, KINDS[pattern]) for module in one.modules)
    if pattern.startswith("type:"):
        wanted = pattern.removeprefix("type:").strip()
        return lambda one: any(
            _is_called(base, wanted) for module in one.modules for base in type(module).__mro__
        )
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                Problem(path, f"is not a valid regular expression: {error}", pattern)
            ) from None
        return lambda one: any(expression.search(name) for name in one.names)
    return lambda one: any(fnmatchcase(name, pattern) for name in one.names)


def _is_called(kind: type, wanted: str) -> bool:
    """Whether `wanted` names the class, alone or through any module that exports it.

    The model exists, so its modules are imported.
    """
    module, _, name = wanted.rpartition(".")
    return kind.__name__ == name and (
        not module or getattr(sys.modules.get(module), name, None) is kind
    )


def _hint(pattern: str, parameters: Sequence[Named]) -> str:
    names = [name for one in parameters for name in one.names]
    if pattern.startswith("type:"):
        return nearest(
            pattern,
            {f"type:{type(module).__name__}" for one in parameters for module in one.modules},
        )
    if pattern == "bias" or pattern in KINDS:
        return "the model has none: set this rule to null, such as param_groups.norms=null"
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"did you mean '{pattern}.*'?"
    folders = {
        f"{name[:place]}.*" for name in names for place in range(len(name)) if name[place] == "."
    }
    return nearest(
        pattern, folders | set(KINDS) if pattern.endswith("*") else {*names, *KINDS, "bias", "head"}
    )
