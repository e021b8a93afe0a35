"""An experiment file from a run, and a run's own config trained again."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import samewise as sw
from samewise.runner.commands.init import make
from samewise.runner.config import project
from samewise.runner.config.compose import compose

Run = Callable[..., Any]
SMALL = ["max_steps=1", "model.width=4", "seed=3", "callbacks=none", "tracking=none", "evaluate.pictures=false", "dataset.valid.length=8"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sw.Trained]:
    """A run of one step in a new project."""
    folder, path = tmp_path_factory.mktemp("new") / "lab", list(sys.path)
    make(folder, "new_lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield sw.train(*SMALL)
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "new_lab"]:
        del sys.modules[name]


def read_experiment(name: str) -> Any:
    return yaml.safe_load(Path(f"configs/experiment/{name}.yaml").read_text())


def test_an_experiment_from_a_run_keeps_its_fingerprint_and_lists_only_overrides(trained: sw.Trained, samewise: Run) -> None:
    done = samewise("new", "again", "--from", trained.folder.name)
    assert done.returncode == 0, done.stderr
    assert compose(["experiment=again"], project=project.find()).fingerprint[:12] == trained.folder.name
    said = read_experiment("again")
    assert said["defaults"] == ["first", {"override /callbacks": "none"}, "_self_"]
    rest = {"seed": 3, "max_steps": 1, "model": {"width": 4}, "dataset": {"valid": {"length": 8}}, "evaluate": {"pictures": False}}
    assert {key: value for key, value in said.items() if key != "defaults"} == rest
    assert "again" in samewise("list", "experiment").stdout


def test_a_config_made_by_somebody_else_is_refused(trained: sw.Trained, samewise: Run, tmp_path: Path) -> None:
    received = tmp_path / "config.yaml"
    received.write_text((trained.folder / "config.yaml").read_text().replace("seed: 3", "seed: 5"))
    for command in (["train", "--config", received], ["new", "received", "--from", tmp_path]):
        done = samewise(*command)
        assert done.returncode == 2
        assert "--trust" in done.stderr
    assert not Path("configs/experiment/received.yaml").exists()
    assert len(list(trained.folder.parent.iterdir())) < 4
