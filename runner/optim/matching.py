"""Matches a config's patterns to parameters, for both `param_groups` and `initialise`.

A parameter that several layers share (tied weights) matches under each of its names, and as a part
of each of these layers.

A pattern is one of

    norm, bias, embedding, linear,     a kind of module, listed in KINDS;
    convolution, recurrent             `bias` goes by the parameter's name
    head                               the layer with the model's last parameter
    type:Conv2d, type:torch.nn.Conv2d  the module's class, or a class it derives from
    layer4.*                           the parameter's whole name, with *, ? and [...]
    re:^layer[34]                      a regular expression, searched for in the name
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final, cast, final

from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.torch_private import ConvNd, NormBase

KINDS: Final[Mapping[str, tuple[type[nn.Module], ...]]] = {
    # The set of torchvision's set_weight_decay, and RMSNorm. NormBase covers batch and instance
    # norms of all dimensions, and SyncBatchNorm.
    "norm": (NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "linear": (nn.Linear, nn.Bilinear),
    "convolution": (ConvNd,),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
}


@final
@dataclass(frozen=True)
class Named:
    """Parameter, or buffer (see `frozen`), with its first name in the model's order."""

    name: str
    tensor: Tensor
    module: nn.Module
    aliases: tuple[tuple[str, nn.Module], ...] = ()
    """Further names and modules of a shared parameter, in the model's order."""
    last_number: int = -1
    """Position of its last name among all names of the model's parameters."""

    @property
    def names(self) -> list[str]:
        """All names of the parameter."""
        return [self.name, *(name for name, _ in self.aliases)]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that contain the parameter, in the order of `names`."""
        return [self.module, *(module for _, module in self.aliases)]

    @property
    def is_bias(self) -> bool:
        """Whether the first name is that of a bias."""
        return _is_bias(self.name)

    def is_below(self, prefixes: Sequence[str]) -> bool:
        """Return whether one of its names is, or lies below, one of the prefixes."""
        return any(
            name == prefix or name.startswith(f"{prefix}.")
            for name in self.names
            for prefix in prefixes
        )


def _is_bias(name: str) -> bool:
    """Return whether a name is a bias's (`bias`, `bias_hh_l0`), parametrised or not."""
    name = (
        f".{name}".partition(".parametrizations.")[2].partition(".")[0] or name.rpartition(".")[2]
    )
    return name == "bias" or name.startswith("bias_") or name.endswith("_bias")


def named_parameters(model: nn.Module, prefixes: Sequence[str] = ()) -> list[Named]:
    """Return the parameters in the model's order, shared ones once.

    With `prefixes`, only those below one of them.
    """
    modules, named_by_id = dict(model.named_modules(remove_duplicate=False)), dict[int, Named]()
    # With duplicates, since a tied parameter matches under each of its names
    for number, (name, parameter) in enumerate(model.named_parameters(remove_duplicate=False)):
        earlier, module = named_by_id.get(id(parameter)), holder(modules, name)
        named_by_id[id(parameter)] = (
            Named(name, parameter, module, last_number=number)
            if earlier is None
            else replace(earlier, aliases=(*earlier.aliases, (name, module)), last_number=number)
        )
    return [x for x in named_by_id.values() if not prefixes or x.is_below(prefixes)]


def matching(pattern: Any, parameters: Sequence[Named], *, path: str) -> list[Named]:
    """Return the parameters that match a pattern, or any pattern of a list, in the model's order.

    Args:
        pattern: Pattern or list of patterns.
        parameters: The model's parameters.
        path: Path of the pattern in the config.

    Raises:
        ConfigError: A pattern is malformed, or matches nothing. In a list, a kind or a regular
            expression may match nothing.
    """
    patterns = (
        [pattern]
        if isinstance(pattern, str)
        else list(cast("Sequence[Any]", pattern))
        if isinstance(pattern, Sequence)
        else []
    )
    ConfigError.raise_if(
        not patterns or not all(isinstance(x, str) and x for x in patterns),
        path,
        "is not a pattern",
        pattern,
        "a kind, head, type:CLASS, re:EXPRESSION or a parameter name with *, or a list of them",
    )
    predicates = {x: _predicate(x, path, parameters) for x in patterns}
    matched = {
        text: {parameter.name for parameter in parameters if is_match(parameter)}
        for text, is_match in predicates.items()
    }
    names = set[str]().union(*matched.values())
    # In a list, kinds and regular expressions may suit several models, so they may match nothing.
    unmatched = [
        text
        for text in matched
        if not matched[text] and not (text in KINDS or text == "bias" or text.startswith("re:"))
    ]
    if not names:
        raise ConfigError(_no_match(path, pattern, patterns[0], parameters))
    ConfigError.raise_all(_no_match(path, x, x, parameters) for x in unmatched)
    return [x for x in parameters if x.name in names]


def _no_match(path: str, value: Any, pattern: str, parameters: Sequence[Named]) -> Problem:
    return Problem(
        path, "matches no parameter of the model", value, hint=_hint(pattern, parameters)
    )


def holder(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return a parameter's module; of a parametrised one, the module whose weight it computes."""
    outside, parametrised, _ = f".{name}".partition(".parametrizations.")
    return modules[outside[1:] if parametrised else name.rpartition(".")[0]]


def _predicate(pattern: str, path: str, parameters: Sequence[Named]) -> Callable[[Named], bool]:
    if pattern == "bias":
        return lambda x: any(map(_is_bias, x.names))
    if pattern == "head":
        last_module = (
            max(parameters, key=lambda x: x.last_number).modules[-1] if parameters else None
        )
        return lambda x: any(module is last_module for module in x.modules)
    if pattern in KINDS:
        return lambda x: any(isinstance(module, KINDS[pattern]) for module in x.modules)
    if pattern.startswith("type:"):
        class_name = pattern.removeprefix("type:").strip()
        return lambda x: any(
            _is_called(base, class_name) for module in x.modules for base in type(module).__mro__
        )
    if pattern.startswith("re:"):
        try:
            expression = re.compile(pattern.removeprefix("re:"))
        # Deep nesting and huge counts of repeats raise the latter two
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                Problem(path, f"is not a valid regular expression: {error}", pattern)
            ) from None
        return lambda x: any(expression.search(name) for name in x.names)
    return lambda x: any(fnmatchcase(name, pattern) for name in x.names)


def _is_called(kind: type, class_name: str) -> bool:
    """Return whether a name denotes the class, alone or through any module that exports it."""
    module, _, name = class_name.rpartition(".")
    # The model exists, so its modules are imported.
    return kind.__name__ == name and (
        not module or getattr(sys.modules.get(module), name, None) is kind
    )


def _hint(pattern: str, parameters: Sequence[Named]) -> str:
    names = [name for x in parameters for name in x.names]
    if pattern.startswith("type:"):
        return nearest(
            pattern,
            {f"type:{type(module).__name__}" for x in parameters for module in x.modules},
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
