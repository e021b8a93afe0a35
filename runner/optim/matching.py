"""Matches a config's patterns to parameters, in the same way for `param_groups` and `initialise`.

A pattern is one of

    norm, bias, embedding, linear, convolution, recurrent    a kind: KINDS says which modules; `bias` goes by the parameter's name
    head                                                      the layer that has the model's last parameter
    type:Conv2d, type:torch.nn.Conv2d                         the module's class, or a class it derives from
    layer4.*                                                  the parameter's whole name, with *, ? and [...]
    re:^layer[34]                                             a regular expression that is found in the name
"""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any, Final, cast, final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.processes.this_process import on_signals

_LONGEST_S = 2.0
"""Of computing, for one pattern and all names: thousands of names take milliseconds."""

KINDS: Final[Mapping[str, tuple[type[nn.Module], ...]]] = {
    # batch and instance norms of all dimensions, and SyncBatchNorm, are _NormBase: the set of torchvision's set_weight_decay, and RMSNorm
    "norm": (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "linear": (nn.Linear, nn.Bilinear),
    "convolution": (_ConvNd,),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
}


@final
@dataclass(frozen=True)
class Named:
    """A parameter (or a buffer, see `frozen`) with its first name in the model's order, and the module that contains it."""

    name: str
    parameter: Tensor
    module: nn.Module

    @property
    def is_bias(self) -> bool:
        """Whether it is named as a bias (`bias`, `bias_hh_l0`, `in_proj_bias`), parametrised or not."""
        name = f".{self.name}".partition(".parametrizations.")[2].partition(".")[0] or self.name.rpartition(".")[2]
        return name == "bias" or name.startswith("bias_") or name.endswith("_bias")


def named_parameters(model: nn.Module, prefixes: Sequence[str] = ()) -> list[Named]:
    """The parameters in the model's order, shared ones once, only those below `prefixes` (none: all)."""
    modules = dict(model.named_modules())
    every = [Named(name, parameter, holder(modules, name)) for name, parameter in model.named_parameters()]
    return [one for one in every if not prefixes or any(one.name == prefix or one.name.startswith(f"{prefix}.") for prefix in prefixes)]


def matching(pattern: Any, parameters: Sequence[Named], *, path: str) -> list[Named]:
    """The parameters that match `pattern`, or any of several, in order; ConfigError, at `path`, if a pattern is malformed or means no parameter at all."""
    patterns = [pattern] if isinstance(pattern, str) else list(cast("Sequence[Any]", pattern)) if isinstance(pattern, Sequence) else []
    if not patterns or not all(isinstance(one, str) and one for one in patterns):
        raise ConfigError(Problem(path, "is not a pattern", pattern, "a kind, head, type:CLASS, re:EXPRESSION or a parameter name with *, or a list of them"))
    with _limit_time(path, pattern):
        predicates = [_predicate(one, path, parameters) for one in patterns]
        found = [one for one in parameters if any(holds(one) for holds in predicates)]
    if not found:
        raise ConfigError(Problem(path, "matches no parameter of the model", pattern, hint=_hint(patterns, parameters)))
    return found


@contextmanager
def _limit_time(path: str, pattern: Any) -> Generator[None]:
    """Limit matching to some seconds of CPU time: nested repetitions in a regular expression can take years. Not in other threads."""

    def stop(number: int, frame: FrameType | None) -> None:
        words = f"takes too long to match: after {_LONGEST_S:.0f} s of CPU time, some parameter names have not been tried"
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
    """The module that a parameter belongs to; for a parametrised one, the module whose weight it computes."""
    outside, parametrised, _ = f".{name}".partition(".parametrizations.")
    return modules[outside[1:] if parametrised else name.rpartition(".")[0]]


def _predicate(pattern: str, path: str, parameters: Sequence[Named]) -> Callable[[Named], bool]:
    if pattern == "bias":
        return lambda one: one.is_bias
    if pattern == "head":
        last = next((one.module for one in reversed(parameters) if isinstance(one.parameter, nn.Parameter)), None)
        return lambda one: one.module is last
    if pattern in KINDS:
        return lambda one: isinstance(one.module, KINDS[pattern])
    if pattern.startswith("type:"):
        wanted = pattern.removeprefix("type:").strip()
        return lambda one: any(_is_called(base, wanted) for base in type(one.module).__mro__)
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(Problem(path, f"is not a valid regular expression: {error}", pattern)) from None
        return lambda one: expression.search(one.name) is not None
    return lambda one: fnmatchcase(one.name, pattern)


def _is_called(kind: type, wanted: str) -> bool:
    """Whether `wanted` names the class, alone or through any module that exports it; the model exists, so its modules are imported."""
    module, _, name = wanted.rpartition(".")
    return kind.__name__ == name and (not module or getattr(sys.modules.get(module), name, None) is kind)


def _hint(patterns: Sequence[str], parameters: Sequence[Named]) -> str:
    pattern = patterns[0]
    names = [one.name for one in parameters]
    if pattern.startswith("type:"):
        return nearest(pattern, {f"type:{type(one.module).__name__}" for one in parameters})
    if pattern == "bias" or pattern in KINDS:
        return "the model has none: set this rule to null, such as param_groups.norms=null"
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"did you mean '{pattern}.*'?"
    folders = {f"{name[:place]}.*" for name in names for place in range(len(name)) if name[place] == "."}
    return nearest(pattern, folders | set(KINDS) if pattern.endswith("*") else {*names, *KINDS, "bias", "head"})
