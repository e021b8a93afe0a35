"""Print the SHA-256 of the weights in a file or a run."""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from samewise.runner.commands import JSON, RUN_ROOT
from samewise.runner.errors import ConfigError, DamagedCheckpoint, Problem, first_line
from samewise.runner.records.json_text import to_json

EXAMPLES = """examples:
  samewise digest runs/resnet18_digits/3f2a9c81d0b4        a run's newest checkpoint
  samewise digest 3f2a                                     the same, by the start of its fingerprint
  samewise digest checkpoints/step-00000040/state.pt       a file written by torch.save
"""

ARGUMENTS = {
    "what": {
        "nargs": "+",
        "metavar": "FILE|RUN",
        "help": "a file written by torch.save, a checkpoint's folder, or a run",
    },
    **RUN_ROOT,
    **JSON,
}


def run(args: argparse.Namespace) -> int:
    digests = {name: _digest(name, args.run_root) for name in args.what}
    if args.json:
        print(to_json(digests))
    else:
        for name, digest in digests.items():
            print(f"{digest}  {name}")
    return 0


def _digest(name: str, run_root: Path) -> str:
    from samewise.runner.config import saved
    from samewise.runner.records import checkpoint, kept_checkpoints, shapes
    from samewise.runner.records.digest import weights_sha256
    from samewise.runner.records.files import read_mapping

    path = Path(name)
    if path.is_file():
        return weights_sha256(_state_in(path))
    if (path / "manifest.json").is_file():
        return weights_sha256(checkpoint.load_weights(path))
    folder = saved.find(name, run_root=run_root)
    checkpoint_entry = kept_checkpoints.choose_checkpoint(folder.checkpoints, "last")
    try:
        weights = checkpoint.load_weights(checkpoint_entry.path)
    except DamagedCheckpoint as error:
        hint = (
            f"`samewise digest {shlex.quote(str(folder.checkpoints))}/step-XXXXXXXX` reads an "
            "older one; `samewise train` resumes from the newest intact one"
        )
        raise DamagedCheckpoint(
            *(replace(problem, hint=hint) for problem in error.problems)
        ) from None
    kept_checkpoints.note_if_not_meant(
        folder.checkpoints, read_mapping(folder.summary, shapes.SUMMARY), "last"
    )
    return weights_sha256(weights)


def _state_in(path: Path) -> dict[str, Any]:
    """Return the state_dict in a file: all of it, or the part under `model` or `state_dict`."""
    import torch

    from samewise.runner.records.checkpoint import load_tensors
    from samewise.runner.records.files import require_downloaded

    require_downloaded(path)
    try:
        value = load_tensors(path)
    except Exception as error:
        raise ConfigError(
            Problem(
                str(path),
                f"is not a file of tensors: {first_line(error)}",
                expected="a file written by torch.save",
            )
        ) from error
    for name in ("model", "state_dict"):
        if isinstance(value, dict) and isinstance(value.get(name), dict):
            value = value[name]
    ConfigError.raise_if(
        not isinstance(value, dict)
        or not all(isinstance(item, torch.Tensor) for item in value.values()),
        str(path),
        "contains no state_dict",
        expected="a mapping from names to tensors",
    )
    return value
