"""Makes the modules beside the tests importable, as `samewise_forked` and `samewise_FOLDER_NAME`: no folder of tests is on sys.path. Run, not imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _folder in ("", "datasets", "docs", "kept", "launchers", "oracle", "recipes", "runner"):
    for _path in Path(__file__).parent.joinpath(_folder).glob("*.py"):
        if not _path.name.startswith(("test_", "conftest", "helpers")):
            _name = "_".join(filter(None, ("samewise", _folder, _path.stem)))
            _spec = importlib.util.spec_from_file_location(_name, _path)
            assert _spec is not None
            assert _spec.loader is not None
            _spec.loader = importlib.util.LazyLoader(_spec.loader)  # some import all of torch, which few tests' collection should wait for
            sys.modules[_name] = _module = importlib.util.module_from_spec(_spec)
            _spec.loader.exec_module(_module)
