"""Finds keys that nothing reads in `dataset` and `transforms`, where any key is allowed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from omegaconf import OmegaConf

from samewise.runner.config.compose import Composed
from samewise.runner.config.origins import OURS, locate_problems, own_defaults, set_at
from samewise.runner.config.schema import SPLITS, splits_in
from samewise.runner.config.tree import at
from samewise.runner.errors import Problem, did_you_mean

_READ = {
    "dataset": SPLITS,
    "transforms": ("train", "eval"),
    "transforms.train": ("sample", "batch"),
    "transforms.eval": ("sample", "batch"),
}
"""What the runner itself reads there. Any other key is for references to it."""


def problems(composed: Composed) -> list[Problem]:
    """Return the user's unread keys that are spelled like an existing one.

    A key that a file of samewise's own sets is not misspelt.
    """
    return _unread_keys(composed, alike=True)


def cautions(composed: Composed) -> list[Problem]:
    """The user's other unread keys."""
    return locate_problems(
        [
            replace(problem, hint=f"leave it out, or refer to it: ${{{problem.path}}}")
            for problem in _unread_keys(composed, alike=False)
        ],
        composed.overrides,
        composed.project,
    )


def _unread_keys(composed: Composed, *, alike: bool) -> list[Problem]:
    """The unread keys that the user set, in a file or by an override.

    Samewise's own data sets provide values that not every model uses.
    """
    splits = [f"dataset.{name}" for name in splits_in(composed.cfg.dataset)]
    candidates = [
        problem
        for problem in _candidates(OmegaConf.to_container(composed.cfg, resolve=False))
        if problem.path not in splits
    ]
    users = composed.project.configs or any(
        re.match(r"\+*(dataset|transforms)\.", override) for override in composed.overrides
    )
    if not candidates or not users or composed.is_saved:
        return []
    candidates = [
        problem
        for problem in candidates
        if not (set_at(problem.path, composed.set_by) or OURS).startswith(OURS)
    ]
    # debug=tiny sets sizes that not every choice reads: an experiment made from such a run has them
    chosen = [*(text for text in composed.overrides if not text.startswith("debug=")), "debug=tiny"]
    defaults = (
        own_defaults(chosen, project=composed.project)
        if any(problem.hint for problem in candidates)
        else set[str]()
    )
    return [
        problem
        for problem in candidates
        if (bool(problem.hint) and problem.path not in defaults) is alike
    ]


def _candidates(whole: Any) -> Iterator[Problem]:
    read = {
        name for text in re.findall(r"\$\{[^}]*\}", str(whole)) for name in re.findall(r"\w+", text)
    }
    for path, keys_read in _READ.items():
        node = at(whole, path)
        keys = cast(Mapping[str, Any], node) if isinstance(node, Mapping) else {}
        for key, value in keys.items():
            if key not in keys_read and key not in read:
                yield Problem(
                    f"{path}.{key}",
                    "nothing reads this key",
                    value,
                    hint=did_you_mean(key, {*keys_read, *keys} - {key}),
                )
