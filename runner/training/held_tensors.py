"""What a step may not do to the tensors that a model holds: replace a parameter, or give a buffer another dtype."""

from __future__ import annotations

from typing import final

from torch import nn

from samewise.runner.errors import ConfigError, Problem


@final
class HeldTensors:
    """A model's parameters, and the dtypes of its buffers that are saved."""

    def __init__(self, model: nn.Module) -> None:
        parts = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
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


def _named(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
