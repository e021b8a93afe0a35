"""A model as a function of tensors: its inputs and outputs as its recipe calls it in evaluation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.exports.difference import difference
from samewise.runner.interfaces import Batch, Form, Recipe
from samewise.runner.torch_private import pytree


class _Enough(BaseException):
    """Stops a recipe after the model's first call; recipes do not catch it."""


Transform = Callable[[Batch], Batch]


class ModelInput(NamedTuple):
    """An entry of a batch as a model gets it: as it is, or with a dimension of 1 inserted, as a
    channel.
    """

    name: str
    channel: int | None = None

    @staticmethod
    def of(batch: Batch, tensor: Tensor) -> ModelInput | None:
        """The entry that a tensor is, or is a view of; None if there is none."""
        known = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        same = (ModelInput(name) for name, value in known.items() if value is tensor)
        views = (
            ModelInput(name, place)
            for name, value in known.items()
            for place in range(tensor.dim())
            if _is_view(value, tensor, place)
        )
        return next(same, None) or next(views, None)

    def read(self, batch: Batch) -> Tensor:
        return (
            batch[self.name] if self.channel is None else batch[self.name].unsqueeze(self.channel)
        )


def _is_view(value: Tensor, tensor: Tensor, place: int) -> bool:
    if value.data_ptr() != tensor.data_ptr() or value.dim() + 1 != tensor.dim():
        return False
    view = value.unsqueeze(place)
    return view.shape == tensor.shape and view.stride() == tensor.stride()


@dataclass(frozen=True)
class Before:
    """What comes before the model: from the entries of a loaded batch to the model's inputs.

    Args:
        transform: The batch transforms of evaluation.
        takes: The names of the entries that it needs.
        gives: Those that the model is called with, in the order of the call.
    """

    transform: Transform
    takes: tuple[str, ...]
    gives: tuple[ModelInput, ...]


