"""What a step may not do to the tensors that a model holds: replace a parameter, give a buffer another dtype, or add one to what is saved."""

from __future__ import annotations

from typing import final

from torch import nn

from samewise.runner.errors import ConfigError, Problem, first_few


@final
class HeldTensors:
    """A model's parameters, the dtypes of its buffers that are saved, and the names of all that is saved.

    With `stay` false, the strategy holds parameters of its own during a step: then only the names are compared.
    """

    def __init__(self, model: nn.Module, *, stay: bool = True) -> None:
        self._model = model
        self._names = list(model.state_dict())
        parts = [(f"{path}." if path else "", module) for path, module in model.named_modules()] if stay else []
        self._parameters = [(path + name, module._parameters, name, one) for path, module in parts for name, one in module._parameters.items()]  # pyright: ignore[reportPrivateUsage]
        self._buffers = [
            (path + name, module._buffers, name, one.dtype)  # pyright: ignore[reportPrivateUsage]
            for path, module in parts
            for name, one in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
            if one is not None and name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        ]

    def require_same(self) -> None:
        """Raise a ConfigError for a parameter that is another tensor now, or a buffer of another dtype."""
        for name, held, key, one in self._parameters:
            if key not in held or held[key] is not one:
                words = f"a forward pass replaces the parameter {name} by another tensor, which no optimizer trains"
                raise ConfigError(Problem("model", words, hint=f"change it in place: `with torch.no_grad(): self.{key}.copy_(...)`"))
        for name, held, key, dtype in self._buffers:
            now = held[key]
            if now is not None and now.dtype is not dtype:
                words = f"a forward pass turns the buffer {name} from {_named(dtype)} into {_named(now.dtype)}: a run resumed from a checkpoint would round it"
                raise ConfigError(Problem("model", words, hint=f"register it with the dtype that it will have, or assign `.to(self.{key}.dtype)`"))

    def require_same_names(self) -> None:
        """Raise a ConfigError if the model's state_dict has other names than a new model's: no checkpoint of it could be loaded."""
        state = self._model.state_dict()
        if added := {name: list(one.shape) for name, one in state.items() if name not in self._names}:
            words = f"a forward pass adds {first_few([*added], 3)} to the model's state_dict: a checkpoint with it could not be loaded into a new model"
            hint = f"create it in __init__, in the shape that it will have, here {next(iter(added.values()))}"
            raise ConfigError(Problem("model", words, hint=hint))
        if gone := [name for name in self._names if name not in state]:
            words = f"a forward pass removes {first_few(gone, 3)} from the model's state_dict: a checkpoint without it could not be loaded into a new model"
            raise ConfigError(Problem("model", words, hint="keep a tensor there: None is not saved"))


def _named(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
