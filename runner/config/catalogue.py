"""Lists groups, choices and experiments, each with its description."""

import ast
import inspect
import re
import textwrap
from functools import cache
from itertools import pairwise

from samewise.runner.config.compose import Composed
from samewise.runner.config.loader import Loader
from samewise.runner.config.project import Project
from samewise.runner.config.schema import Experiment
from samewise.runner.errors import number_of


def choices_of(group: str, *, project: Project) -> dict[str, str]:
    """Each choice of a group with the first comment in its file."""
    loader = Loader(project)
    return {name: _comment(loader, f"{group}/{name}") for name in loader.choices_of(group)}


def title_of(composed: Composed) -> str:
    """Return what the composed experiment's settings are for: its file's first comment, or ""."""
    experiment = composed.choices.get("experiment")
    return _comment(Loader(composed.project), f"experiment/{experiment}") if experiment else ""


def group_summaries(project: Project) -> dict[str, str]:
    """Each group with the description of its key in the schema and its number of choices."""
    about = field_summaries(Experiment) | GROUPS
    return {
        group: f"{about.get(group, '')} ({number_of(len(names), 'choice')})".lstrip()
        for group, names in Loader(project).groups().items()
    }


GROUPS = {
    "experiment": "Complete experiments, each with the result to expect.",
    "debug": "Any experiment, reduced in size.",
    "debug/sizes": "What debug=tiny sets for each recipe.",
    "loss": "The loss of the recipes that take one "
    "(recipe=classification); none: the recipe's own.",
    "metrics": "More metrics of an evaluation, for the recipes that take them "
    "(recipe=classification); several as metrics=[f1,auroc].",
    "order": "The order of samples in training; none: `loader.shuffle` decides.",
    "checkpoint": "When checkpoints are written and which are kept.",
    "tracking": "Where metrics, configs and pictures go.",
    "reproducibility": "Determinism, and what to do where it is not possible.",
}
"""Groups that are not a key of the schema, or whose key is described elsewhere."""


@cache
def field_summaries(kind: type) -> dict[str, str]:
    """The docstring of each field of a settings class: the string literal below it."""
    # Python keeps no docstrings of fields
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        line.target.id: " ".join(str(after.value.value).split())
        for line, after in pairwise(body.body)
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


_FOR_PROGRAMS = re.compile(r"@package|yaml-language-server:")


def _comment(loader: Loader, config: str) -> str:
    """A config file's first comment, not counting `# @package` and editors' directives."""
    return next(
        (
            line.lstrip("# ").strip()
            for line in loader.text_of(config).splitlines()[:20]
            if line.startswith("#") and not _FOR_PROGRAMS.search(line)
        ),
        "",
    )
