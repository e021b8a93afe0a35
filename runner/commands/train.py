"""Train an experiment, resume it, or report that it is finished."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from samewise.runner.commands import OVERRIDES, TRUST, compose_arguments, project_from
from samewise.runner.commands.sweep import start
from samewise.runner.errors import ConfigError
from samewise.runner.records import trust
from samewise.runner.records.summary import print_summary
from samewise.runner.tracking.backends import backends_of
from samewise.runner.tracking.progress import is_behind

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed

ARGUMENTS = {
    **OVERRIDES,
    **TRUST,
    "--config": {
        "type": Path,
        "metavar": "FILE",
        "help": "train from a run's config.yaml; overrides then change its values: KEY=VALUE",
    },
    "--fresh": {
        "action": "store_true",
        "help": "train again, in a new folder beside the existing one; nothing is deleted",
    },
    "--json": {"action": "store_true", "help": "print the summary as JSON"},
    "-m --multirun": {
        "action": "store_true",
        "help": "run a sweep; not needed: a=1,2 already starts one",
    },
}
EXAMPLES = """\
examples:
  samewise train                                            the default experiment
  samewise train experiment=resnet18_digits
  samewise train experiment=resnet18_digits optimizer.lr=0.05 max_epochs=3
  samewise train model=resnet50 dataset=cifar10 optimizer=adamw batch_size=128 seed=1
  samewise train experiment=resnet18_digits debug=tiny
  samewise train --config runs/resnet18_digits/3f2a9c81d0b4/config.yaml seed=1      a run's config, with another seed

commonly used keys:
  experiment=NAME            a complete experiment; `samewise list experiment` shows them all
  seed=0                     the seed of all randomness
  max_epochs=10 max_steps=N  how long to train
  batch_size=64              samples per optimizer step
  accumulate=4               process the batch in four smaller pieces, to save memory
  optimizer=sgd optimizer.lr=0.1 scheduler=cosine
  device=cuda precision=bf16 on a GPU, in half precision
  loader.num_workers=4       the same bits with any number
  resume_from=run:3f2a/last max_epochs=12   train a finished run for more epochs, as a run of its own
  run_root=runs              where runs are kept

Running the same command again resumes a run that was stopped, and reports one that is finished.
With --fresh it is trained again, in a folder beside the first (-2, -3, ...); after that, the latest folder is resumed or reported."""


def run(args: argparse.Namespace) -> int:
    """Train, or run a sweep if the overrides have several values."""
    from samewise.runner.config.override_text import has_several_values

    if args.multirun or any(map(has_several_values, args.overrides)):
        ConfigError.raise_if(
            args.config,
            "--config",
            "cannot be used with a sweep",
            hint="`samewise new NAME --from RUN` makes an experiment from a run's config",
        )
        for text in args.overrides if not args.multirun else ():
            if has_several_values(text):
                print(f"note: {_explain_sweep(text)}", file=sys.stderr)
        ConfigError.raise_if(
            args.fresh,
            "--fresh",
            "cannot be used with a sweep, which resumes its existing runs",
            hint="name=OTHER makes it a new sweep; or train one run at a time with --fresh",
        )
        return start(args)
    from samewise.runner.training.prepare import prepare

    composed = _compose_saved(args) if args.config else compose_arguments(args, strict=False)
    if args.fresh:
        composed = composed.with_new_folder()
    ready = prepare(composed, as_json=args.json, debug=args.debug)
    if isinstance(ready, Mapping):
        print_summary(
            ready, composed.folder, uri=composed.tracking_uri, as_json=args.json, fresh=False
        )
        if "mlflow" in backends_of(composed.cfg.tracking) and is_behind(composed.folder):
            print(
                "warning: not everything has reached MLflow yet; run `samewise sync "
                f"{shlex.quote(str(composed.folder.path))}` to send the rest",
                file=sys.stderr,
            )
    elif ready is not None:
        from samewise.runner.training.loop import fit

        print_summary(fit(ready), ready.folder, uri=ready.composed.tracking_uri, as_json=args.json)
    return 0


def _compose_saved(args: argparse.Namespace) -> Composed:
    """Compose a saved config with this project's packages."""
    from omegaconf import OmegaConf

    from samewise.runner.config import saved

    file: Path = args.config / "config.yaml" if args.config.is_dir() else args.config
    composed = replace(saved.config_in(file, args.overrides), project=project_from(args))
    trust.require(file, trust=args.trust, uses=trust.MAKES)
    # Someone else's config may name a folder of another machine
    root = Path(composed.cfg.run_root)
    if (
        root.is_absolute()
        and not file.resolve().is_relative_to(root.resolve())
        and not any(text.startswith("run_root=") for text in args.overrides)
    ):
        print(
            f"note: the original run is below {root}, but this one is written below runs; "
            f"add run_root={root} to keep them together",
            file=sys.stderr,
        )
        OmegaConf.update(composed.cfg, "run_root", "runs")
    OmegaConf.update(composed.cfg, "launcher", None)
    return composed


def _explain_sweep(text: str) -> str:
    """Explain an override with several values: a list or a decimal comma may have been meant."""
    key, _, value = text.partition("=")
    suggestion = f"'{key}=[{value}]'" if "(" not in value else ""
    return f"{text} is a sweep, with one training for each value" + (
        f"; one training is {suggestion}" if suggestion else ""
    )
