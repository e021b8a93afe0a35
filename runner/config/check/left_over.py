"""Finds arguments that a choice has set for its component although `_target_` names a different one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import yaml

from samewise.runner.config.check.components import NO_SUCH_ARGUMENT
from samewise.runner.config.compose import Composed
from samewise.runner.config.loader import config_loader, groups, text_of
from samewise.runner.config.slots import KINDS
from samewise.runner.errors import Problem


def merge_left_over(found: Sequence[Problem], composed: Composed) -> list[Problem]:
    """Merge the problems of arguments that a choice set for a different component into one problem per choice."""
    told = list(found)
    for group, choice, keys, others in [] if composed.is_saved else _replaced_groups(composed, {problem.path.partition(".")[0] for problem in found}):
        paths = {f"{group}.{key}" for key in keys}
        left = [problem for problem in told if problem.path in paths and problem.message.endswith(NO_SUCH_ARGUMENT)]
        if not left:
            continue
        names = ", ".join(problem.path.rpartition(".")[2] for problem in left)
        hint = (
            f"choose {group}={others[0]}; in a file: `- override /{group}: {others[0]}`"
            if others
            else f"put the _target_ and its arguments into a file of your own, CONFIGS/{group}/NAME.yaml, and choose that; "
            f"or remove what is left over by {' '.join(f'~{problem.path}' for problem in left)}"
        )
        target = composed.whole[group]["_target_"]
        words = f"does not take what is left over from {group}={choice}: {names}"
        told[told.index(left[0])] = Problem(f"{group}._target_", words, target, hint=hint)
        told = [problem for problem in told if problem not in left]
    return told


def _replaced_groups(composed: Composed, wrong: set[str]) -> Iterator[tuple[str, str, Iterable[str], list[str]]]:
    """Groups, among those with problems, whose component is no longer that of the choice's file.

    Yields the group, its choice, the keys that the choice's file sets, and the choices whose component is the one that is named now.
    """
    loader = config_loader(composed.project)
    for group, choice in composed.choices.items():
        if group not in KINDS or group not in wrong or "_target_" not in (composed.whole.get(group) or {}):
            continue
        target, sets = composed.whole[group]["_target_"], yaml.safe_load(text_of(loader, f"{group}/{choice}")) or {}
        if sets.get("_target_", target) != target:
            texts = {name: yaml.safe_load(text_of(loader, f"{group}/{name}")) or {} for name in groups(loader)[group]}
            yield group, choice, sets, [name for name, text in texts.items() if text.get("_target_") == target]
