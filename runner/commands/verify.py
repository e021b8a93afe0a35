"""Train a run again, and report whether the bits are the same or where they diverge."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.commands import add_packages, add_trust
from samewise.runner.config import project as projects
from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.processes.variables import prepare, use_own_inductor_cache
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.json_text import to_json
from samewise.runner.tracking.journal import logged_values

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.config.project import Project

EXAMPLES = """examples:
  samewise verify runs/resnet18_digits/3f2a9c81d0b4        train it all again and compare every step
  samewise verify 3f2a --steps 50                          the first 50 steps
  samewise verify 3f2a loader.num_workers=3                with three workers: the same bits
  samewise verify 3f2a seed=1                              another seed: diverges at step 1
  samewise verify 61df...0b --uri http://tracking:5000     by its MLflow run id, from MLflow alone: its folder may be gone
  samewise verify result.bundle                            a bundle from `samewise bundle`, with the code installed here
  samewise verify 3f2a --audit 2                           two parts of the training, drawn at random
  samewise verify 3f2a --audit all                         all parts; names what was forged
  samewise verify digits                                   an export, in every runtime that is installed

exit codes: 0 the same bits; 1 they differ, or the environments cannot be compared; 2 the input was wrong
"""

QUIET = (
    "tracking.enabled=false",
    "checkpoint.keep_best=0",
    "checkpoint.every_epochs=null",
    "checkpoint.every_steps=null",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run's folder or name, the start of its fingerprint, its MLflow run id or page, "
        "a bundle's file, or an export's folder",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values to change in the run's config"
    )
    parser.add_argument("--steps", type=int, help="how many steps to compare (default: all)")
    audit = (
        "repeat only parts of the training, each from one kept checkpoint to the next: N drawn "
        "at random (default: 2), or all"
    )
    parser.add_argument("--audit", nargs="?", const=2, type=_parts, metavar="N|all", help=audit)
    parser.add_argument(
        "--audit-seed",
        type=int,
        metavar="S",
        help="the seed with which the parts are drawn (default: a new one, which is printed)",
    )
    parser.add_argument(
        "--coarse",
        action="store_true",
        help="stop at the first step that differs; without this, the step is repeated to name "
        "the first tensor that differs",
    )
    parser.add_argument(
        "--anyway",
        action="store_true",
        help="train and compare even if the environment would change the bits",
    )
    parser.add_argument(
        "--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)"
    )
    parser.add_argument(
        "--uri",
        help="take the run from this MLflow store (sqlite:///FILE, http://HOST:5000); MLflow's "
        "tokens are sent there",
    )
    parser.add_argument(
        "--project",
        type=Path,
        metavar="FOLDER",
        help="the folder of the pyproject.toml with your own packages (default: the current one)",
    )
    clients = (
        "also run an export with the programs in this folder, which must be yours (default: "
        "docs/examples of samewise's checkout)"
    )
    parser.add_argument("--clients", type=Path, metavar="FOLDER", help=clients)
    add_packages(parser)
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _parts(text: str) -> int:
    """How many segments to audit; 0 means all."""
    if text == "all":
        return 0
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of parts nor `all`; RUN goes before --audit"
        )
    return int(text)


def run(args: argparse.Namespace) -> int:
    from samewise.runner.bundles.received import open_received

    if args.steps is not None and args.steps < 1:
        raise ConfigError(Problem("--steps", "is too small", args.steps, "at least 1"))
    if args.steps is not None and args.audit is not None:
        raise ConfigError(
            Problem(
                "--steps",
                "applies to training from the beginning, but --audit repeats parts of a run",
                args.steps,
                "one of the two",
            )
        )
    if args.audit_seed is not None and args.audit is None:
        raise ConfigError(
            Problem(
                "--audit-seed",
                "draws the parts of an audit, and there is no --audit",
                args.audit_seed,
                hint="add --audit",
            )
        )
    if Path(args.run, "export.json").is_file():
        return _verify_export(args)
    from samewise.runner.exports.unfinished import UNFINISHED, is_unfinished

    if is_unfinished(Path(args.run)):
        raise ConfigError(
            Problem(
                "RUN",
                f"is {UNFINISHED}",
                args.run,
                hint="delete it, and run `samewise export` again",
            )
        )
    with open_received(args.run, run_root=args.run_root, uri=args.uri, trust=args.trust) as folder:
        return verify_run(args, folder)


def _verify_export(args: argparse.Namespace) -> int:
    """Run an export's files on its test vectors."""
    use_own_inductor_cache()
    from samewise.runner.exports.folder import run_test_vectors

    if args.overrides or args.steps or args.uri or args.audit is not None:
        raise ConfigError(
            Problem(
                "verify",
                "an export is verified by its test vectors: nothing is trained",
                expected="samewise verify FOLDER",
            )
        )
    if args.clients and not args.clients.is_dir():
        raise ConfigError(
            Problem(
                "--clients",
                "is not a folder",
                str(args.clients),
                "a copy of docs/examples, with the programs that you have built",
            )
        )
    found = run_test_vectors(
        Path(args.run), trusted=args.trust, **({"examples": args.clients} if args.clients else {})
    )
    if args.json:
        print(
            to_json(
                {"same": all(one.same for one in found), "formats": [asdict(one) for one in found]}
            )
        )
    else:
        for one in found:
            mark = "not run" if one.sound is None else "sound" if one.sound else "WRONG"
            print(f"{one.format:<12} {one.language:<7} {mark:<8} {one.words}")
    return 1 if any(one.sound is False for one in found) else 0


