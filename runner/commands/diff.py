"""Compare two runs: config, environment, code, metrics, and the first step that differs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samewise.runner.config import project as projects
from samewise.runner.config.tree import shown
from samewise.runner.errors import number_of
from samewise.runner.records import kept_sources, shapes, sources
from samewise.runner.records.files import (
    read_json,
)
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json
from samewise.runner.tracking.journal import last_evaluation, logged_values

if TYPE_CHECKING:
    from samewise.runner.records.folder import RunFolder
    from samewise.runner.verify.divergence import Divergence

EXAMPLES = """examples:
  samewise diff 3f2a 91bc
  samewise diff runs/resnet18_digits/3f2a9c81d0b4 other/resnet18_digits/3f2a9c81d0b4 --json
  samewise diff 3f2a                             the lines of your code that have changed since that run

exit codes with one RUN: 0 its code has not changed since; 1 it has
exit codes with two: 0 the same bits in all common steps, and the same metrics as far as both runs have them, or the same final weights and metrics if the
traces have no step in common; 1 they differ, a trace was altered, or there is nothing to compare; 2 the input was wrong
"""


_MOST_LINES = 60
"""Lines of code that are printed."""
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
_COMPARED = {
    "batch": "batches",
    "input": "inputs",
    "loss": "losses",
    "gradients": "gradients",
    "weights": "weights",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN", help=RUN)
    parser.add_argument(
        "second",
        metavar="RUN",
        nargs="?",
        help="another run; without it: only the code, as it is now",
    )
    parser.add_argument(
        "--run-root", type=Path, default=Path("runs"), help="where to look for runs (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import saved

    if args.second is None:
        return _compare_with_now(args, saved.find(args.first, run_root=args.run_root))
    pair = (
        saved.find(args.first, run_root=args.run_root),
        saved.find(args.second, run_root=args.run_root),
    )
    found = _compare(*pair)
    if args.json:
        print(to_json(found))
    else:
        _print(found)
    return 0 if found["same"] else 1


def _compare_with_now(args: argparse.Namespace, folder: RunFolder) -> int:
    """Print how the code differs from that of a run."""
    projects.find()  # makes its packages importable
    changed = sources.list_changes(folder.sources)
    lines = kept_sources.line_differences(folder.sources)
    if args.json:
        print(to_json({"same": not changed, "code": changed, "lines": lines}))
    else:
        _print_code(changed, lines, most=None)
    return 1 if changed else 0


def _compare(first: Any, second: Any) -> dict[str, Any]:
    from samewise.runner.config import saved
    from samewise.runner.config.fingerprint import identity
    from samewise.runner.config.tree import differences
    from samewise.runner.records import environment, roots, trace_reader
    from samewise.runner.verify.divergence import Divergence, comparable_stages, only_in
    from samewise.runner.verify.record_comparison import MEASURED

    folders = first, second
    (head, one), (other, two) = (trace_reader.read_trace_of(folder) for folder in folders)
    both = sorted(one.keys() & two.keys())
    digests = [
        trace_reader.algorithm_of(folder.trace, found) + _of_shards(found)
        for folder, found in zip(folders, (head, other), strict=True)
    ]
    apart = [only_in(head, other), only_in(other, head)] if both else [[], []]
    stages = comparable_stages(head, other)
    if any(apart) and (
        set(head["weights"]).isdisjoint(other["weights"])
        or not all("layers" in line for lines in (one, two) for line in lines.values())
    ):
        stages = tuple(stage for stage in stages if stage not in ("gradients", "weights"))
    config = [
        [path, a, b]
        for path, a, b in differences(
            *(identity(saved.config_in(folder.config).whole) for folder in folders)
        )
    ]
    divergence = _trace_divergence(
        folders, (head, other), (one, two), stages, [path for path, *_ in config]
    )
    logged = {
        name: (step, *values)
        for name, (step, *values) in _logged_apart(first, second).items()
        if not name.startswith(MEASURED) and (divergence is None or step < divergence.step)
    }
    between = [
        (step, name != "train/loss", name)
        for name, (step, *_) in logged.items()
        if name.startswith("train/")
    ]
    since = divergence.since if divergence else 0 if both else 1
    if since and between and (found := min(between))[0] >= since:
        step, _, name = found
        divergence = Divergence(
            step,
            "metric",
            name,
            "{} was logged as {!r} and as {!r}".format(name, *logged[name][1:]),
            since=since,
        )
    summaries = [read_json(folder.summary, shapes.SUMMARY) or {} for folder in folders]
    evaluated, finals = zip(
        *(
            _last_evaluation(folder, summary)
            for folder, summary in zip(folders, summaries, strict=True)
        ),
        strict=True,
    )
    metrics = {
        name: [finals[0].get(name), finals[1].get(name)]
        for name in sorted({*finals[0], *finals[1]})
    }
    differ = [
        name
        for name, pair in metrics.items()
        if None not in pair and not _same(*pair) and not name.startswith(MEASURED)
    ]
    steps, weights = (
        [summary.get(key) for summary in summaries] for key in ("steps", "weights_sha256")
    )
    ended = None not in weights and steps[0] == steps[1]
    same_metrics = not logged and not (evaluated[0] == evaluated[1] and differ)
    altered = [
        f"{folder.path}: {words}"
        for folder in folders
        if folder.trace.exists() and (words := roots.alterations(folder).get("trace"))
    ]
    return {
        "same": bool(both or ended)
        and not divergence
        and same_metrics
        and not altered
        and not any(apart)
        and not (ended and weights[0] != weights[1]),
        "config": config,
        "environment": environment.differences(
            *(read_json(folder.environment, shapes.ENVIRONMENT) or {} for folder in folders)
        ),
        "code": sources.describe_changes(*(sources.files_in(folder.sources) for folder in folders)),
        "lines": kept_sources.line_differences(first.sources, second.sources),
        "metrics": metrics,
        "evaluated": evaluated,
        "logged": {f"{name} at step {step}": values for name, (step, *values) in logged.items()},
        "same_metrics": same_metrics,
        "steps": len(both),
        "digests": digests,
        "compared": list(stages),
        "tensors": apart,
        "weights": {
            "step": steps[0],
            "same": weights[0] == weights[1],
            "traced": "weights" in stages and steps[0] in both,
        }
        if ended
        else None,
        "missing": [
            f"{folder.path}: {words}"
            for folder, lines in zip(folders, (one, two), strict=True)
            if (words := trace_reader.missing_start(lines))
        ],
        "altered": altered,
        "parts": asdict(divergence) if divergence else None,
    }


def _trace_divergence(
    folders: Sequence[Any],
    heads: Sequence[Any],
    traces: Sequence[Any],
    stages: Sequence[str],
    settings: Sequence[str],
) -> Divergence | None:
    """Where two runs' traces first differ, given their heads and lines, the stages to compare and
    the settings that differ.
    """
    from samewise.runner.verify.divergence import (
        Divergence,
        explain,
        first_divergence,
        other_start,
        same_start,
        unknown_since,
    )

    (head, other), (one, two) = heads, traces
    if start := other_start(head, other):
        return start
    both, journals = (
        sorted(one.keys() & two.keys()),
        [logged_values(folder.metrics) for folder in folders],
    )
    several = any(
        len((read_json(folder.environment, shapes.ENVIRONMENT) or {}).get("optimizers", ())) > 1
        for folder in folders
    )
    for step in both:
        lines = one[step], two[step]
        if not (found := first_divergence(head, *lines, other=other, stages=stages)):
            continue
        logged = _of_step(journals, step)
        since = unknown_since(step, both)
        known = same_start(head, other, step) or (
            step > both[0]
            and since == step
            and "weights" in stages
            and head["weights"] == other["weights"]
        )
        stage, layer, reason = explain(
            found, heads, lines, settings, logged=logged, several=several, known=known
        )
        if stage in ("loss", "gradients") and not known:  # what the step began with
            reason += "; or the weights before that step differ" + (
                ", which a trace does not record" if step == both[0] else ""
            )
        return Divergence(step, stage, layer, reason, since=since)
    return None


def _of_step(
    journals: Sequence[Mapping[tuple[int, str], float]], step: int
) -> dict[str, tuple[float, float]]:
    """What two runs both logged of a step's losses and gradient norms, by name and in order."""
    first, second = journals
    names = [
        name
        for at, name in first
        if at == step
        and name.startswith("train/")
        and not name.startswith("train/lr")
        and (step, name) in second
    ]
    return {name.removeprefix("train/"): (first[step, name], second[step, name]) for name in names}


