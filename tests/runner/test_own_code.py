"""What is said of code and data when two environments are compared."""

import samewise
from samewise.runner.records import environment, own_code, sources

USED = ["samewise.recipes.models.resnet.resnet18_small"]
NOW = {**own_code.record(USED), "versions": {"samewise": samewise.__version__}}


def test_nothing_is_said_of_code_that_was_not_recorded() -> None:
    assert own_code.differences({"versions": {"samewise": "0.1.0"}}, {**NOW, "code": {"samewise/runner/training/loop.py": "0"}}) == []


def test_runs_that_reach_other_parts_of_a_file_are_each_compared_with_the_code_as_it_is_now() -> None:
    strategy = own_code.record([*USED, "samewise.runner.strategies.elastic.Elastic"])
    assert own_code.differences(NOW, {**strategy, "versions": NOW["versions"]}) == []
    altered = {**strategy, "code": {**strategy["code"], "samewise/runner/training/loop.py": "0"}, "code_state": ""}
    (sentence,) = own_code.differences({**altered, "versions": {"samewise": "0.1.0"}}, NOW)
    assert sentence == f"samewise's own code has changed (version 0.1.0, now {samewise.__version__}): samewise/runner/training/loop.py"


def test_a_split_without_samples_is_no_data() -> None:
    with_test = {"data": {"test": {"name": "shards", "size": 0}}, "decides": {"data.test": "1f"}}
    assert environment.differences(with_test, {}) == environment.differences({}, with_test) == []
    with_test["data"]["test"]["size"] = 7  # type: ignore[index]
    assert environment.differences({}, with_test) == ["data.test was None and is shards, 7 samples ('1f')"]


def test_other_parts_of_a_file_are_no_certain_change_of_it() -> None:
    assert sources.describe_changes({"a.py": {"A": "1", "f": "2"}}, {"a.py": {"B": "3", "f": "2"}}) == ["a.py has changed, or other parts of it are used: A, B"]
