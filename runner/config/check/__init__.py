"""Finds every error of a config at once, before anything is trained.

A rule is a function that takes the config and yields problems: `settings` has those of the runner's
own keys (without torch), `components` those of every `_target_`, `unread` those of keys that
nothing reads, `commands` those of what a launcher runs, `machine` what this machine cannot do. To
add one, write it and put it into its file's `RULES`.
"""

import re
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from samewise.runner.config.check import components
from samewise.runner.config.check.settings import problems_in as settings_problems
from samewise.runner.config.compose import Composed
from samewise.runner.config.file_faults import NO_SUCH_CHOICE
from samewise.runner.config.origins import locate_problems
from samewise.runner.config.project import Project
from samewise.runner.config.tree import at
from samewise.runner.errors import ConfigError, Problem


def check(composed: Composed, project: Project) -> None:
    """Find the config's errors without building anything.

    ConfigError with all problems, those of composing included. Imports torch.
    """
    ConfigError.raise_all(problems(composed, project))


def problems(composed: Composed, project: Project) -> list[Problem]:
    """The problems that `check` raises."""
    from samewise.runner.config.check import commands, machine, unread

    whole = composed.whole
    listed = [
        *settings_problems(whole),
        *components.required_are_there(whole),
        *components.problems_in(whole, project),
        *commands.problems(composed, project),
        *machine.problems(composed.cfg),
        *unread.problems(composed),
    ]
    # The arguments of the choice are unknown, and so is the mode of a metric that is not set
    moot = tuple(
        f"{problem.path}." if problem.message == NO_SUCH_CHOICE else "evaluate.mode"
        for problem in composed.problems
        if problem.message == NO_SUCH_CHOICE or problem.path.startswith("evaluate.")
    )
    listed = [
        at_source(problem, composed.cfg) if problem.message == components.WRONG_TYPE else problem
        for problem in listed
        if not problem.path.startswith(moot)
    ]
    listed = (
        listed
        # A saved config does not record which file has set a value
        if composed.is_saved
        else locate_problems(listed, composed.overrides, composed.project)
    )
    # Of two equal problems the first counts, which is that of composing
    return list(
        {
            (problem.path, problem.message): problem
            for problem in reversed([*composed.problems, *listed])
        }.values()
    )[::-1]


def at_source(problem: Problem, cfg: DictConfig) -> Problem:
    """Move a wrong value's problem to the key that its own key refers to.

    For `dataset.train.decode: ${dataset.decode}`, that is `dataset.decode`.
    """
    node = (
        at(OmegaConf.to_container(cfg, resolve=False), problem.path)
        if problem.value is not ...
        else None
    )
    source = re.fullmatch(r"\$\{(\w[\w.]*)\}", node) if isinstance(node, str) else None
    return at_source(replace(problem, path=source[1]), cfg) if source else problem


def settings_are_sound(composed: Composed) -> bool:
    """Return whether the runner's own settings are valid.

    That is enough to look for a finished run, and to set variables before torch is imported.
    """
    return not composed.problems and not settings_problems(composed.whole)
