"""Makes the modules beside the tests importable, as `samewise_forked` and `samewise_FOLDER_NAME`: no folder of tests is on sys.path. Run, not imported."""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path


class Beside(MetaPathFinder):
    """Finds the modules only when they are imported: some import all of torch, for which the collection of most tests should not wait."""

    def __init__(self) -> None:
        folders = ("", "datasets", "docs", "kept", "launchers", "oracle", "recipes", "runner", "security")
        paths = [(folder, path) for folder in folders for path in Path(__file__).parent.joinpath(folder).glob("*.py")]
        modules = [(folder, path) for folder, path in paths if not path.name.startswith(("test_", "conftest", "helpers"))]
        self.known = {"_".join(filter(None, ("samewise", folder, path.stem))): path for folder, path in modules}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.known[fullname]) if fullname in self.known else None


sys.meta_path.append(Beside())
