"""Apply a run's model to images, videos or audio files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from samewise.runner.commands import add_trust

if TYPE_CHECKING:
    from samewise.runner.training.predictor import Predictor

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
    from samewise.runner.config import project, saved
    from samewise.runner.errors import ConfigError, Problem, SamewiseError
    from samewise.runner.records import shapes, sources, trust
    from samewise.runner.records.files import read_json
    from samewise.runner.training.determinism import prepare

    files, overrides = _apart(args.files)
    if not files:
        raise ConfigError(Problem("FILE", "no files to predict from were given", expected="images, videos or audio files"))
    folder = saved.find(args.run, run_root=args.run_root)
    trust.require(folder.config, trust=args.trust, uses=trust.MAKES)
    composed = saved.config_of(folder, overrides)
    prepare(composed.cfg.reproducibility)

    from samewise.runner.records import checkpoint  # imports torch, which must come after the variables
    from samewise.runner.training.build import build_predictor

    state = checkpoint.load(checkpoint.choose_checkpoint(folder.checkpoints, args.checkpoint).path)
    classes = (read_json(folder.environment, shapes.ENVIRONMENT) or {}).get("data", {}).get("train", {}).get("classes", [])
    predictor = build_predictor(composed, project.find(), state, classes=classes, weights=args.weights)
    sources.warn_of_changes(folder)
    output = args.output or folder.path / "predictions"
    output.mkdir(parents=True, exist_ok=True)
    problems: list[Problem] = []
    for file, name in zip(files, _names(files), strict=True):
        try:
            _tell(predictor, file, output, name, as_json=args.json)
        except SamewiseError as error:  # the others may be sound
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return 0


def _tell(predictor: Predictor, file: Path, output: Path, name: str, *, as_json: bool) -> None:
    from samewise.runner.errors import Problem, first_line, raised_at

    prediction = predictor.predict(file)
    values, made = prediction.values(), list[str]()
    try:
        made += [str(path) for path in prediction.save(output, name)]
    except Exception as error:  # what the model makes of the file is told without its picture
        print(f"warning: {Problem(str(file), f'its picture could not be drawn: {first_line(error)}', hint=raised_at(error))}", file=sys.stderr)
    if as_json:
        print(json.dumps({"file": str(file), **values, "files": made}), flush=True)
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


def _names(files: Sequence[Path]) -> list[str]:
    """What the results of each file begin with: its name without the ending, numbered where another has the same."""
    names = [file.stem for file in files]
    return [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names, start=1)]


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
