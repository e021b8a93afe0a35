"""Build everything and try one step and one evaluation batch, in memory: what only a try can find."""

from __future__ import annotations

import tempfile
from pathlib import Path

from samewise.runner import streams
from samewise.runner.compose import Composed
from samewise.runner.determinism import refused_operator
from samewise.runner.errors import ConfigError, Problem, SamewiseError
from samewise.runner.folder import RunFolder
from samewise.runner.project import Project


def trial(composed: Composed, project: Project) -> None:
    """Take one optimizer step and measure one batch of the validation split; nothing is kept.

    Raises:
        ConfigError: something cannot be built or does not fit together.
    """
    from samewise.runner.build import build
    from samewise.runner.evaluation import rehearse
    from samewise.runner.loop import train_step

    with tempfile.TemporaryDirectory(prefix="samewise-check-") as temporary, streams.preserved():
        run = build(composed, project, RunFolder(Path(temporary)), alone=True)
        try:
            train_step(run, next(run.batches()))
            rehearse(run)
        except SamewiseError:
            raise
        except Exception as error:
            raise ConfigError(refused_operator(error) or misfit(error)) from error
        finally:
            run.strategy.end()


def misfit(error: Exception) -> Problem:
    """What a step raised, which comes from parts that are sound alone but do not fit together."""
    return Problem(
        "recipe, model, dataset, transforms",
        f"the first step fails: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        expected="a model that takes the transformed batch, and outputs that the recipe takes",
        hint="--debug shows where",
    )
