"""Describes samples and outputs of models, for messages."""

from collections.abc import Mapping

from torch import Tensor


def form_of(value: object) -> str:
    """Describe a value: a tensor by its shape, a mapping by its keys, anything else by its type."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {sorted(map(str, value))}"
    return f"a {type(value).__name__}"
