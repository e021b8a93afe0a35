"""samewise: the same experiment gives the same bits.

Its functions for notebooks and scripts are imported when they are first asked for.
"""

import os
from typing import TYPE_CHECKING, Any

from samewise.runner import torchaudio_import as _  # before anything imports torchaudio
from samewise.runner.processes.variables import REPRODUCIBLE

if TYPE_CHECKING:
    from samewise.runner.api import (
        LoadedRun,
        Trained,
        Transforms,
        compose,
        load,
        predict,
        runs,
        sweep,
        train,
    )

os.environ.update(REPRODUCIBLE | os.environ)  # before torch multiplies matrices
del os, REPRODUCIBLE

__version__ = "0.2.0"
__all__ = [
    "LoadedRun",
    "Trained",
    "Transforms",
    "compose",
    "load",
    "predict",
    "runs",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'samewise' has no attribute '{name}'")
    from samewise.runner import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
