"""Rewrite counts.json: `python tests/pretend/write_counts.py [RECIPE ...]`, or all recipes without names. Prints what has changed."""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from pretended_cuda import written
from pretended_cuda.steps import counted


def main(names: list[str]) -> int:
    unknown = sorted({*names} - {*written.RECIPES})
    if unknown:
        print(f"no such recipe: {', '.join(unknown)}; there are {', '.join(written.RECIPES)}", file=sys.stderr)
        return 2
    before = written.read().get("recipes", {})
    for name in names or written.RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            found = counted(written.RECIPES[name], Path(folder))
        changes = written.differences(before.get(name, {}), found)
        print("\n".join([f"{name}: {'as it was' if not changes else ''}", *changes]))
        written.write({name: found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
