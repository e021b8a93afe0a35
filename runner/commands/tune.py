"""Find a batch size or a learning rate by short trials."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.commands import add_overrides
from samewise.runner.commands.profile import folder_for, prepare_composed, remove_if_empty
from samewise.runner.errors import ConfigError, Problem, nearest
from samewise.runner.processes.this_process import is_rank
from samewise.runner.records.json_text import to_json

if TYPE_CHECKING:
    from samewise.runner.training.run import Run

WHAT = ("batch_size", "lr")
STEPS = {"batch_size": 3, "lr": 100}
ONLY = {"low": "lr", "high": "lr", "largest": "batch_size", "memory": "batch_size"}
"""Finder that each of these options belongs to."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tune`."""
    parser.add_argument("what", metavar="WHAT", help="batch_size or lr")
    add_overrides(parser)
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="how many steps: batch_size: 3 for each size by default; lr: 100 in all",
    )
    parser.add_argument(
        "--low", type=float, metavar="LR", help="lr: the lowest rate (default: 1e-6)"
    )
    parser.add_argument(
        "--high",
        type=float,
        metavar="LR",
        help="lr: the highest rate, unless the loss diverges earlier (default: 10)",
    )
    parser.add_argument(
        "--largest",
        action="store_true",
        help="batch_size: continue until memory runs out, even if larger batches are no faster "
        "(always on CUDA)",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help="batch_size: use at most this much memory (default: all on CUDA, 0.8 of the free "
        "memory on the CPU)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write the curve and the figures (default: profiles/NAME/FINGERPRINT; -2, "
        "-3, ...)",
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.epilog = """\
batch_size   doubles the batch until the time per sample stops falling or memory runs out, and suggests the smallest batch within 3 % of the fastest.
             With --largest it also finds the largest batch that fits, to within an eighth. On the CPU it uses at most 0.8 of the free memory, and does not
             try a size that would need more. The batch size is part of the experiment: a different one gives different bits, and often needs a
             different learning rate.
lr           the range test (Smith 2017): the learning rate rises at every step from --low to --high, and training stops when the loss diverges. Suggests
             the rate at which the smoothed loss falls fastest, but at most a third of the rate with the lowest loss, and draws the curve (lr.png).
             If the loss falls by less than it scatters from step to step, it suggests nothing.

Each trial takes its steps in a temporary folder, from the experiment's initial weights. No run is created, and existing runs stay as they are.

examples:
  samewise tune lr experiment=resnet18_digits
  samewise tune batch_size experiment=resnet18_digits --largest --memory 4"""


def run(args: argparse.Namespace) -> int:
    """Try settings, print the result, and write it."""
    _require_sound(args)
    composed = prepare_composed(args)

    from samewise.runner.training.launch import processes

    # For the learning rate, the losses are those of one process, however many there are
    is_single = args.what == "lr"
    if not is_single and (is_rank() or processes(composed) > 1):
        hint = "strategy=single replicas=1; batch_size is then that of each process"
        raise ConfigError(
            Problem(
                "strategy",
                f"`tune {args.what}` measures a single process",
                composed.cfg.strategy.get("nproc"),
                hint=hint,
            )
        )
    from samewise.runner.measuring.profile import rehearse

    out = folder_for(args.out, composed)
    with remove_if_empty(out), rehearse(composed, alone=is_single) as run:
        result, settings = _FINDERS[args.what](args, run, out)
    (out / f"{args.what}.json").write_text(to_json(result, indent=2) + "\n", encoding="utf-8")
    from samewise.runner.measuring.repeated_run import as_overrides

    result = {"what": args.what, "settings": settings, **result, "folder": str(out)}
    if args.json:
        print(to_json(result, indent=2))
        return 0
    print(f"suggested: {' '.join(as_overrides(settings))}\n  {result['reason']}")
    print(
        "  this makes another experiment, with different bits"
        + ("; a larger batch often needs a higher optimizer.lr" * (args.what == "batch_size"))
    )
    print(
        f"written to {out}; `samewise new NAME --from EXPERIMENT SETTING` writes it as an "
        "experiment"
    )
    return 0


def _require_sound(args: argparse.Namespace) -> None:
    """Check the options before anything is composed, and fill in defaults.

    Raises:
        ConfigError: An option is not valid.
    """
    if args.what not in WHAT:
        raise ConfigError(
            Problem("WHAT", "cannot be tuned", args.what, ", ".join(WHAT), nearest(args.what, WHAT))
        )
    for name, finder in ONLY.items():
        if getattr(args, name) not in (None, False) and args.what != finder:
            raise ConfigError(Problem(f"--{name}", f"is for `tune {finder}`", getattr(args, name)))
    args.steps = STEPS[args.what] if args.steps is None else args.steps
    minimum = 20 if args.what == "lr" else 1
    if args.steps < minimum:
        raise ConfigError(Problem("--steps", f"must be at least {minimum}", args.steps))
    args.low, args.high = (
        (1e-6 if args.low is None else args.low),
        (10.0 if args.high is None else args.high),
    )
    if not 0 < args.low < args.high < float("inf"):
        raise ConfigError(
            Problem(
                "--low, --high",
                "are not a range of learning rates",
                [args.low, args.high],
                "0 < low < high",
            )
        )
    if args.memory is not None and not args.memory > 0:
        raise ConfigError(Problem("--memory", "must be greater than 0", args.memory, "gigabytes"))


def _batch_size(
    args: argparse.Namespace, run: Run, out: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    from samewise.runner.measuring import batch_size

    def report(size: batch_size.Size) -> None:
        outcome = (
            f"{size.ms:>10.4g} ms {size.per_sample:>9.4g} ms a sample"
            if size.ms is not None
            else f"  does not fit: {size.why}"
        )
        print(f"  batch_size {size.batch_size:>6} {outcome}", file=sys.stderr)

    largest = args.largest or run.strategy.device.type == "cuda"
    sizes = batch_size.find(
        run,
        steps=args.steps,
        largest=largest,
        memory=round(args.memory * 1e9) if args.memory else None,
        report=report,
    )
    suggestion = batch_size.suggest(sizes, samples=run.plan.samples)
    return suggestion, {"batch_size": suggestion["batch_size"]}


def _lr(args: argparse.Namespace, run: Run, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from samewise.runner.measuring import learning_rate

    curve = learning_rate.range_test(run, low=args.low, high=args.high, steps=args.steps)
    suggestion = learning_rate.suggest(curve)
    learning_rate.draw(
        curve, suggestion, f"{run.composed.name}: learning rate range test", out / "lr.png"
    )
    phase = run.phases[0].spec.name
    key = "optimizer.lr" if "lr" in run.config.optimizer else f"optimizer.{phase}.lr"
    return {
        **suggestion,
        # JSON has no infinity
        "curve": [[rate, loss if loss < float("inf") else None] for rate, loss in curve],
    }, {key: suggestion["lr"]}


_FINDERS = {"batch_size": _batch_size, "lr": _lr}
