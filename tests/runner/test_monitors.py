"""Several monitored metrics: each keeps its best checkpoint, and is shown at the end and in MLflow; invalid monitors are reported."""

from pathlib import Path

import pytest

from samewise.runner.config import check
from samewise.runner.config.compose import compose, dump, parse
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError

BARE = Project(Path(__file__).resolve().parents[2])
DIGITS = ("experiment=resnet18_digits", "device=cpu")


def test_the_first_of_several_monitors_decides_and_only_it_counts() -> None:
    alone = compose([*DIGITS, "callbacks=[default,early_stopping]"], project=BARE)
    several = compose([*DIGITS, "callbacks=[default,early_stopping]", "evaluate.monitor=[valid/accuracy,valid/loss,valid/accuracy_top5]"], project=BARE)
    assert several.cfg.evaluate.monitor == several.cfg.callbacks.early_stopping.monitor == "valid/accuracy"
    assert {name: str(mode) for name, mode in several.cfg.evaluate.also.items()} == {"valid/loss": "min", "valid/accuracy_top5": "max"}
    assert several.fingerprint == alone.fingerprint
    assert several.folder.path == alone.folder.path
    again = parse(dump(several))
    assert again.cfg.evaluate == several.cfg.evaluate
    assert check.problems(several, BARE) == []


@pytest.mark.parametrize(
    ("given", "path", "advice"),
    [
        (["evaluate.monitor=[valid/accuracy,valid/spread]"], "evaluate.monitor", "'evaluate.also={valid/spread: max}'"),
        (["evaluate.monitor=valid/spread"], "evaluate.monitor", "write evaluate.mode=max, or min"),
        (["evaluate.monitor=[valid/loss,valid/loss]"], "evaluate.monitor", "[SPLIT/METRIC, ...]"),
        (["evaluate.also=[valid/loss]"], "evaluate.also", "a mapping of names to values, each one of: min, max"),
        (["evaluate.also={valid/loss: lowest}"], "evaluate.also", "a mapping of names to values, each one of: min, max"),
        (["+evaluate.also={loss: min}"], "evaluate.also", "valid/loss"),
        (["callbacks=[default,early_stopping]", "callbacks.early_stopping.monitor=valid/loss"], "callbacks.early_stopping.mode", "min"),
        (["scheduler=plateau", "scheduler.metric=valid/loss"], "scheduler.mode", "min"),
    ],
)
def test_an_invalid_monitor_is_reported(given: list[str], path: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check.check(compose([*DIGITS, *given], project=BARE), BARE)
    problem = next(one for one in caught.value.problems if one.path == path)
    assert len(caught.value.problems) == 1 or path.startswith("scheduler")  # which the trial step reports too
    assert advice in f"{problem.expected} {problem.hint}"
