"""channels_last changes the memory layout, not what is learned: for every recipe with images, with several replicas, on any number of processes."""

from pathlib import Path

import pytest
import samewise_runner_jobs as jobs
import torch

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.training.batches import TrainingBatches
from samewise.runner.training.build import build
from samewise.runner.training.loop import train_step

RECIPES = {"classification": "resnet18_digits", "detection": "retinanet_bccd", "adversarial": "gan_digits"}
TINY = ["debug=tiny", "tracking=none", "evaluate.pictures=false", "replicas=4", "max_steps=2"]


def updates(memory_format: str, experiment: str) -> dict[str, torch.Tensor]:
    """What one step adds to each parameter."""
    project = Project(Path.cwd())
    even = ["optimizer.eps=0.01"] if experiment == "retinanet_bccd" else []  # AdamW would scale up a gradient that is only rounding like any other
    composed = compose([f"experiment={experiment}", *TINY, f"memory_format={memory_format}", *even], project=project)
    run = build(composed, project, composed.folder)
    before = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    train_step(run, next(TrainingBatches(run)))
    return {name: value.detach() - before[name] for name, value in run.model.named_parameters()}


@pytest.mark.parametrize("experiment", [pytest.param(of, id=name, marks=[pytest.mark.slow] * (name == "detection")) for name, of in RECIPES.items()])
def test_a_channels_last_step_with_replicas_is_close_to_a_contiguous_one(experiment: str) -> None:
    expected, found = (updates(memory_format, experiment) for memory_format in ("contiguous", "channels_last"))
    error = sum((found[name] - update).square().sum() for name, update in expected.items())
    assert (error / sum(update.square().sum() for update in expected.values())).sqrt() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("experiment", RECIPES.values(), ids=RECIPES)
def test_four_processes_give_the_bits_of_one(tmp_path: Path, experiment: str) -> None:
    overrides = [f"experiment={experiment}", *TINY, "memory_format=channels_last", "strategy=elastic"]
    alone = jobs.run(tmp_path / "alone", 1, experiment=overrides)
    jobs.assert_same(jobs.run(tmp_path / "four", 4, experiment=overrides), alone)
