"""The space that a command line with several values spans."""

from pathlib import Path

import pytest

from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.sweepers.base import Setting
from samewise.runner.sweepers.grid import Grid
from samewise.runner.sweepers.random import Random, Sobol
from samewise.runner.sweepers.space import Space, read_space

BARE = Project(Path(__file__).parent)


def space(*given: str) -> Space:
    return read_space(given, project=BARE)


def settings(sweeper, over: Space, tmp_path: Path) -> list[Setting]:
    sweeper.open(over, tmp_path, monitor="valid/loss", mode="min")
    return list(sweeper.settings())


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ("optimizer.lr=0.1,0.2", ("0.1", "0.2")),
        ("max_epochs=range(1,4)", ("1", "2", "3")),
        ("model=choice(resnet18,resnet34)", ("resnet18", "resnet34")),
    ],
)
def test_values_are_written_as_hydra_writes_them(given: str, values: tuple[str, ...]) -> None:
    (dimension,) = space(given).dimensions
    assert dimension.values == values


def test_a_grid_has_every_combination_with_the_last_key_fastest(tmp_path: Path) -> None:
    over = space("experiment=resnet18_digits", "optimizer.lr=1,2", "batch_size=8,16", "seed=range(3)")
    grid = settings(Grid(), over, tmp_path)
    assert [tuple(one.values.values()) for one in grid] == [("1", "8"), ("1", "16"), ("2", "8"), ("2", "16")]
    assert over.seeds == ("0", "1", "2")
    assert over.at({**grid[1].values, "seed": "2"}) == ("experiment=resnet18_digits", "optimizer.lr=1", "batch_size=16", "seed=2")


def test_more_random_trials_start_with_the_same_ones(tmp_path: Path) -> None:
    over = space("optimizer.lr=tag(log,interval(1e-4,1))", "max_epochs=int(interval(2,9))", "model=resnet18,resnet34")
    few, many = settings(Random(trials=5), over, tmp_path), settings(Random(trials=50), over, tmp_path)
    assert many[:5] == few
    assert settings(Random(trials=5, seed=1), over, tmp_path) != few
    rates = [float(one.values["optimizer.lr"]) for one in many]
    assert all(1e-4 <= rate < 1 for rate in rates)
    assert 10 < sum(rate < 1e-2 for rate in rates) < 40  # half of them, on a logarithmic scale
    assert {int(one.values["max_epochs"]) for one in many} == set(range(2, 10))


def test_sobol_points_fill_every_part_of_the_space(tmp_path: Path) -> None:
    over = space("optimizer.lr=interval(0.0,1.0)", "optimizer.weight_decay=interval(0.0,1.0)")
    found = settings(Sobol(trials=16), over, tmp_path)
    quarters = {(int(float(one.values["optimizer.lr"]) * 4), int(float(one.values["optimizer.weight_decay"]) * 4)) for one in found}
    assert len(quarters) == 16  # one point in each of the 4 x 4 squares: a (0, 4, 2)-net
    assert settings(Sobol(trials=16), over, tmp_path) == found


AGAIN = "varies, and is set once more"


@pytest.mark.parametrize(
    ("given", "path", "words"),
    [
        (["seed=0,1,2", "++seed=7"], "seed", AGAIN),
        (["optimizer.lr=0.1,0.2", "optimizer.lr=0.3"], "optimizer.lr", AGAIN),
    ],
)
def test_a_key_that_varies_is_set_once(given: list[str], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        space(*given)
    (problem,) = caught.value.problems
    assert (problem.path, problem.message) == (path, words)


@pytest.mark.parametrize(
    ("given", "path", "words"),
    [
        (["optimizer.lr=interval(0,1)"], "optimizer.lr", "sweeper=random"),
        (["optimizer.lr=interval(1,0)"], "optimizer.lr", "empty interval"),
        (["optimizer.lr=tag(log,interval(0,1))"], "optimizer.lr", "must start above 0"),
        (["seed=interval(0,9)"], "seed", "seed=range(5)"),
        (["model=glob(resnext9*)"], "model", "samewise list model"),
        (["batch_size=1,2", "batch_size=3,4"], "batch_size", "varies twice"),
        (["launcher.jobs=1,2"], "launcher.jobs", "cannot vary"),
        (["optimizer.lr=tag(lg,interval(1e-4,1))"], "optimizer.lr", "did you mean 'log'?"),
        (["optimizer.lr=tag(linear,choice(0.1,0.2))"], "optimizer.lr", "there is no such tag"),
        (["optimizer.lr=range("], "optimizer.lr", "cannot be read"),
        (["seed=range(3,0)"], "seed", "is an empty range"),
    ],
)
def test_overrides_that_span_no_space_are_reported(given: list[str], path: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(Grid(), space(*given), tmp_path)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert words in str(problem)
