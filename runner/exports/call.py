"""Turn a model into a function of tensors, with inputs and outputs as its recipe uses them."""

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


class _FirstCall(BaseException):
    """Stops a recipe after the model's first call; recipes do not catch it."""


Transform = Callable[[Batch], Batch]


class ModelInput(NamedTuple):
    """Entry of a batch as a model gets it.

    Args:
        name: The entry's name.
        channel: Axis at which a dimension of 1 is inserted, as a channel; None for the entry
            itself.
    """

    name: str
    channel: int | None = None

    @staticmethod
    def of(batch: Batch, tensor: Tensor) -> ModelInput | None:
        """Return the entry that a tensor is, or is a view of; None if there is none."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        exact = (ModelInput(name) for name, value in tensors.items() if value is tensor)
        views = (
            ModelInput(name, axis)
            for name, value in tensors.items()
            for axis in range(tensor.dim())
            if _is_view(value, tensor, axis)
        )
        return next(exact, None) or next(views, None)

    def read(self, batch: Batch) -> Tensor:
        return (
            batch[self.name] if self.channel is None else batch[self.name].unsqueeze(self.channel)
        )


def _is_view(value: Tensor, tensor: Tensor, axis: int) -> bool:
    # A recipe may insert a dimension, such as a channel, into an entry
    if value.data_ptr() != tensor.data_ptr() or value.dim() + 1 != tensor.dim():
        return False
    view = value.unsqueeze(axis)
    return view.shape == tensor.shape and view.stride() == tensor.stride()


@dataclass(frozen=True)
class Before:
    """Transforms before the model: from the entries of a loaded batch to the model's inputs.

    Args:
        transform: The batch transforms of evaluation.
        takes: Names of the entries that the transforms need.
        gives: Entries that the model is called with, in the order of the call.
    """

    transform: Transform
    takes: tuple[str, ...]
    gives: tuple[ModelInput, ...]


class Function(nn.Module):
    """The model in eval mode as a function of tensors.

    Its own call, or the recipe's (`Form.call`), may take and return lists and dicts.
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
        part: Name of the called module; "" for the model itself. A GAN's recipe calls `generator`.
        function: The called function.
        inputs: Inputs by name, as `forward` names its arguments: `x`, `images.0`.
        outputs: Outputs by name: `output`, or by their place in the returned value:
            `output.0.boxes`.
        whole: Whether the function includes the batch transforms of evaluation.
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
    """Observe how a recipe calls its model on a batch: to predict, otherwise to measure.

    A recipe that calls only a part of the model has that part observed. The outputs are the model's
    own, without autocast.

    Args:
        recipe: Recipe that predicts from the batch, or measures the model on it.
        model: The model in eval mode.
        loaded: A batch of an evaluation, before its transforms.
        transform: The batch transforms.
        module: Name of a module within the model to observe instead of it.
        whole: Include the transforms, if the model's inputs are entries of the batch that they
            return.

    Raises:
        ConfigError: The recipe calls neither the model nor a part of it with a tensor, or the named
            module does not exist.
    """
    batch = transform(loaded)
    parts = dict(model.named_modules())
    ConfigError.raise_if(
        module is not None and module not in parts,
        "--module",
        "the model has no such module",
        module,
        ", ".join(dict(model.named_children())),
        nearest(module or "", parts),
    )
    modules = {module: parts[module]} if module is not None else {"": model}
    attempts: list[tuple[Callable[[nn.Module, Batch], object], dict[str, nn.Module]]] = [
        (recipe.predict, modules),
        (recipe.measure, modules),
    ]
    if module is None:
        # A recipe may call a part alone: a GAN's first calls its generator
        attempts.append((recipe.measure, dict(model.named_children())))
    first_call = next(
        filter(None, (_first_call(use, model, batch, parts) for use, parts in attempts)), None
    )
    # samewise's own recipes call first what is to be exported
    is_own = type(recipe).__module__.startswith("samewise.")
    if first_call and first_call[0] != (module or "") and not is_own:
        _require_only(first_call[0], recipe, model, batch)
    part, args, kwargs, entries = first_call or ("", (), {}, ())
    called = model.get_submodule(part)
    inputs = dict(
        zip(
            _names(called, args, kwargs),
            (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)),
            strict=True,
        )
    )
    ConfigError.raise_if(
        not inputs,
        "--module" if module else "model",
        "is not called with a tensor when the recipe evaluates a batch, so there is "
        "nothing to export",
        module or type(model).__name__,
    )
    with torch.no_grad():
        # The model gets copies, as it may change its inputs in place
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
    model_call = Call(part, Function(called, args, kwargs).eval(), inputs, outputs)
    return _include_transforms(
        model_call, Function(called, args, kwargs, before).eval(), loaded, before
    )


