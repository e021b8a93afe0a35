from samewise.runner.config.tree import at

CONFIG = {"a": {"b": [1, 2], "c": {}, "d": []}, "e": [{"f": None}]}


def test_a_value_is_found_by_its_path():
    assert at(CONFIG, "a.b") == [1, 2]
    assert at(CONFIG, "a.x", "???") is None
    assert at(CONFIG, "a.b.1") == 2
    assert at(CONFIG, "a.b.2", "???") == at(CONFIG, "a.b.x", "???") == "???"