def _logged_apart(first: Any, second: Any) -> dict[str, tuple[int, float, float]]:
    """The metrics that two runs logged with different values, by name: the first step at which they
    did, and the values.
    """
    one, two = (logged_values(folder.metrics) for folder in (first, second))
    found = dict[str, tuple[int, float, float]]()
    for step, name in sorted(one.keys() & two.keys()):
        if not _same(one[step, name], two[step, name]):
            found.setdefault(name, (step, one[step, name], two[step, name]))
    return found


def _last_evaluation(folder: Any, summary: Mapping[str, Any]) -> tuple[int, Mapping[str, float]]:
    """The step and metrics of a run's last evaluation.

    Of one that has not finished, those in its journal.
    """
    return (
        (summary["steps"], summary["metrics"]["final"])
        if summary.get("metrics")
        else last_evaluation(folder.metrics)
    )


def _verdict(found: dict[str, Any]) -> list[str]:
    """Describe what the traces show, and, where they do not show whether the runs agree, the logged
    metrics and the final weights, in lines.
    """
    parts = found["parts"]
    lines = (
        _common_steps(found)
        if found["steps"]
        else [
            "no steps in common"
            + ("" if parts or found["same_metrics"] else ", but metrics differ")
        ]
    )
    if parts and not found["steps"]:
        lines.append(
            f"diverges at {'or before ' if parts['step'] > 1 else ''}step {parts['step']}: "
            f"{parts['reason']}"
        )
    if (
        (end := found["weights"])
        and not any(found["tensors"])
        and (end["same"] is (parts is not None) or (parts is None and not end["traced"]))
    ):
        lines.append(
            f"the weights after step {end['step']}, by weights_sha256: "
            f"{'the same' if end['same'] else 'they differ'}"
        )
    return lines