def call_in_form(
    form: Form,
    name: str,
    model: nn.Module,
    loaded: Batch,
    transform: Transform,
    *,
    whole: bool = True,
) -> Call:
    """Call the model in one of its recipe's forms.

    Args:
        form: The form, of the transformed batch.
        name: The form's name; "" if it stands for the model itself.
        model: The model in eval mode.
        loaded: The batch before its transforms.
        transform: The batch transforms.
        whole: Include the transforms, if the form's inputs are entries of the batch that they
            return.

    Raises:
        ConfigError: An output is empty, so nothing could be compared with it.
    """
    inputs = {
        x: tensor.detach().clone(memory_format=torch.contiguous_format)
        for x, tensor in form.inputs.items()
    }
    with torch.no_grad():
        outputs = dict(form.call(model, *(tensor.clone() for tensor in inputs.values())))
    if not all(tensor.numel() for tensor in outputs.values()):
        empty_outputs = ", ".join(x for x, tensor in outputs.items() if not tensor.numel())
        raise ConfigError(
            Problem(
                "model",
                f"finds nothing in the example ({empty_outputs}), so no format could be "
                "compared with it",
                type(model).__name__,
                hint="train it further, or lower its threshold: for a RetinaNet, "
                "model.score_thresh=0.01",
            )
        )
    entries = tuple(ModelInput(x) if x in loaded else None for x in inputs)
    before = _before(loaded, transform, entries) if whole else None
    model_call = Call(
        name, Function(model, (), {}, call=form.call).eval(), inputs, outputs, checks=form.checks
    )
    return _include_transforms(
        model_call, Function(model, (), {}, before, form.call).eval(), loaded, before
    )


def _include_transforms(
    plain: Call, combined: Function, loaded: Batch, before: Before | None
) -> Call:
    """Return the call with the transforms included if that gives the same bits.

    Otherwise as it is.
    """
    if before is None:
        return plain
    inputs = {
        name: loaded[name].detach().clone(memory_format=torch.contiguous_format)
        for name in before.takes
    }
    with torch.no_grad():
        is_same = (
            difference(
                plain.outputs, dict(zip(plain.outputs, combined(*inputs.values()), strict=True))
            )
            is None
        )
    return replace(plain, function=combined, inputs=inputs, whole=True) if is_same else plain


def _before(
    loaded: Batch, transform: Transform, entries: tuple[ModelInput | None, ...]
) -> Before | None:
    """Return the transforms, with the fewest entries from which they compute the model's inputs.

    None if the inputs are not entries of the batch.
    """
    model_inputs = tuple(entry for entry in entries if entry is not None)
    if len(model_inputs) != len(entries):
        return None
    needed = [name for name, value in loaded.items() if isinstance(value, Tensor)]

    def compute_inputs(names: list[str]) -> list[Tensor] | None:
        try:
            batch = transform({name: loaded[name] for name in names})
            return [entry.read(batch) for entry in model_inputs]
        except Exception:
            # The transforms need an entry that is missing
            return None

    with torch.no_grad():
        expected = compute_inputs(needed)
        if expected is None:
            return None
        for name in list(needed):
            remaining = [x for x in needed if x != name]
            inputs = compute_inputs(remaining) if remaining else None
            if inputs is not None and all(
                torch.equal(x, other) for x, other in zip(expected, inputs, strict=True)
            ):
                needed = remaining
    return Before(transform, tuple(needed), model_inputs)


def _first_call(
    use: Callable[[nn.Module, Batch], object],
    model: nn.Module,
    batch: Batch,
    parts: dict[str, nn.Module],
) -> tuple[str, tuple[Any, ...], dict[str, Any], tuple[ModelInput | None, ...]] | None:
    """Return the module that is called first, its arguments, and the batch's entries in them."""
    calls = list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[ModelInput | None, ...]]]()

    def record(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        entries = tuple(ModelInput.of(batch, leaf) for leaf in leaves)
        # Contiguous, as a file gives tensors
        args, kwargs = pytree.tree_map_only(
            Tensor, partial(torch.clone, memory_format=torch.contiguous_format), (args, kwargs)
        )
        calls.append((name, args, kwargs, entries))
        raise _FirstCall

    # A recipe may not predict, or not from a data set's sample
    with ExitStack() as hooks, torch.no_grad(), suppress(_FirstCall, Exception):
        for name, module in parts.items():
            hooks.enter_context(
                module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
            )
        use(model, batch)
    return calls[0] if calls else None


def _require_only(part: str, recipe: Recipe, model: nn.Module, batch: Batch) -> None:
    """Require that the recipe measures by no other part of the model.

    Raises:
        ConfigError: It calls several, such as a student and its teacher.
    """
    called_parts = dict.fromkeys([part])

    def record(name: str, *_: object) -> None:
        called_parts[name] = None

    # A failure changes nothing: the first call is known
    with ExitStack() as hooks, torch.no_grad(), suppress(Exception):
        for name, child in model.named_children():
            hooks.enter_context(child.register_forward_pre_hook(partial(record, name)))
        recipe.measure(model, batch)
    ConfigError.raise_if(
        len(called_parts) > 1,
        "--module",
        "must say which part of the model to export: the recipe calls several when it "
        "evaluates a batch",
        hint=f"name {' or '.join(called_parts)}, or give the recipe a `predict` that calls "
        "the model",
    )


def _names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the tensors in a call's arguments."""
    parameters = [
        x.name
        for x in inspect.signature(model.forward).parameters.values()
        if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
    ]
    for place, value in enumerate(args):
        # Arguments beyond the named parameters are those of *args
        prefix = parameters[place] if place < len(parameters) else f"input{place}"
        yield from (
            _dotted_name(prefix, path)
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
