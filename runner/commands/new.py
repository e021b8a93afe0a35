"""Write an experiment file from a run, or from an experiment and overrides."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from samewise.runner.commands import PROJECT, RUN_ROOT, TRUST, project_from
from samewise.runner.errors import ConfigError
from samewise.runner.records import trust
from samewise.runner.records.files import require_writable

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.config.project import Project

ARGUMENTS = {
    "name": {"metavar": "NAME", "help": "the experiment's name, for `experiment=NAME`"},
    "overrides": {
        "nargs": "*",
        "metavar": "OVERRIDE",
        "help": "what to change; for a run, values only: KEY=VALUE",
    },
    "--from": {
        "dest": "source",
        "required": True,
        "metavar": "RUN|EXPERIMENT",
        "help": "an experiment; or a run: its folder, the start of its fingerprint, or its MLflow "
        "run id",
    },
    **RUN_ROOT,
    **PROJECT,
    **TRUST,
}
EXAMPLES = """\
The file goes to experiment/NAME.yaml in your project's own folder of configs ([tool.samewise] configs; `samewise init` makes a project). It builds on the
run's experiment, and contains only what differs; settings for where runs are kept and recorded (run_root, device, tracking, launcher, sweeper) are left out.
The new experiment has the fingerprint of the run or experiment it is made from, which is checked: the same bits, in a folder with the new name.

examples:
  samewise new best --from 3f2a                                           after `samewise runs --sort valid/accuracy`
  samewise new second_seed --from 3f2a seed=1
  samewise init lab --from 3f2a                                           a project, with the run's code
  samewise new small --from resnet18_digits model.width=8 optimizer=adamw optimizer.lr=0.003"""


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config import as_experiment

    project = project_from(args)
    file = _place(args.name, project)
    composed, comment = _compose_source(args, project)
    schema_line = (
        "yaml-language-server: "
        f"$schema={os.path.relpath(project.root / '.schema' / 'experiment.json', file.parent)}"
    )
    header = [comment, *([schema_line] if (project.root / ".schema").is_dir() else [])]
    require_writable(
        "NAME", file.parent, hint="--config-dir FOLDER names another folder of configs"
    )
    text = as_experiment.render(composed, args.name, project=project, head=header)
    as_experiment.save(text, file, composed, name=args.name, project=project)
    options = [
        word
        for name, values in (("--package", args.package), ("--config-dir", args.config_dir))
        for value in values
        for word in (name, value)
    ]
    print(
        f"wrote {os.path.relpath(file)}\nnext:\n  "
        f"{shlex.join(['samewise', 'train', f'experiment={args.name}', *options])}"
    )
    return 0


def _place(name: str, project: Project) -> Path:
    """Return the experiment's file in the project's own config folder.

    Raises:
        ConfigError: The project has no config folder, or the name is not valid or is taken.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    folders = sorted(project.configs, key=project.outside_configs.__contains__)
    ConfigError.raise_if(
        not folders,
        "",
        "your project has no config folder to write the experiment to",
        hint='configs = "configs" under [tool.samewise] in pyproject.toml, or --config-dir '
        "FOLDER; `samewise init` makes a project",
    )
    # Hydra's grammar reads some names as a number, null or a boolean
    ConfigError.raise_if(
        not re.fullmatch(r"\w[\w-]*(/\w[\w-]*)*", name, re.ASCII)
        or not isinstance(
            OverridesParser.create().parse_override(f"experiment={name}").value(), str
        ),
        "NAME",
        "is not a valid name for an experiment",
        name,
        "letters, digits, _ and -; no number, null, true or false",
    )
    ConfigError.raise_if(
        _is_experiment(name, project),
        "NAME",
        "an experiment with this name already exists",
        name,
        hint="choose another name; existing files are not overwritten",
    )
    return folders[0] / "experiment" / f"{name}.yaml"


def _compose_source(args: argparse.Namespace, project: Project) -> tuple[Composed, str]:
    """Return the config that the experiment has to compose to, and a comment on its source."""
    from samewise.runner.config import saved
    from samewise.runner.config.compose import compose
    from samewise.runner.config.project import override_of_experiment

    if _is_experiment(args.source, project):
        composed = compose([override_of_experiment(args.source), *args.overrides], project=project)
        for caution in composed.cautions:
            print(f"warning: {caution}", file=sys.stderr)
        return composed, _describe_source(f"From the experiment {args.source}", composed.label)
    folder = saved.find(args.source, run_root=args.run_root)
    composed = replace(saved.config_in(folder.config, args.overrides), project=project)
    trust.require(
        folder.config, trust=args.trust, uses="makes an experiment of your own from its config.yaml"
    )
    return composed, _describe_source(
        f"From the run {folder.path.parent.name}/{folder.path.name}", composed.label
    )


def _is_experiment(name: str, project: Project) -> bool:
    from samewise.runner.config.catalogue import choices_of

    folder, _, own = name.rpartition("/")
    return own in choices_of(f"experiment/{folder}".rstrip("/"), project=project)


def _describe_source(where: str, label: str) -> str:
    return " ".join(f"{where} ({label})".split()) if label else where
