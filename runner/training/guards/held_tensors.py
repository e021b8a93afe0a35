"""Requires that steps keep a model's parameters, and the shapes and dtypes of what it saves."""

from collections.abc import Iterable, Mapping
from typing import Any, final

from torch import Tensor, nn

from samewise.runner.errors import ConfigError, Problem, first_few
from samewise.runner.training.run import Caution, Guard, Run


@final
class HeldTensors(Guard):
    """Compares the tensors of a model with those when training began.

    Where the strategy does not leave the model's own parameters in place during a step, only the
    state_dict is compared.
    """

    def __init__(self, run: Run) -> None:
        model = run.model
        state = model.state_dict()
        self._names = list(state)
        self._kinds = _kinds(state, excluded=_with_own_loading(model))
        parts = (
            [(f"{path}." if path else "", module) for path, module in model.named_modules()]
            if run.strategy.compiles
            else []
        )
        self._parameters = [
            (path + name, module._parameters, name, tensor)  # pyright: ignore[reportPrivateUsage]
            for path, module in parts
            for name, tensor in module._parameters.items()  # pyright: ignore[reportPrivateUsage]
        ]
        self._buffers = [
            (path + name, module._buffers, name, tensor.dtype)  # pyright: ignore[reportPrivateUsage]
            for path, module in parts
            for name, tensor in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
            if tensor is not None and name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        ]

    def after_step(self, run: Run) -> Iterable[Caution]:
        """Compare the tensors; after the first step, also the state_dict."""
        self._require_same()
        return self.before_checkpoint(run) if run.step == 1 else ()

    def before_checkpoint(self, run: Run) -> Iterable[Caution]:
        """Compare the state_dict."""
        self._require_same_state(run.model.state_dict())
        return ()

    def _require_same(self) -> None:
        """Raise a ConfigError if a parameter was replaced, or a buffer has another dtype."""
        for name, tensors, key, parameter in self._parameters:
            if key not in tensors or tensors[key] is not parameter:
                raise ConfigError(
                    Problem(
                        "model",
                        f"a forward pass replaces the parameter {name} by another tensor, which no "
                        "optimizer trains",
                        hint=f"change it in place: `with torch.no_grad(): self.{key}.copy_(...)`",
                    )
                )
        for name, tensors, key, dtype in self._buffers:
            now = tensors[key]
            if now is not None and now.dtype is not dtype:
                raise ConfigError(
                    Problem(
                        "model",
                        f"a forward pass turns the buffer {name} from {_named(dtype)} into "
                        f"{_named(now.dtype)}: a run resumed from a checkpoint would round it",
                        hint="register it with the dtype that it will have, or assign "
                        f"`.to(self.{key}.dtype)`",
                    )
                )

    def _require_same_state(self, state: Mapping[str, Any]) -> None:
        """Raise a ConfigError if a new model could not load the model's state_dict."""
        added = {
            name: list(tensor.shape) for name, tensor in state.items() if name not in self._names
        }
        ConfigError.raise_if(
            added,
            "model",
            f"a forward pass adds {first_few([*added], 3)} to the model's state_dict: a "
            "checkpoint with it could not be loaded into a new model",
            hint="create it in __init__, in the shape that it will have, here "
            f"{next(iter(added.values()), None)}",
        )
        missing = [name for name in self._names if name not in state]
        ConfigError.raise_if(
            missing,
            "model",
            f"a forward pass removes {first_few(missing, 3)} from the model's state_dict: a "
            "checkpoint without it could not be loaded into a new model",
            hint="keep a tensor there: None is not saved",
        )
        kinds = _kinds(state, excluded=())
        if other := [name for name, first in self._kinds.items() if kinds[name] != first]:
            change = (
                f"{other[0]} in the model's state_dict from {self._kinds[other[0]]} into "
                f"{kinds[other[0]]}"
            )
            raise ConfigError(
                Problem(
                    "model",
                    f"a forward pass turns {change}: a checkpoint with it could not be loaded into "
                    "a new model",
                    hint="create it in the shape and dtype that it will have; a buffer that need "
                    "not be saved can have persistent=False",
                )
            )


def _kinds(state: Mapping[str, Any], *, excluded: tuple[str, ...]) -> dict[str, str]:
    """Return the dtypes and shapes of a state_dict's tensors, except those below `excluded`."""
    return {
        name: f"{_named(tensor.dtype)} {list(tensor.shape)}"
        for name, tensor in state.items()
        # A module loads its extra state by code of its own
        if isinstance(tensor, Tensor) and not name.endswith("_extra_state")
        if not name.startswith(excluded)
    }


def _with_own_loading(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of modules that load states by their own code, perhaps of other shapes."""
    names = list[str]()
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = module._load_state_dict_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
        loading = type(module).load_state_dict, type(module)._load_from_state_dict, *hooks  # pyright: ignore[reportPrivateUsage]
        if any(
            not method.__module__.startswith(("torch.", "samewise.runner.")) for method in loading
        ):
            names.append(f"{path}." if path else "")
    return tuple(names)


def _named(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