def verify_run(args: argparse.Namespace, folder: RunFolder) -> int:
    """Train a run again and print the result; return the command's exit code."""
    from samewise.runner.config import saved

    for key, _, value in (override.lstrip("+~").partition("=") for override in args.overrides):
        if key.partition(".")[0] == "trace":
            hint = "leave it out; --steps N compares fewer steps"
            raise ConfigError(
                Problem(
                    key,
                    "cannot be overridden here: both trainings are compared by the trace "
                    "as it was recorded",
                    value,
                    hint=hint,
                )
            )
    composed = saved.trusted_config_of(
        folder,
        [*args.overrides, *QUIET],
        trust=args.trust,
        received=args.run if Path(args.run).is_file() else "",
    )
    prepare(composed.cfg.reproducibility)
    verdict = _verdict(args, folder, composed)
    if args.json:
        print(to_json(verdict))
    else:
        for line in verdict["said"]:
            print(line)
    return 0 if verdict["same"] else 1


def _verdict(args: argparse.Namespace, folder: RunFolder, composed: Composed) -> dict[str, Any]:
    """Check the record itself, then compare it with a second training."""
    from samewise.runner.bundles.received import store_contradictions
    from samewise.runner.config.fingerprint import identity
    from samewise.runner.config.tree import differences, shown
    from samewise.runner.records import environment, kept_sources, roots, sources
    from samewise.runner.records.trace import STAGES
    from samewise.runner.training.build import build
    from samewise.runner.verify import record_comparison, rerun_comparison
    from samewise.runner.verify.audit_report import audit
    from samewise.runner.verify.second_training import conclude, train_again

    original = record_comparison.recorded_config(folder, args.overrides)
    unlike = (
        differences(identity(original.whole), identity(composed.whole)) if args.overrides else []
    )
    if args.audit is not None and unlike:
        raise ConfigError(
            Problem(
                "--audit",
                "repeats the run as it was, but these overrides would change it",
                ", ".join(path for path, _, _ in unlike),
                "none of them",
            )
        )
    project = projects.find(args.project, packages=args.package)
    _require_one_process(composed, project)
    logged, settings = logged_values(folder.metrics), [path for path, _, _ in unlike]
    comparison = rerun_comparison.Comparison(
        folder, logged, steps=args.steps, goes_on=args.audit is not None, settings=settings
    )
    if (
        not comparison.wanted
        and args.audit is None
        and (
            problem := _nothing_to_compare(
                args, folder, comparison.steps, original.cfg.trace.every_steps
            )
        )
    ):
        raise ConfigError(problem)
    divergences = [
        *rerun_comparison.checkpoint_divergences(folder),
        *rerun_comparison.metric_divergences(folder, logged),
    ]
    altered = roots.alterations(folder).get("trace", "").splitlines()
    recorded = read_json(folder.environment, shapes.ENVIRONMENT) or {}
    with tempfile.TemporaryDirectory(prefix="samewise-verify-") as temporary:
        again = build(composed, project, RunFolder(Path(temporary)))
        if args.audit is None:
            last = max(comparison.steps, default=0)
            _require_length(
                again.total_steps, min(args.steps or last, last), [path for path, _, _ in unlike]
            )
        foreign = environment.differences(recorded, again.environment) if recorded else []
        altered += store_contradictions(folder)
        altered += record_comparison.alterations(
            folder, original, again, foreign=bool(foreign or unlike or not recorded)
        )
        changed = [f"the code differs: {line}" for line in sources.list_changes(folder.sources)]
        if changed and any(kept_sources.texts_of(folder.sources).values()):
            command = f"samewise diff {shlex.quote(str(folder.path))}"
            changed.append(f"`{command}` shows the lines of code that differ")
        missing = [f"{folder.path}: {comparison.missing}"] if comparison.missing else []
        if not folder.metrics.exists() and _is_local(args, folder):
            missing.append(f"{folder.metrics}: is missing: what the run logged was not compared")
        if not recorded:
            missing.append(
                f"{folder.environment}: is missing: whether another environment explains a "
                "difference cannot be known"
            )
        if (
            "trace_sha256"
            not in (summary := read_json(folder.summary, shapes.SUMMARY) or {"trace_sha256": None})
            and not altered
        ):
            missing.append(
                "cannot be verified: whether trace and checkpoints were altered after the "
                "run had ended; summary.json has no SHA-256 of them"
            )
        missing += record_comparison.unverifiable(recorded, again.environment)
        if hidden := record_comparison.hidden_settings(original):
            missing.append(
                "cannot be verified: the fingerprint of config.yaml, in which "
                f"{', '.join(hidden)} is hidden"
            )
        said = [
            *(f"{folder.path}: {one}" for one in altered),
            *map(str, divergences),
            *missing,
            *changed,
        ]
        verdict: dict[str, Any] = {
            "same": False,
            "comparable": True,
            "run": str(folder.path),
            "compared": 0,
            "altered": altered,
            "parts": None,
            "said": said,
        }
        if foreign and not args.anyway:
            said += [
                f"not comparable: {record_comparison.describe_foreign(foreign, again, settings)}",
                "add `--anyway` to compare them nevertheless",
            ]
            return {**verdict, "comparable": False}
        if (
            not args.json and recorded and (changed or not altered)
        ):  # an altered environment does not show what to expect
            print(
                environment.expectation(
                    recorded, again.environment, foreign, same_code=not changed
                ),
                flush=True,
            )
        again.callbacks.pop("throughput", None)
        again.recorder.log_every_steps = 1  # so that everything the run logged can be compared
        again.callbacks["verify"] = comparison
        again.recorder.trace.algorithm = comparison.algorithm
        comparison.doubted = {one.step for one in divergences if one.stage == "checkpoint"}
        contradictions = divergences[:]
        left_out = record_comparison.left_out_on_resuming(folder.metrics)
        if args.audit is None:
            said += train_again(again, comparison, folder, args.steps, divergences, left_out)
            if (
                any(one.startswith("trace.jsonl was altered") for one in altered)
                and folder.checkpoints.is_dir()
            ):
                said.append(
                    "`--audit all` repeats the run from checkpoint to checkpoint and names "
                    "which lines of the trace were altered"
                )
            divergences.sort(key=lambda divergence: divergence.step)
        else:
            verdict["audit"] = audit(
                again, comparison, folder, divergences, said, count=args.audit, seed=args.audit_seed
            )
        for one in [
            one
            for one in contradictions
            if one.stage == "checkpoint" and one.step in comparison.repeated
        ]:
            said[said.index(str(one))] = (
                f"step {one.step}: {one.reason}, and are those of a second training: a "
                "callback changes them after the step"
            )
            contradictions.remove(one)
            divergences.remove(one)
        gone = sorted(record_comparison.unlogged(left_out, logged_values(again.folder.metrics)))
        said += [
            f"cannot be verified: {name}, which training again does not log, nor did the "
            "run once it had been resumed"
            for name in gone
        ]
        apart = next(
            (one for one in divergences if one.stage in ("initial", *STAGES) and not one.altered),
            None,
        )
        if apart and apart.stage != "initial" and not args.coarse:
            same_code = not changed and not any(one.startswith("config.yaml") for one in altered)
            verdict["first"], words = _inspect_step(
                folder, composed, project, apart.step, changed=bool(unlike), same_code=same_code
            )
            said += words
        said += [
            f"the config differs: {path}: {shown(one)} there, {shown(two)} here"
            for path, one, two in unlike
        ]
        if (altered or divergences) and recorded and not (unlike or changed or foreign or apart):
            said.append(
                conclude(
                    again,
                    divergences,
                    altered=bool(altered or contradictions),
                    steps=summary.get("steps"),
                )
            )
    first = min(divergences, key=lambda divergence: divergence.step, default=None)
    parts = (
        None
        if first is None
        else {
            "step": first.step,
            "stage": first.stage,
            "layer": first.layer,
            "reason": first.reason,
        }
    )
    return {
        **verdict,
        "same": not divergences and not altered,
        "compared": comparison.compared,
        "parts": parts,
    }


