"""Compares two runs: config, environment, code, metrics, and the first step that differs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from samewise.runner.config import saved
from samewise.runner.config.fingerprint import finds_data, identity, named_contents
from samewise.runner.config.tree import differences
from samewise.runner.records import environment, kept_sources, shapes, sources, trace_reader
from samewise.runner.records.files import read_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.trace_reader import Steps
from samewise.runner.results import Differences
from samewise.runner.tracking.journal import last_evaluation, logged_values
from samewise.runner.verify.divergence import (
    Divergence,
    comparable_stages,
    describe_tensors,
    only_in,
    trace_divergence,
)
from samewise.runner.verify.record_comparison import MEASURED

_COMPARED = {
    "batch": "batches",
    "input": "inputs",
    "loss": "losses",
    "gradients": "gradients",
    "weights": "weights",
}


def compare(first: RunFolder, second: RunFolder) -> Differences:
    """Compare two runs by their records, without training."""
    folders = first, second
    spans, common = (Steps(), Steps()), Steps()
    (head, trace), (other, other_trace) = map(trace_reader.read_trace_of, folders, spans)
    tensors = [only_in(head, other), only_in(other, head)] if head and other else [[], []]
    stages = comparable_stages(head, other)
    if any(tensors) and (
        # A line's digest of all tensors says nothing about those that both models have
        set(head["weights"]).isdisjoint(other["weights"])
        or not all(
            "layers" in line
            for folder in folders
            for line in trace_reader.read_trace(folder.trace)[1]
        )
    ):
        stages = tuple(stage for stage in stages if stage not in ("gradients", "weights"))
    configs = [saved.config_in(folder.config) for folder in folders]
    config = differences(*(identity(config.whole) for config in configs))
    choices = [(config.whole, config.sources) for config in configs]
    divergence = trace_divergence(
        folders,
        (head, other),
        (trace, other_trace),
        common,
        stages=stages,
        settings=[path for path, _, _ in config],
    )
    if not common.total:
        tensors, stages = [[], []], comparable_stages(head, other)
    logged = {
        name: values
        for name, values in _logged_apart(first, second).items()
        # After the traces part, metrics differ anyway
        if not name.startswith(MEASURED) and (divergence is None or values[0] < divergence.step)
    }
    divergence = _earlier_metric(logged, divergence, since=0 if common.total else 1)
    surroundings = environment.differences(
        *(read_json(folder.environment, shapes.ENVIRONMENT) or {} for folder in folders)
    )
    places = [x for x in differences(*(config.whole for config in configs)) if finds_data(x[0])]
    summaries = [read_json(folder.summary, shapes.SUMMARY) or {} for folder in folders]
    (at, metrics_there), (at_other, metrics_here) = (
        (summary["steps"], summary["metrics"]["final"])
        if summary.get("metrics")
        # From the journal if it is unfinished
        else last_evaluation(folder.metrics)
        for folder, summary in zip(folders, summaries, strict=True)
    )
    metrics = {
        name: (metrics_there.get(name), metrics_here.get(name))
        for name in sorted({*metrics_there, *metrics_here})
    }
    differ = [
        name
        for name, pair in metrics.items()
        if None not in pair and repr(pair[0]) != repr(pair[1]) and not name.startswith(MEASURED)
    ]
    steps, weights = (
        [summary.get(key) for summary in summaries] for key in ("steps", "weights_sha256")
    )
    # Final weights are comparable after as many steps
    ended = None not in weights and steps[0] == steps[1]
    same_metrics = not logged and not (at == at_other and differ)
    result = Differences(
        same=bool(common.total or ended)
        and not divergence
        and same_metrics
        and not any(tensors)
        and not (ended and weights[0] != weights[1]),
        config=[
            *((path, *named_contents(path, values, choices)) for path, *values in config),
            # Where the data are decides nothing, unless they differ
            *(x for x in places if any(line.startswith("data.") for line in surroundings)),
        ],
        environment=surroundings,
        code=sources.describe_changes(*(sources.files_in(folder.sources) for folder in folders)),
        lines=kept_sources.line_differences(first.sources, second.sources),
        metrics=metrics,
        evaluated=(at, at_other),
        logged={
            f"{name} at step {step}": (there, here) for name, (step, there, here) in logged.items()
        },
        same_metrics=same_metrics,
        steps=common.total,
        digests=[
            trace_reader.algorithm_of(folder.trace, start)
            + (f" of {start['shards']} shards" if "shards" in start else "")
            for folder, start in zip(folders, (head, other), strict=True)
        ],
        compared=stages,
        tensors=tensors,
        weights={
            "step": steps[0],
            "same": weights[0] == weights[1],
            "traced": "weights" in stages and steps[0] in common,
        }
        if ended
        else None,
        missing=[
            f"{folder.path}: {message}"
            for folder, span in zip(folders, spans, strict=True)
            if (message := trace_reader.missing_start(span))
        ],
        parts=divergence and asdict(divergence),
    )
    return replace(result, messages=_describe_traces(result))


def _earlier_metric(
    logged: Mapping[str, tuple[int, float, float]], divergence: Divergence | None, *, since: int
) -> Divergence | None:
    """Return the divergence, or an earlier metric that differs between two traced steps.

    Args:
        logged: The first difference of each metric: its step and both values.
        divergence: The first difference of the traces.
        since: The first step that no trace compares, if there is no divergence.
    """
    since = divergence.since if divergence else since
    between = [
        # Of a step's metrics, its loss comes first
        (step, name != "train/loss", name)
        for name, (step, _, _) in logged.items()
        if name.startswith("train/")
    ]
    if not since or not between or (earliest := min(between))[0] < since:
        return divergence
    step, _, name = earliest
    _, there, here = logged[name]
    return Divergence(
        step, "metric", name, f"{name} was logged as {there!r} and as {here!r}", since=since
    )


def _logged_apart(first: RunFolder, second: RunFolder) -> dict[str, tuple[int, float, float]]:
    """Return the first difference of each metric that both runs logged: its step and values."""
    values, other_values = (logged_values(folder.metrics) for folder in (first, second))
    differing = dict[str, tuple[int, float, float]]()
    for step, name in sorted(values.keys() & other_values.keys()):
        # By `repr`, so that NaN equals NaN
        if repr(values[step, name]) != repr(other_values[step, name]):
            differing.setdefault(name, (step, values[step, name], other_values[step, name]))
    return differing


def _describe_traces(result: Differences) -> list[str]:
    """Describe what the traces show, and the final weights where the traces do not show them."""
    parts = result.parts
    lines = (
        _common_steps(result)
        if result.steps
        else [
            "no steps in common" + ("" if parts or result.same_metrics else ", but metrics differ")
        ]
    )
    if parts and not result.steps:
        lines.append(
            f"diverges at {'or before ' if parts['step'] > 1 else ''}step {parts['step']}: "
            f"{parts['reason']}"
        )
    if (
        (end := result.weights)
        and not any(result.tensors)
        and (end["same"] is (parts is not None) or (parts is None and not end["traced"]))
    ):
        lines.append(
            f"the weights after step {end['step']}, by weights_sha256: "
            f"{'the same' if end['same'] else 'they differ'}"
        )
    return lines


def _common_steps(result: Differences) -> list[str]:
    """Describe what the traces' common steps show."""
    parts, lines = result.parts, list[str]()
    compared, missing = (
        [message for stage, message in _COMPARED.items() if (stage in result.compared) is there]
        for there in (True, False)
    )
    digest, other_digest = result.digests
    if message := describe_tensors(result.tensors, ("in the first run", "in the second run")):
        lines.append(message + ("" if missing else "; those of the same name are compared"))
    if missing:
        reason = (
            f"digests by {digest} and by {other_digest} cannot be compared"
            if digest != other_digest
            else "the traces do not have digests of the same names"
        )
        lines.append(
            f"{reason}, so nothing is known about {_listed(missing)}; only "
            f"{_listed(compared)} are compared"
        )
    if parts is None:
        what, but = (
            _listed(compared) if missing else "bits",
            "" if result.same_metrics else ", but metrics differ",
        )
        lines.append(f"the same {what} in all {result.steps} common steps{but}")
    else:
        lines.append(f"diverges at {Divergence(**parts)}")
    return lines


def _listed(items: Sequence[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"
