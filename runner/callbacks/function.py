"""Call a function at a moment of the training."""

from collections.abc import Callable
from typing import Any, final

from samewise.runner.errors import ConfigError
from samewise.runner.interfaces import Callback


@final
class FunctionCallback(Callback):
    """Calls a function of a package of yours, as a callback's method would be.

    Args:
        at: When: a method of `Callback` without `on_` (`step`, `epoch_end`, `evaluation`, ...);
            `step_end` and `evaluation_end` are `step` and `evaluation`.
        function: The function, whose first parameter is annotated as `RunView`. It gets what the
            method gets.

    Raises:
        ConfigError: There is no such moment.
    """

    def __init__(self, *, at: str, function: Callable[..., Any]) -> None:
        moments = [name.removeprefix("on_") for name in vars(Callback) if name.startswith("on_")]
        moment = at if at in moments else at.removesuffix("_end")
        ConfigError.raise_if(moment not in moments, "at", "is no moment", at, ", ".join(moments))
        setattr(self, f"on_{moment}", function)
