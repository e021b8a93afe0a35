"""Apply a run's model to images, videos or audio files."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from samewise.runner.commands import add_trust

_LINES = 10
"""Items of a list that are shown on the terminal."""

EXAMPLES = """examples:
  samewise predict 3f2a digit.png                       the most likely classes of an image
  samewise predict 3f2a street.jpg --weights ema        which objects are where, using the moving average of the weights
  samewise predict 3f2a meeting.wav --output separated  one file per speaker
  samewise predict 3f2a *.wav --checkpoint last device=cpu --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run's folder, the start of its fingerprint, or its MLflow run id")
    parser.add_argument("files", nargs="+", metavar="FILE", help="images, videos or audio files; also KEY=VALUE: values to change in the run's config")
    parser.add_argument("--checkpoint", default="best", metavar="best|last|STEP", help="which checkpoint to use (default: best)")
    parser.add_argument("--weights", metavar="NAME", help="use the weights kept by this callback, such as ema (default: the trained weights)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write pictures and sounds (default: RUN/predictions)")
    parser.add_argument("--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)")
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per file")


def run(args: argparse.Namespace) -> int:
    from samewise.runner import api
    from samewise.runner.config import saved
    from samewise.runner.errors import ConfigError, Problem

    files, overrides = _apart(args.files)
    if not files:
        raise ConfigError(Problem("FILE", "no files to predict from were given", expected="images, videos or audio files"))
    folder = saved.find(args.run, run_root=args.run_root).path
    loaded = api.load(folder, *overrides, checkpoint=args.checkpoint, weights=args.weights, trust=args.trust)
    for file, prediction, made in loaded.transforms.predictor.predict_files(files, args.output or folder / "predictions"):
        _tell(file, prediction.values(), made, as_json=args.json)
    return 0


def _tell(file: Path, values: dict[str, Any], made: Sequence[Path], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"file": str(file), **values, "files": [str(path) for path in made]}), flush=True)
        return
    print(file)
    for key, value in values.items():
        for line in _lines(value):
            print(f"  {key:<20} {line}")
    for path in made:
        print(f"  {path}")


def _apart(given: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files, and overrides (arguments that look like overrides and are not files)."""
    files, overrides = list[Path](), list[str]()
    for one in given:
        if re.match(r"[A-Za-z_][\w.]*=", one) and not Path(one).exists():
            overrides.append(one)
        else:
            files.append(Path(one))
    return files, overrides


def _lines(value: Any) -> list[str]:
    """A value, each of a list's items on a line of its own; of a long list the first."""
    if not isinstance(value, list):
        return [_shown(value)]
    items = cast(list[Any], value)
    more = [f"and {len(items) - _LINES} more, with --json"] if len(items) > _LINES else []
    return [_shown(item) for item in items[:_LINES]] + more if items else ["none"]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(part)}" for key, part in cast(dict[str, Any], value).items())
    if isinstance(value, list):
        return " ".join(map(_shown, cast(list[Any], value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