class Function(nn.Module):
    """The model in eval mode as a function of tensors, whatever lists and dicts its own call (or
    the recipe's, `Form.call`) takes and returns.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Before | None = None,
        call: Callable[..., Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._before = before
        self._call = call
        leaves, self._form = pytree.tree_flatten((args, kwargs))
        self._plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self._before:
            batch = self._before.transform(dict(zip(self._before.takes, tensors, strict=True)))
            tensors = tuple(entry.read(batch) for entry in self._before.gives)
        if self._call:
            return tuple(self._call(self.model, *tensors).values())
        leaves = list(self._plain)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._form)
        return tuple(
            leaf
            for leaf in pytree.tree_leaves(self.model(*args, **kwargs))
            if isinstance(leaf, Tensor)
        )


@dataclass(frozen=True)
class Call:
    """One call of a model: the function with its inputs and outputs.

    Args:
        part: Which of the model's modules is called: empty for the model itself; a GAN's recipe
            calls `generator`.
        function: It.
        inputs: By name, as `forward` names its arguments: `x`, `images.0`.
        outputs: By name: `output`, or by their place in what the model returns: `output.0.boxes`.
        whole: Whether the batch transforms of evaluation are in it.
        checks: As in `Form`.
    """

    part: str
    function: Function
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    whole: bool = False
    checks: Mapping[str, Tensor] = field(default_factory=dict)


def observe(
    recipe: Recipe,
    model: nn.Module,
    loaded: Batch,
    transform: Transform,
    *,
    module: str | None = None,
    whole: bool = True,
) -> Call:
    """How a recipe calls its model on a batch: to predict.

    Otherwise to measure; otherwise the part of the model that it calls to measure.

    The outputs are the model's own, without autocast. ConfigError if the recipe calls neither the
    model nor a part of it with a tensor, or if the named part does not exist.

    Args:
        recipe: Predicts from the batch, or measures the model on it, up to the first call.
        model: In eval mode.
        loaded: A batch of an evaluation, before its transforms.
        transform: Those.
        module: The name of a module within the model, to be taken instead of it.
        whole: Include the transforms, if the model's inputs are entries of the batch that they
            return.
    """
    batch = transform(loaded)
    parts = dict(model.named_modules())
    if module is not None and module not in parts:
        raise ConfigError(
            Problem(
                "--module",
                "the model has no such module",
                module,
                ", ".join(dict(model.named_children())),
                nearest(module, list(parts)),
            )
        )
    wanted = {module: parts[module]} if module is not None else {"": model}
    ways: list[tuple[Callable[[nn.Module, Batch], object], dict[str, nn.Module]]] = [
        (recipe.predict, wanted),
        (recipe.measure, wanted),
    ]
    if module is None:
        ways.append((recipe.measure, dict(model.named_children())))
    found = next(filter(None, (_first_call(use, model, batch, parts) for use, parts in ways)), None)
    if (
        found and found[0] != (module or "") and not type(recipe).__module__.startswith("samewise.")
    ):  # ours call first what is to be exported
        _require_only(found[0], recipe, model, batch)
    part, args, kwargs, entries = found or ("", (), {}, ())
    called = model.get_submodule(part)
    inputs = dict(
        zip(
            _names(called, args, kwargs),
            (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)),
            strict=True,
        )
    )
    if not inputs:
        words = (
            "is not called with a tensor when the recipe evaluates a batch, so there is "
            "nothing to export"
        )
        raise ConfigError(
            Problem("--module" if module else "model", words, module or type(model).__name__)
        )
    with torch.no_grad():
        returned = called(
            *pytree.tree_map_only(Tensor, torch.clone, args),
            **pytree.tree_map_only(Tensor, torch.clone, kwargs),
        )
    outputs = {
        _dotted_name("output", path): leaf
        for path, leaf in pytree.tree_leaves_with_path(returned)
        if isinstance(leaf, Tensor)
    }
    before = _before(loaded, transform, entries) if whole and not part else None
    made = Call(part, Function(called, args, kwargs).eval(), inputs, outputs)
    return _include_transforms(made, Function(called, args, kwargs, before).eval(), loaded, before)


def call_in_form(
    form: Form,
    name: str,
    model: nn.Module,
    loaded: Batch,
    transform: Transform,
    *,
    whole: bool = True,
) -> Call:
    """A call of the model in one of its recipe's forms.

    ConfigError if what comes out has no numbers, so that nothing could be compared with it.

    Args:
        form: It, of the transformed batch.
        name: Its own; empty: it stands for the model itself.
        model: In eval mode.
        loaded: The batch before its transforms.
        transform: Those.
        whole: Include the transforms, if the form's inputs are entries of the batch that they
            return.
    """
    inputs = {
        one: tensor.detach().clone(memory_format=torch.contiguous_format)
        for one, tensor in form.inputs.items()
    }
    with torch.no_grad():
        outputs = dict(form.call(model, *(tensor.clone() for tensor in inputs.values())))
    if not all(tensor.numel() for tensor in outputs.values()):
        empty = ", ".join(one for one, tensor in outputs.items() if not tensor.numel())
        hint = "train it further, or lower its threshold: for a RetinaNet, model.score_thresh=0.01"
        raise ConfigError(
            Problem(
                "model",
                f"finds nothing in the example ({empty}), so no format could be compared with it",
                type(model).__name__,
                hint=hint,
            )
        )
    entries = tuple(ModelInput(one) if one in loaded else None for one in inputs)
    before = _before(loaded, transform, entries) if whole else None
    made = Call(
        name, Function(model, (), {}, call=form.call).eval(), inputs, outputs, checks=form.checks
    )
    return _include_transforms(
        made, Function(model, (), {}, before, form.call).eval(), loaded, before
    )


def _include_transforms(
    bare: Call, together: Function, loaded: Batch, before: Before | None
) -> Call:
    """The call with the transforms included if that gives the same bits; otherwise unchanged."""
    if before is None:
        return bare
    raw = {
        name: loaded[name].detach().clone(memory_format=torch.contiguous_format)
        for name in before.takes
    }
    with torch.no_grad():
        same = (
            difference(bare.outputs, dict(zip(bare.outputs, together(*raw.values()), strict=True)))
            is None
        )
    return replace(bare, function=together, inputs=raw, whole=True) if same else bare


def _before(
    loaded: Batch, transform: Transform, entries: tuple[ModelInput | None, ...]
) -> Before | None:
    """The fewest entries of a batch from which the transforms compute the model's inputs.

    None if the inputs are not entries of the batch.
    """
    gives = tuple(entry for entry in entries if entry is not None)
    if len(gives) != len(entries):
        return None
    takes = [name for name, value in loaded.items() if isinstance(value, Tensor)]

    def made(names: list[str]) -> list[Tensor] | None:
        try:
            batch = transform({name: loaded[name] for name in names})
            return [entry.read(batch) for entry in gives]
        except Exception:  # it needs an entry that it did not get
            return None

    with torch.no_grad():
        expected = made(takes)
        if expected is None:
            return None
        for name in list(takes):
            fewer = [one for one in takes if one != name]
            found = made(fewer) if fewer else None
            if found is not None and all(
                torch.equal(one, other) for one, other in zip(expected, found, strict=True)
            ):
                takes = fewer
    return Before(transform, tuple(takes), gives)


def _first_call(
    use: Callable[[nn.Module, Batch], object],
    model: nn.Module,
    batch: Batch,
    parts: dict[str, nn.Module],
) -> tuple[str, tuple[Any, ...], dict[str, Any], tuple[ModelInput | None, ...]] | None:
    """The name of the module that is called first, its arguments, and which entries of the batch
    those are.
    """
    seen = list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[ModelInput | None, ...]]]()

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        entries = tuple(ModelInput.of(batch, leaf) for leaf in leaves)
        args, kwargs = pytree.tree_map_only(
            Tensor, partial(torch.clone, memory_format=torch.contiguous_format), (args, kwargs)
        )
        seen.append((name, args, kwargs, entries))
        raise _Enough

    with (
        ExitStack() as hooks,
        torch.no_grad(),
        suppress(_Enough, Exception),
    ):  # a recipe may not predict, or not from a data set's sample
        for name, module in parts.items():
            hooks.enter_context(
                module.register_forward_pre_hook(partial(note, name), with_kwargs=True)
            )
        use(model, batch)
    return seen[0] if seen else None


def _require_only(part: str, recipe: Recipe, model: nn.Module, batch: Batch) -> None:
    """Raise a ConfigError if the recipe measures by other parts of the model too: the user has to
    say which is meant, a student or its teacher.
    """
    called = dict.fromkeys([part])

    def note(name: str, *_: object) -> None:
        called[name] = None

    with (
        ExitStack() as hooks,
        torch.no_grad(),
        suppress(Exception),
    ):  # the first call is known anyway
        for name, child in model.named_children():
            hooks.enter_context(child.register_forward_pre_hook(partial(note, name)))
        recipe.measure(model, batch)
    if len(called) > 1:
        words = (
            "must say which part of the model to export: the recipe calls several when it "
            "evaluates a batch"
        )
        raise ConfigError(
            Problem(
                "--module",
                words,
                hint=f"name {' or '.join(called)}, or give the recipe a `predict` that calls "
                "the model",
            )
        )


def _names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    named = [
        one.name
        for one in inspect.signature(model.forward).parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    for place, value in enumerate(args):
        first = named[place] if place < len(named) else f"input{place}"
        yield from (
            _dotted_name(first, path)
            for path, leaf in pytree.tree_leaves_with_path(value)
            if isinstance(leaf, Tensor)
        )
    for name, value in kwargs.items():
        yield from (
            _dotted_name(name, path)
            for path, leaf in pytree.tree_leaves_with_path(value)
            if isinstance(leaf, Tensor)
        )


def _dotted_name(first: str, path: tuple[Any, ...]) -> str:
    return ".".join(
        [
            first,
            *(
                str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))))
                for key in path
            ),
        ]
    )