def _common_steps(found: dict[str, Any]) -> list[str]:
    """Describe what the traces' common steps show, in lines."""
    from samewise.runner.verify.divergence import Divergence, describe_tensors

    parts, lines = found["parts"], list[str]()
    compared, left = (
        [words for stage, words in _COMPARED.items() if (stage in found["compared"]) is there]
        for there in (True, False)
    )
    one, two = found["digests"]
    if words := describe_tensors(found["tensors"], ("in the first run", "in the second run")):
        lines.append(words + ("" if left else "; those of the same name are compared"))
    if left:
        reason = (
            f"digests by {one} and by {two} cannot be compared"
            if one != two
            else "the traces do not have digests of the same names"
        )
        lines.append(
            f"{reason}, so nothing is known about {_listed(left)}; only "
            f"{_listed(compared)} are compared"
        )
    if parts is None:
        what, but = (
            _listed(compared) if left else "bits",
            "" if found["same_metrics"] else ", but metrics differ",
        )
        lines.append(f"the same {what} in all {found['steps']} common steps{but}")
    else:
        lines.append(f"diverges at {Divergence(**parts)}")
    return lines


def _of_shards(head: Mapping[str, Any]) -> str:
    return f" of {head['shards']} shards" if "shards" in head else ""


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _print(found: dict[str, Any]) -> None:
    print("config:      " + ("the same" if not found["config"] else "differs"))
    for path, one, two in found["config"]:
        print(f"  {path}: {shown(one)} | {shown(two)}")
    print("environment: " + ("the same" if not found["environment"] else "differs"))
    for line in found["environment"]:
        print(f"  {line}")
    if found["code"]:
        _print_code(found["code"], found["lines"], most=_MOST_LINES)
    for key in ("metrics", "logged"):
        for name, pair in found[key].items():
            print(
                f"  {name:<24} {' | '.join(_numbers(*pair))}   "
                f"{_differs(*pair, compared=key == 'logged' or len({*found['evaluated']}) == 1)}".rstrip()
            )
    for line in (*found["missing"], *found["altered"]):
        print(f"  {line}")
    for line in _verdict(found):
        print(f"trace:       {line}")


def _print_code(changed: Sequence[str], lines: Mapping[str, str], *, most: int | None) -> None:
    """Print which code differs, and how, in at most so many lines; in colours on a terminal."""
    from rich.text import Text

    from samewise.runner.records.console import PlainConsole

    print("code:        " + ("differs" if changed else "the same"))
    for line in changed:
        print(f"  {line}")
    console, text = PlainConsole(highlight=False, soft_wrap=True), _lines_of_code(lines)
    for line in text[:most]:
        console.print(Text(line, _COLOURS.get(line[:1], "")))
    if most and (left := len(text) - most) > 0:
        print(f"  {number_of(left, 'more line')} of code: --json shows all")


def _lines_of_code(lines: Mapping[str, str]) -> list[str]:
    said = [
        f"{label}: {text}" if text == kept_sources.NOT_KEPT else text
        for label, text in lines.items()
    ]
    return "\n".join(said).splitlines()


def _same(one: float | None, two: float | None) -> bool:
    return repr(one) == repr(two)  # also if both are NaN


def _differs(one: float | None, two: float | None, *, compared: bool) -> str:
    """Whether two values differ, in a word.

    What is not `compared`, since one is missing or they are of different steps, does not.
    """
    return (
        ""
        if _same(one, two)
        else "in one run only"
        if one is None or two is None
        else "differs"
        if compared
        else "after other steps"
    )


def _numbers(*values: float | None) -> list[str]:
    """Two numbers to six digits, or to all if they differ only in later ones."""
    short = ["-" if value is None else f"{value:.6g}" for value in values]
    return short if _same(*values) or len(set(short)) > 1 else list(map(repr, values))
