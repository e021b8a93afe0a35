"""The metrics that determine the best checkpoints: `evaluate.monitor` and `evaluate.also`.

Imports neither torch nor mlflow.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from samewise.runner.config.schema import Mode
from samewise.runner.errors import Problem

LESS_IS_BETTER = re.compile(
    r"(^|[/_])(loss|error|perplexity|cer|wer|nats|bits|mse|mae|mape|rmse|distance)$"
)
MORE_IS_BETTER = re.compile(
    r"(^|[/_])(accuracy|top\d+|precision|recall|f1|auroc|kappa|matthews|miou|r2|pearson|spearman|psnr|map(_\d+)?|si_sdri?|sdri?)$"
)
_COMMON = (
    "loss",
    "accuracy",
    "accuracy_top5",
    "f1",
    "auroc",
    "precision",
    "recall",
    "average_precision",
    "map",
    "map_50",
    "cer",
    "wer",
    "si_sdri",
    "miou",
    "rmse",
    "mae",
    "r2",
    "psnr",
    "perplexity",
)


def mode_of(metric: str) -> Mode | None:
    """Return the better direction of a metric, if its name tells."""
    return (
        Mode.min
        if LESS_IS_BETTER.search(metric)
        else Mode.max
        if MORE_IS_BETTER.search(metric)
        else None
    )


def settle(cfg: DictConfig, overrides: Sequence[str] = (), before: Any = None) -> list[Problem]:
    """Keep the first metric in `evaluate.monitor`, move others to `evaluate.also`, set their modes.

    Args:
        cfg: Changed in place.
        overrides: The overrides of the command line.
        before: The file's own monitor, to which the file's mode belongs. A monitor among the
            overrides gets the mode of its own name.
    """
    earlier = [
        str(name)
        for name in (
            before if isinstance(before, list | ListConfig) else [before] if before else ()
        )
    ]
    set_here = {override.partition("=")[0].lstrip("+") for override in overrides}
    monitor: Any = OmegaConf.select(cfg, "evaluate.monitor", throw_on_resolution_failure=False)
    if monitor is None and OmegaConf.is_interpolation(cfg.evaluate, "monitor"):
        return []  # a reference that leads nowhere is reported separately
    names = (
        [monitor]
        if isinstance(monitor, str)
        else [str(name) for name in cast(list[Any], OmegaConf.to_container(monitor))]
        if isinstance(monitor, ListConfig)
        else []
    )
    if not names or len(set(names)) < len(names):
        # A sound metric, so that the rest of the config can be checked
        cfg.evaluate.monitor, cfg.evaluate.mode = "valid/loss", Mode.min
        return [
            Problem(
                "evaluate.monitor",
                "is not a metric, or a list of different ones",
                OmegaConf.to_container(monitor) if OmegaConf.is_config(monitor) else monitor,
                "SPLIT/METRIC, or [SPLIT/METRIC, ...]",
            )
        ]
    cfg.evaluate.monitor, problems = names[0], list[Problem]()
    metrics, in_file = (
        mode_of(names[0]),
        cfg.evaluate.mode if "evaluate.mode" not in set_here else None,
    )
    likely = [*earlier, *map(str, cfg.evaluate.also)]
    if cfg.evaluate.mode is None or (
        "evaluate.monitor" in set_here
        and "evaluate.mode" not in set_here
        and names[:1] != earlier[:1]
    ):
        cfg.evaluate.mode = metrics or Mode.min
        if metrics is None:
            problems.append(_unknown_mode(names[0], "write evaluate.mode=max, or min", likely))
    for name in names[1:]:
        if name in cfg.evaluate.also:
            continue
        # An experiment's own monitor keeps its mode beside further ones
        mode = in_file if [name] == earlier[:1] and in_file is not None else mode_of(name)
        if mode is None:
            problems.append(
                _unknown_mode(
                    name,
                    f"leave it out of the list, and write 'evaluate.also={{{name}: max}}', or min",
                    likely,
                )
            )
        else:
            with open_dict(cfg):
                cfg.evaluate.also[name] = mode
    return problems


def _unknown_mode(name: str, otherwise: str, likely: Sequence[str]) -> Problem:
    """The problem for a metric whose name does not tell its mode.

    It may be misspelt, above all one of the `likely` ones.
    """
    split, _, last = name.rpartition("/")
    own = [metric.rpartition("/")[2] for metric in likely if metric != name]
    suggestion = (
        get_close_matches(last, own, n=1)
        or [metric_name for metric_name in _COMMON if metric_name.startswith(last)]
        or get_close_matches(last, _COMMON, n=1)
    )
    return Problem(
        "evaluate.monitor",
        "its name does not say whether higher or lower is better",
        name,
        hint=f"did you mean '{split}/{suggestion[0]}'? If not, {otherwise}"
        if suggestion
        else otherwise,
    )