def _nothing_to_compare(
    args: argparse.Namespace, folder: RunFolder, traced: Collection[int], every: int
) -> Problem | None:
    """Why there is nothing to compare though none of the wanted steps is among those `traced`.

    None if a finished run's results can be.
    """
    if not folder.trace.exists():
        return _no_trace(args, folder, traced=bool(every))
    without = f"no step has a line in the trace: trace.every_steps={every}"
    if args.steps is None:
        return (
            None
            if folder.summary.exists()
            else Problem(
                str(folder.path),
                f"{without}, and the run has not ended",
                hint="train it to the end",
            )
        )
    if not traced:
        return Problem(
            "--steps",
            without,
            args.steps,
            hint="without --steps, the weights and the results are compared",
        )
    return Problem(
        "--steps",
        f"no step up to there has a line in the trace: trace.every_steps={every}",
        args.steps,
        f"at least {min(traced)}",
    )


def _is_local(args: argparse.Namespace, folder: RunFolder) -> bool:
    """Whether a run is in its own folder, not in a copy from a bundle or a store."""
    return any(folder.path.is_relative_to(root) for root in (args.run, args.run_root))


def _no_trace(args: argparse.Namespace, folder: RunFolder, *, traced: bool) -> Problem:
    if not _is_local(args, folder):
        hint = (
            "a run's folder has it; tracking.log_checkpoint=true sends it to MLflow at the "
            "end of training"
            if traced
            else "train with trace.every_steps=1"
        )
        return Problem(args.run, "there is no trace to compare with", hint=hint)
    was = (
        "is missing, though the run was trained with one"
        if traced
        else "is missing: the run was trained without one"
    )
    command = (
        f"samewise train --config {shlex.quote(str(folder.config))} "
        f"--fresh{'' if traced else ' trace.every_steps=1'}"
    )
    return Problem(
        str(folder.trace), was, hint=f"`{command}` trains it again, beside this run, with a trace"
    )


