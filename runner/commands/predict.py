"""Apply a run's model to images, videos, audio files or tables."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from samewise.runner import api
from samewise.runner.commands import CHECKPOINT, PACKAGES, RUN_ROOT, TRUST, note_weights
from samewise.runner.errors import ConfigError
from samewise.runner.records.console import show_progress
from samewise.runner.records.files import require_no_link, require_writable
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json

if TYPE_CHECKING:
    from samewise.runner.training.prediction_files import Form, PredictionFile

_MAX_ITEMS = 10
"""Maximum number of a list's items to print."""

EXAMPLES = """examples:
  samewise predict 3f2a digit.png                       the most likely classes of an image
  samewise predict 3f2a street.jpg --weights ema        which objects are where, using the moving average of the weights
  samewise predict 3f2a meeting.wav --output separated  one file per speaker
  samewise predict 3f2a *.wav --checkpoint last device=cpu --json
  samewise predict 3f2a photos 'more/**/*.jpg' --threshold 0.5 --out found.csv
  samewise predict 3f2a val2017 --out results.json --format coco
"""

ARGUMENTS = {
    "run": {"metavar": "RUN", "help": RUN},
    "files": {
        "nargs": "+",
        "metavar": "FILE",
        "help": "images, videos, audio files, texts or tables, folders of them, or patterns such as "
        "'photos/*.jpg'; also KEY=VALUE: values to change in the run's config",
    },
    **CHECKPOINT,
    "--weights": {
        "metavar": "NAME",
        "help": "use the weights kept by this callback, such as ema (default: the trained weights)",
    },
    "--output --out": {
        "type": Path,
        "action": "append",
        "default": [],
        "metavar": "PATH",
        "help": "a folder for pictures and sounds, or NAME.json or NAME.csv for all predictions in one "
        "file; may be repeated (default: RUN/predictions)",
    },
    "--format": {
        "choices": ["json", "csv", "coco"],
        "help": "the format of that file (default: by its extension); coco: COCO's results, for "
        "detection",
    },
    "--threshold": {
        "type": float,
        "metavar": "SCORE",
        "help": "leave out boxes or classes with a lower score (0 to 1)",
    },
    "--batch": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "how many files the model processes at once (default: 1). In a batch, the last bits of "
        "a prediction and random draws may differ",
    },
    **RUN_ROOT,
    **PACKAGES,
    **TRUST,
    "--json": {"action": "store_true", "help": "print one JSON object per file"},
}


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    files, overrides = _split_arguments(args.files)
    pictures, results = _outputs(args.output, args.format)
    ConfigError.raise_if(
        not files,
        "FILE",
        "no files to predict from were given",
        expected="images, videos, audio files or tables",
    )
    folder = saved.find(args.run, run_root=args.run_root).path
    if pictures is None and not results:
        pictures = folder / "predictions"
        require_writable(
            "--output",
            pictures,
            hint="without --output they go into the run's folder: --output FOLDER names another",
        )
        # The run's folder may be a stranger's, with links to any file of the user's
        require_no_link(pictures, *(pictures.iterdir() if pictures.is_dir() else ()))
    elif pictures is not None:
        require_writable("--output", pictures)
    # Unwrapped, so that errors name options, not arguments
    load = inspect.unwrap(api.load)
    loaded = load(
        folder,
        *overrides,
        checkpoint=args.checkpoint,
        weights=args.weights,
        trust=args.trust,
        packages=args.package,
    )
    note_weights(loaded.config, args)
    predictor = loaded.transforms.predictor
    paths = predictor.files(files)
    predictions = predictor.predict_files(
        paths, pictures, threshold=args.threshold, batch=args.batch
    )
    try:
        for file, prediction, written in show_progress(predictions, len(paths)):
            for result_file in results:
                result_file.add(file, prediction, written)
            if args.json or not results:
                _print_prediction(file, prediction.values(), written, as_json=args.json)
    finally:
        # If some files cannot be read, the others are still predicted
        for result_file in results:
            if result_file.files:
                result_file.write()
                print(
                    f"{result_file.path}: {result_file.files} of {len(paths)} files",
                    file=sys.stderr if args.json else sys.stdout,
                )
    return 0


def _outputs(paths: Sequence[Path], form: Form | None) -> tuple[Path | None, list[PredictionFile]]:
    """Return the folder for pictures, and the files for all predictions."""
    from samewise.runner.training.prediction_files import SUFFIXES, PredictionFile

    files = [path for path in paths if path.suffix.lower() in SUFFIXES and not path.is_dir()]
    folders = [path for path in paths if path not in files]
    ConfigError.raise_if(
        len(folders) > 1,
        "--output",
        "takes one folder for pictures",
        [str(x) for x in folders],
        "a folder, and files that end in .json or .csv",
    )
    ConfigError.raise_if(
        form and not files,
        "--format",
        "needs the name of a file to write",
        form,
        hint=f"add --output NAME.{'csv' if form == 'csv' else 'json'}",
    )
    return next(iter(folders), None), [PredictionFile(path, form) for path in files]


def _print_prediction(
    file: Path, values: dict[str, Any], written: Sequence[Path], *, as_json: bool
) -> None:
    if as_json:
        print(
            to_json({"file": str(file), **values, "files": [str(path) for path in written]}),
            flush=True,
        )
        return
    print(file)
    for key, value in values.items():
        for line in _lines(value):
            print(f"  {key:<20} {line}")
    for path in written:
        print(f"  {path}")


def _split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separate files from overrides, which look like KEY=VALUE and name no file."""
    overrides = [
        x for x in arguments if re.match(r"\+{0,2}[A-Za-z_][\w.]*=", x) and not Path(x).exists()
    ]
    return [Path(x) for x in arguments if x not in overrides], overrides


def _lines(value: Any) -> list[str]:
    """Format a value as lines, a list with one item per line; a long list is cut."""
    if not isinstance(value, list):
        return [_format_value(value)]
    items = cast(list[Any], value)
    ellipsis = (
        [f"and {len(items) - _MAX_ITEMS} more, with --json"] if len(items) > _MAX_ITEMS else []
    )
    return [_format_value(item) for item in items[:_MAX_ITEMS]] + ellipsis if items else ["none"]


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{key} {_format_value(part)}" for key, part in cast(dict[str, Any], value).items()
        )
    if isinstance(value, list):
        return " ".join(map(_format_value, cast(list[Any], value)))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
