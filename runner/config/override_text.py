"""Parses the text of overrides with Hydra's grammar, and finds what is wrong with it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from samewise.runner.config import schema
from samewise.runner.config.annotations import expected_type, is_typed
from samewise.runner.errors import Problem, first_line
from samewise.runner.secrets import redact_values

LISTS = ("callbacks", "metrics", "param_groups", "initialise")
"""Groups of which several can be chosen: each choice adds to a mapping."""

ONE_CHOICE = (
    "experiment",
    "loss",
    "recipe",
    "model",
    "dataset",
    "order",
    "transforms",
    "optimizer",
    "scheduler",
    "precision",
    "compile",
    "strategy",
    "reproducibility",
    "checkpoint",
    "tracking",
    "launcher",
    "sweeper",
    "debug",
)
"""Groups of which one is chosen: the values of several would be mixed into one component."""

_PATTERN = re.compile(r"(\+*(?:[\w.]+\.)?(?:\w+_)?pattern)=([^'\"]+)")
"""A setting that is a regular expression, not quoted."""


_OPEN = re.compile(r"(evaluate\.also|tracking\.tags|reproducibility\.variables)[.=]")
"""Settings whose keys are the user's own: such a key is added without a +."""


def read_overrides(texts: Sequence[str]) -> tuple[list[Override], list[Problem]]:
    """The overrides that can be parsed and have one value, and a problem for each other."""
    parser = OverridesParser.create()
    good, problems = list[Override](), list[Problem]()
    # First, since each part would be reported as a fault of its own
    texts, split = remove_split_overrides(texts)
    problems += split
    for text in texts:
        if (pattern := _PATTERN.fullmatch(text)) and pattern[
            2
        ] != "null":  # a regular expression is text, but Hydra's grammar may parse it differently
            text = f"{pattern[1]}='{pattern[2]}'"
        try:
            (override,) = parser.parse_overrides([text])
            # Hydra accepts `=3`
            if not override.key_or_group:
                raise ValueError
        except (HydraException, ValueError) as error:
            problems.append(unreadable(text, error))
            continue
        if override.is_sweep_override():
            problems.append(
                Problem(
                    override.key_or_group,
                    "several values make a sweep; this command runs one experiment",
                    override.get_value_string(),
                    "one value",
                    "`samewise sweep` trains each of them; a list is "
                    f"{override.key_or_group}=[{override.get_value_string()}]",
                )
            )
        elif _OPEN.match(text):
            good.append(parser.parse_override(f"++{text}"))
        elif override.is_hydra_override() or override.key_or_group == "hydra":
            problems.append(
                Problem(
                    override.key_or_group,
                    "Hydra's own settings have no effect here",
                    hint="samewise only uses Hydra to compose configs",
                )
            )
        elif problem := removed(override):
            problems.append(problem)
        else:
            good.append(override)
    return good, problems


def removed(override: Override) -> Problem | None:
    """The problem if an override removes a setting that the schema defines."""
    if not override.is_delete():
        return None
    key = override.key_or_group
    experiment, (above, _, name) = OmegaConf.structured(schema.Experiment), key.rpartition(".")
    if (
        key in (*LISTS, *ONE_CHOICE)
        or (above and not is_typed(experiment, above))
        or name not in (OmegaConf.select(experiment, above) if above else experiment)
    ):
        return None
    expected = expected_type(experiment, key)
    return Problem(
        key,
        "cannot be removed: every experiment has this key",
        expected=expected,
        hint=f"write {key}=null"
        if expected.endswith(" or null")
        else f"set another value: {key}{'.KEY' if expected.startswith('a mapping') else ''}=VALUE",
    )


def repeated(overrides: Sequence[Override]) -> list[Problem]:
    """A warning for each key with several values, of which Hydra silently uses the last."""
    by_key: dict[str, list[str]] = {}
    for override in overrides:
        if not override.is_delete():
            by_key.setdefault(override.get_key_element().lstrip("+"), []).append(
                override.get_value_element_as_str()
            )
    repeats = {
        # A password is recognised by the name of its key
        key: [str(redact_values({key: value})[key]) for value in values]
        for key, values in by_key.items()
        if len({*values}) > 1
    }
    return [
        Problem(
            key,
            f"is set more than once, to {', '.join(first)} and {last}; the last, {last}, is used",
        )
        for key, (*first, last) in repeats.items()
    ]


def several_choices(group: str, names: Any) -> Problem | None:
    """The problem with a list of choices for a group that takes one; None if there is none."""
    if group not in ONE_CHOICE or not isinstance(names, list) or len(cast(list[Any], names)) < 2:
        return None
    hint = (
        "in a sweep values are separated by commas, without brackets: "
        f"{group}={','.join(map(str, cast(list[Any], names)))}"
    )
    if group == "tracking":
        hint = (
            "for several trackers write "
            f"tracking.report_to=[{','.join(map(str, cast(list[Any], names)))}]"
        )
    return Problem(group, "takes one choice, not a list of several", names, "one choice", hint)


def remove_split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Remove overrides that a shell split at the spaces of a list, with a problem for each.

    Examples are `metrics=[f1, auroc]` and `seed=1, 2`.
    """
    rest, whole, problems = list(overrides), list[str](), list[Problem]()
    while rest:
        joined = first = rest.pop(0)
        while rest and "=" in first and "=" not in rest[0] and _is_unfinished(joined):
            joined = f"{joined} {rest.pop(0)}"
        if joined == first:
            whole.append(first)
            continue
        key, _, value = joined.partition("=")
        problems.append(
            Problem(
                key,
                "the shell has split this at its spaces",
                joined,
                "one argument",
                f"quote it: '{joined}'"
                if value.startswith(("[", "{"))
                else f"write the values without spaces: {key}={value.replace(' ', '')}",
            )
        )
    return whole, problems


def _is_unfinished(text: str) -> bool:
    """Return whether an override ends with a comma, or within brackets."""
    opened, closed = (sum(map(text.count, brackets)) for brackets in ("[{(", "]})"))
    return text.endswith(",") or opened > closed


def has_several_values(text: str) -> bool:
    """Return whether an override makes a sweep.

    Examples: `a=1,2`, `range(1,5)`, `choice(...)`, `glob(...)`, `interval(...)`.
    """
    if not re.search(r"[,(]", text):
        return False
    try:
        return OverridesParser.create().parse_override(text).is_sweep_override()
    except (HydraException, ValueError):
        return False


def unreadable(text: str, error: Exception) -> Problem:
    """The problem with an override that Hydra's grammar does not accept."""
    key, sign, value = text.partition("=")
    if not key or not (sign or text.startswith("~")):
        name = text.strip("=")
        return Problem(
            "",
            "this is not an override",
            text,
            "KEY=VALUE or GROUP=CHOICE",
            "an experiment is named without its folder and .yaml: "
            f"experiment={Path(text).stem}; a run's own config: `samewise train --config {text}`"
            if text.endswith((".yaml", ".yml"))
            else f"a value is written {name}=VALUE, an experiment experiment={name}",
        )
    if re.fullmatch(r"[+~]*[\w./@-]+(\s+=\s*|=\s+)\S+", text):
        return Problem(
            key.strip(),
            "has spaces around the =",
            text,
            "KEY=VALUE",
            f"{key.strip()}={value.strip()}",
        )
    return Problem(
        key,
        f"cannot be read: {first_line(error).rstrip('.')}",
        text,
        "KEY=VALUE",
        "a list is [A,B]; quote what holds spaces, ,:{}[] or other than ASCII: 'key=\"a, b\"'",
    )
