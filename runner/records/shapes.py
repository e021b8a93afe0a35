"""Shapes of the files of runs and sweeps, which `files.read_json` checks.

A shape covers what code relies on; a file that does not fit is reported as damaged.

    a type               a value of it; an int is a float too, a bool is neither
    a tuple              any of several shapes
    a frozenset          one of several strings
    a pattern            text that matches it
    [shape]              a list
    {str: shape}         a mapping with any names
    {"name": shape}      a mapping with these names; "name?" may be missing
"""

import re
from typing import Any

DIGEST = re.compile("[0-9a-f]{16}")
SHA256 = re.compile("[0-9a-f]{64}")
HEX_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-]\d+|-?inf|nan")
NUMBER = (float, frozenset(("NaN", "Infinity", "-Infinity")))
"""A float; NaN and the infinities, which JSON lacks, are written as strings."""
NUMBERS = {str: NUMBER}
TEXTS = {str: str}

SUMMARY = {
    "status": str,
    "level": str,
    "weights_sha256": SHA256,
    "steps": int,
    "stopped_early?": (str, None),
    "metrics": {
        "final": NUMBERS,
        "best": NUMBERS,
        "monitor": str,
        "also?": {str: NUMBERS},
        "evaluated?": str,
    },
    "evaluations?": {str: {"step": int, "samples": int, "time_ms": int, "metrics": NUMBERS}},
    "mlflow_run_id?": (str, None),
    "timings": {"training_s": float, "step_ms": float},
    "trace_sha256?": (SHA256, None),
    "checkpoints_sha256?": {str: SHA256},
}
ENVIRONMENT = {
    "decides?": dict,
    "device?": {"kind?": str},
    "data?": {str: {"classes?": [str], "category_ids?": [int], "size?": int}},
    "git?": dict,
    "versions?": dict,
    "code?": TEXTS,
    "code_state?": str,
    "code_used?": [str],
    "libraries?": {str: (str, None)},
    "fingerprint?": str,
    "level?": str,
    "total_steps?": int,
}
SOURCES = {"config?": str, "files?": {str: TEXTS}, "texts?": {str: SHA256}}
TAGS = {str: (str, float, bool, None)}
NOTES = {"name?": str, "tags?": {str: (str, None)}}
TRACKING: dict[str, Any] = {
    "store?": str,
    "experiment_id?": (str, None),
    "intent?": (str, None),
    "run_id?": (str, None),
    "sent?": {str: int},
    "status?": (str, None),
    "ended?": (str, None),
    "last_ms?": int,
    "described?": (str, None),
    "files?": {str: [int]},
    "model?": (str, None),
    "registered?": {str: str},
}
TRACKING["others?"] = {str: dict(TRACKING)}
TENSORBOARD = {"written": {str: [int]}}
WANDB = {"id": str, "sent": {str: int}, "status": (str, None)}
MANIFEST = {
    "step": int,
    "steps_per_epoch?": int,
    "total_steps?": int,
    "sha256": SHA256,
    "content?": SHA256,
    "weights?": (DIGEST, None),
    "metrics?": NUMBERS,
}

TRACE_HEAD = {
    "format": int,
    "algorithm?": str,
    "shards?": int,
    "gradients": [str],
    "weights": [str],
    "renamed?": [str],
    "initial?": {"step": int, "weights": str},
}
TRACE_LINE = {
    "step": int,
    "batch": DIGEST,
    "input": DIGEST,
    "loss": HEX_FLOAT,
    "gradients": DIGEST,
    "weights": DIGEST,
    "chain": DIGEST,
    "layers?": {"gradients": str, "weights": str},
}
JOURNAL_LINE = (
    {"time_ms": int, "step": int, "metrics": NUMBERS},
    {"time_ms": int, "status": str},
)

