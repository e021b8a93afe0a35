"""Replaces the source of a module, in a process that is thrown away."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module, with the given source.

    Args:
        name: The module.
        source: Its new source.
    """

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        return self.source


def plant(name: str, source: str) -> None:
    """Use the source for the module from now on: every module of samewise is imported again."""
    for known in [one for one in sys.modules if one.partition(".")[0] == "samewise"]:
        del sys.modules[known]
    sys.meta_path.insert(0, Planted(name, source))


def source_of(name: str) -> str:
    """The module's original source."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    return spec.loader.get_source(name) or ""