def _require_one_process(composed: Composed, project: Project) -> None:
    """Raise a ConfigError if a run's strategy divides a model or a batch among processes in a way
    that one process cannot repeat to the bit.
    """
    from samewise.runner.training.components import make_part

    cfg = composed.cfg
    strategy = make_part(cfg, project, "strategy")
    if strategy.level != "R2" and strategy.processes(str(cfg.device), cfg.replicas) > 1:
        name = type(strategy).__name__.lower()
        hint = (
            "train it again with `samewise train --fresh`, and compare the two runs with "
            "`samewise diff`"
        )
        raise ConfigError(
            Problem(
                "strategy",
                f"`verify` trains again in one process, and strategy={name} needs several",
                name,
                "single or elastic",
                hint,
            )
        )


def _require_length(steps: int, last: int, unlike: Sequence[str]) -> None:
    """Raise a ConfigError if all that the overrides do is end training before the last step to
    compare: only a different summary would be found.
    """
    if unlike and steps < last and {"max_steps", "max_epochs"}.issuperset(unlike):
        hint = f"without {' and '.join(unlike)}, `--steps {steps}` compares the first {steps}"
        raise ConfigError(
            Problem(
                unlike[0],
                f"training would end after step {steps}, and steps up to {last} are to be compared",
                hint=hint,
            )
        )


def _inspect_step(
    folder: RunFolder,
    composed: Composed,
    project: Project,
    step: int,
    *,
    changed: bool,
    same_code: bool,
) -> tuple[dict[str, str] | None, list[str]]:
    """The first thing in which a step differs, and the reason in words."""
    from samewise.runner.config import saved
    from samewise.runner.training.build import build
    from samewise.runner.verify.step_inspection import explain_difference

    with (
        tempfile.TemporaryDirectory(prefix="samewise-verify-") as one,
        tempfile.TemporaryDirectory(prefix="samewise-verify-") as two,
    ):
        as_it_was = composed if not changed else saved.config_in(folder.config, QUIET)
        runs = [
            build(config, project, RunFolder(Path(place)))
            for config, place in ((as_it_was, one), *(((composed, two),) if changed else ()))
        ]
        for run in runs:
            run.callbacks.pop("throughput", None)
        try:
            words, first = explain_difference(
                folder, step, runs[0], runs[1] if changed else None, same_code=same_code
            )
        except Exception as error:  # report what is already known
            return None, [
                f"step {step} could not be examined closely: {type(error).__name__}: "
                f"{first_line(error)}"
            ]
    return {"kind": first.kind, "name": first.name} if first else None, words