SWEEP = {
    "id": str,
    "name": str,
    "overrides": [str],
    "made?": float,
    "root": str,
    "packages": [str],
    "configs": [str],
    "launcher": {"_target_": str},
    "sweeper": {"_target_": str, "objectives?": ({str: str}, None)},
    "tracking": {"enabled": bool, "uri": str},
    "run_root": str,
    "refused?": str,
}
POINT = {
    "number": int,
    "setting": int,
    "seed": (str, None),
    "values": TEXTS,
    "overrides": [str],
    "name": str,
    "fingerprint": str,
    "folder": str,
    "monitor": str,
    "mode": frozenset({"min", "max"}),
    "needs": dict,
}
WORD = {
    "began?": float,
    "first_began?": float,
    "spent_s?": float,
    "ended?": float,
    "exit_code?": int,
    "tries?": int,
    "pid?": int,
    "host?": str,
    "said?": str,
    "reason?": str,
    "pruned?": str,
    "refused?": bool,
    "busy?": bool,
}
SUBMISSION = {"points": [int], "job?": str, "variables?": [TEXTS]}


def with_numbers(value: Any, shape: Any) -> Any:
    """Return the value with floats in place of the strings for NaN and the infinities."""
    if shape is NUMBER:
        return float(value) if isinstance(value, str) else value
    if not isinstance(shape, dict):
        return value
    inner = (
        dict.fromkeys(value, shape[str])
        if str in shape
        else {name.removesuffix("?"): x for name, x in shape.items()}
    )
    return {key: with_numbers(item, inner.get(key, object)) for key, item in value.items()}


def describe_misfit(value: Any, shape: Any, at: str = "") -> str:
    """Describe how a value differs from a shape; empty if it fits.

    Args:
        value: The value.
        shape: The shape.
        at: The value's place in the file, for the message.
    """
    if isinstance(shape, tuple):
        # The first of several shapes is the usual one, which the message is about
        misfit = describe_misfit(value, shape[0], at)
        return misfit if misfit and all(describe_misfit(value, x, at) for x in shape[1:]) else ""
    if isinstance(shape, frozenset):
        return (
            ""
            if isinstance(value, str) and value in shape
            else _type_mismatch(at, value, f"one of {', '.join(sorted(map(str, shape)))}")
        )
    if isinstance(shape, re.Pattern):
        return (
            ""
            if isinstance(value, str) and shape.fullmatch(value)
            else _type_mismatch(at, value, "in the form that samewise writes")
        )
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _type_mismatch(at, value, "a list")
        return next(
            (
                misfit
                for number, item in enumerate(value)
                if (misfit := describe_misfit(item, shape[0], f"{at}[{number}]"))
            ),
            "",
        )
    if isinstance(shape, dict):
        return _misfit_of_mapping(value, shape, at)
    fits = (
        value is None
        if shape is None
        else isinstance(value, _KINDS.get(shape, shape))
        # True is an int in Python
        and (shape is object or not isinstance(value, bool) or shape is bool)
    )
    if fits and isinstance(value, int) and shape in (int, float) and abs(value) >= 2**63:
        return f"{at or 'it'} is too large"
    return "" if fits else _type_mismatch(at, value, _NAMES.get(shape, "nothing"))


def _misfit_of_mapping(value: Any, shape: dict[Any, Any], at: str) -> str:
    if not isinstance(value, dict):
        return _type_mismatch(at, value, "a mapping")
    if str in shape:
        return next(
            (
                misfit
                for name, item in value.items()
                if (misfit := describe_misfit(item, shape[str], f"{at}.{name}".lstrip(".")))
            ),
            "",
        )
    for name, inner in shape.items():
        key, place = name.removesuffix("?"), f"{at}.{name.removesuffix('?')}".lstrip(".")
        if key not in value:
            if not name.endswith("?"):
                return f"{place} is missing"
        elif misfit := describe_misfit(value[key], inner, place):
            return misfit
    return ""


_KINDS: dict[Any, Any] = {float: (int, float)}
_NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}


def _type_mismatch(at: str, value: Any, expected: str) -> str:
    return f"{at or 'it'} is {_NAMES.get(type(value), 'something else')}, not {expected}"
