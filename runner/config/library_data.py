"""Limits the data sets of libraries while they are created: they may download known files only."""

from __future__ import annotations

import inspect
import re
import tarfile
from collections.abc import Callable, Mapping
from typing import Any

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.processes.memory import require_few

LIBRARIES = ("torchvision.datasets", "torchaudio.datasets")
"""Their classes may download from the addresses they know, and from no other."""
PACKAGES = (*LIBRARIES, "samewise.datasets")

_WITH_SCHEME = re.compile(r"<?[^/:]+:")
"""`file:/etc/passwd`, `data:;base64,...`, `URL:...`: what urllib opens without a `//`."""

# They extract downloads without a filter of their own. Python 3.11.0 to 3.11.3 have none.
if hasattr(tarfile, "data_filter"):
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)


def make_harmless(
    component: Callable[..., Any], path: str, /, *positional: Any, **keywords: Any
) -> Any:
    """Create a data set.

    ConfigError if it has an address to download from, or asks for thousands of processes.
    """
    try:
        # By name, since an address may be given by its position
        arguments = inspect.signature(component).bind_partial(*positional, **keywords).arguments
    except TypeError:  # creating it will report this more clearly
        arguments = keywords
    _require_harmless(component, path, arguments)
    return component(*positional, **keywords)


def _require_harmless(
    component: Callable[..., Any], path: str, arguments: Mapping[str, Any]
) -> None:
    for key, value in arguments.items():
        if isinstance(value, int) and key.endswith("workers"):
            require_few(f"{path}.{key}", value)
        is_address = isinstance(value, str) and (
            "://" in value or _WITH_SCHEME.match(value.strip())
        )
        if is_address and str(component.__module__).startswith(LIBRARIES):
            raise ConfigError(
                Problem(
                    f"{path}.{key}",
                    "a config may not choose where to download from",
                    value,
                    "a name that the data set knows",
                )
            )
