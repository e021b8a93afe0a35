"""The metrics by which the best checkpoints are kept: `evaluate.monitor`, and those of `evaluate.also`. Imports neither torch nor mlflow."""

from __future__ import annotations

import re
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from samewise.runner.config.schema import Mode
from samewise.runner.errors import Problem

LESS_IS_BETTER = re.compile(r"(^|[/_])(loss|error|perplexity|cer|wer|nats|bits)$")
MORE_IS_BETTER = re.compile(r"(^|[/_])(accuracy|top\d+|precision|recall|f1|auroc|kappa|matthews|map|si_sdri?|sdri?)$")


def better(metric: str) -> Mode | None:
    """Which way a metric improves, as far as its name tells."""
    return Mode.min if LESS_IS_BETTER.search(metric) else Mode.max if MORE_IS_BETTER.search(metric) else None


def settle(cfg: DictConfig) -> list[Problem]:
    """Of several metrics in `evaluate.monitor`, leave the first there and put the others into `evaluate.also`; the config is changed in place."""
    given: Any = OmegaConf.select(cfg, "evaluate.monitor", throw_on_resolution_failure=False)
    if isinstance(given, str) or given is None:
        return []
    names = [str(name) for name in cast(list[Any], OmegaConf.to_container(given))] if isinstance(given, ListConfig) else []
    if not names or len(set(names)) < len(names):
        shown = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
        cfg.evaluate.monitor = "valid/loss"
        return [Problem("evaluate.monitor", "is not a metric, or a list of different ones", shown, "SPLIT/METRIC, or [SPLIT/METRIC, ...]")]
    cfg.evaluate.monitor, found = names[0], list[Problem]()
    for name in names[1:]:
        if name in cfg.evaluate.also:
            continue
        if (mode := better(name)) is None:
            hint = f"leave it out of the list, and write '+evaluate.also={{{name}: max}}', or min"
            found.append(Problem("evaluate.monitor", f"which way {name} improves cannot be told by its name", names, hint=hint))
        else:
            with open_dict(cfg):
                cfg.evaluate.also[name] = mode
    return found
