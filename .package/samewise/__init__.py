"""samewise: the same experiment gives the same bits.

Its functions for notebooks and scripts are imported when they are first asked for.
"""

import os
from typing import TYPE_CHECKING, Any

from samewise.runner import torchaudio_import as _  # before anything imports torchaudio

if TYPE_CHECKING:
    from samewise.runner.api import (
        Differences,
        Evaluation,
        Exported,
        LoadedRun,
        Trained,
        Transforms,
        Verification,
        compare,
        compose,
        diff,
        evaluate,
        export,
        load,
        predict,
        runs,
        sweep,
        train,
        verify,
    )

# Without this, MKL may add the threads' parts of a sum as they are ready: on 4 threads, a vector of
# 99 times a 99 x 144 matrix did not always give the same bits (Intel, oneMKL Developer Guide,
# "Conditional Numerical Reproducibility"). MKL reads it in its first product. What the user's
# environment says stays, and is recorded. Nothing else is imported here: with `python -m samewise`,
# the current folder is still on sys.path.
os.environ.setdefault("MKL_CBWR", "AUTO")
del os

__version__ = "0.2.0"
__all__ = [
    "Differences",
    "Evaluation",
    "Exported",
    "LoadedRun",
    "Trained",
    "Transforms",
    "Verification",
    "compare",
    "compose",
    "diff",
    "evaluate",
    "export",
    "load",
    "predict",
    "runs",
    "sweep",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'samewise' has no attribute '{name}'")
    from samewise.runner import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
