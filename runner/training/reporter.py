"""The callback by which a run reports to its sweep. It comes with the job's environment, not with the config, so that it changes no experiment."""

from __future__ import annotations

import json
import os

from samewise.runner.config.instantiate import instantiate
from samewise.runner.config.project import Project
from samewise.runner.interfaces import Callback
from samewise.runner.processes.this_process import REPORTER

_NAME = "(sweep)"


def reporter(project: Project) -> dict[str, Callback]:
    """What `Sweeper.variables` asks for under `REPORTER`, by its name among the run's callbacks; nothing where it asks for nothing."""
    given = os.environ.get(REPORTER)
    return {_NAME: instantiate(json.loads(given), REPORTER, allowed=project.packages)} if given else {}
