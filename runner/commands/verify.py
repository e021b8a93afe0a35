"""Train a run again beside the first, and say whether the bits are the same or where they part."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.commands import add_trust
from samewise.runner.errors import ConfigError, Problem

if TYPE_CHECKING:
    from samewise.runner.records.folder import RunFolder

EXAMPLES = """examples:
  samewise verify runs/resnet18_digits/3f2a9c81d0b4        train it all again and compare every step
  samewise verify 3f2a --steps 50                          the first 50 steps
  samewise verify 3f2a loader.num_workers=3                with three workers: the same bits
  samewise verify 3f2a seed=1                              another seed: diverges at step 1
  samewise verify 61df...0b --uri http://tracking:5000     from MLflow alone, by its run id: its folder may be gone
  samewise verify result.bundle                            a bundle that `samewise bundle` made, with the code that is here

exit codes: 0 the same bits; 1 they differ, or the environments cannot be compared; 2 the input was wrong
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.add_argument("run", metavar="RUN", help="a run's folder, the start of its fingerprint, its MLflow run id or page, or a bundle's file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values to change in the run's config")
    parser.add_argument("--steps", type=int, help="how many steps to compare (default: all)")
    parser.add_argument("--anyway", action="store_true", help="train and compare even if the environment would change the bits")
    parser.add_argument("--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)")
    parser.add_argument("--uri", help="take the run from this MLflow store (sqlite:///FILE, http://HOST:5000); MLflow's tokens are sent there")
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.bundles.received import opened

    if args.steps is not None and args.steps < 1:
        raise ConfigError(Problem("--steps", "is too small", args.steps, "at least 1"))
    with opened(args.run, run_root=args.run_root, uri=args.uri, trust=args.trust) as folder:
        return verified(args, folder)


def verified(args: argparse.Namespace, folder: RunFolder) -> int:
    """Train a run again and print what comes of it; the command's exit code."""
    from samewise.runner.config import saved
    from samewise.runner.records import trust
    from samewise.runner.training.determinism import prepare

    trust.require(folder.config, trust=args.trust, uses=trust.MAKES)
    quiet = ("tracking.enabled=false", "checkpoint.keep_best=0", "checkpoint.every_epochs=null", "checkpoint.every_steps=null")
    composed = saved.config_of(folder, [*args.overrides, *quiet])
    prepare(composed.cfg.reproducibility)
    verdict = _verdict(args, folder, composed)
    if args.json:
        print(json.dumps(verdict))
    else:
        for line in verdict["said"]:
            print(line)
    return 0 if verdict["same"] else 1


def _verdict(args: argparse.Namespace, folder: Any, composed: Any) -> dict[str, Any]:
    from samewise.runner.config import project, saved
    from samewise.runner.config.fingerprint import identity
    from samewise.runner.config.tree import differences
    from samewise.runner.records import environment, shapes, sources
    from samewise.runner.records.files import read_json
    from samewise.runner.records.folder import RunFolder
    from samewise.runner.records.roots import alterations
    from samewise.runner.records.verify import Comparison, Parted, checkpoint_partings
    from samewise.runner.training.build import build
    from samewise.runner.training.loop import fit

    comparison = Comparison(folder, steps=args.steps)
    if not comparison.wanted:
        raise ConfigError(Problem(str(folder.trace), "the run has no trace to compare with", hint="train with trace.every_steps=1"))
    partings = checkpoint_partings(folder)
    altered = alterations(folder).get("trace")
    said = (
        [f"{folder.path}: {altered}"] * bool(altered)
        + [str(parting) for parting in partings]
        + ([f"{folder.path}: {comparison.missing}"] if comparison.missing else [])
    )
    unlike = (
        []
        if not args.overrides
        else [f"{path}: {one!r} there, {two!r} here" for path, one, two in differences(identity(saved.config_of(folder).cfg), identity(composed.cfg))]
    )
    with tempfile.TemporaryDirectory(prefix="samewise-verify-") as temporary:
        again = build(composed, project.find(), RunFolder(Path(temporary)))
        said += [f"the code differs: {line}" for line in sources.list_changes(folder.sources)]
        foreign = environment.differences(read_json(folder.environment, shapes.ENVIRONMENT) or {}, again.environment)
        if foreign and not args.anyway:
            said += ["not comparable: the environment affects the bits, and " + "; ".join(foreign), "use `--anyway` to compare them nevertheless"]
            return {"same": False, "comparable": False, "run": str(folder.path), "compared": 0, "parts": None, "said": said}
        again.callbacks.pop("throughput", None)
        again.callbacks["verify"] = comparison
        try:
            fit(again)
        except Parted as parted:
            partings.append(parted.parting)
            said.append(f"diverges at {parted.parting}")
        else:
            digest = (read_json(folder.summary, shapes.SUMMARY) or {}).get("weights_sha256")
            said.append(f"the same bits: {comparison.compared} of {comparison.wanted} steps compared" + _weights(digest, again, partings))
    said += [f"the config differs: {line}" for line in unlike]
    first = min(partings, key=lambda parting: parting.step, default=None)
    parts = None if first is None else {"step": first.step, "stage": first.stage, "layer": first.layer, "reason": first.reason}
    return {
        "same": not partings and not altered,
        "comparable": True,
        "run": str(folder.path),
        "compared": comparison.compared,
        "altered": altered,
        "parts": parts,
        "said": said,
    }


def _weights(digest: str | None, again: Any, partings: list[Any]) -> str:
    """The final weights too, where both runs have reached them."""
    from samewise.runner.records.verify import Parting
    from samewise.runner.training.state import weights_digest

    if digest is None or again.step != again.total_steps:
        return ""
    if weights_digest(again) == digest:
        return f", weights {digest[:16]}... in both"
    partings.append(Parting(again.step, "weights", "", "the final weights differ from the summary's"))
    return ", but the final weights differ from the summary's"
