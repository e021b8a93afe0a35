from samewise.runner.config.tree import at, flat

CONFIG = {"a": {"b": [1, 2], "c": {}, "d": []}, "e": [{"f": None}]}


def test_every_value_of_a_config_has_a_path():
    assert list(flat(CONFIG)) == [("a.b.0", 1), ("a.b.1", 2), ("a.c", {}), ("a.d", []), ("e.0.f", None)]
    assert list(flat(CONFIG, lists=False)) == [("a.b", [1, 2]), ("a.c", {}), ("a.d", []), ("e.0.f", None)]


def test_a_value_is_found_by_its_path():
    assert at(CONFIG, "a.b") == [1, 2]
    assert at(CONFIG, "a.x", "???") is None
    assert at(CONFIG, "a.b.1") == 2
    assert at(CONFIG, "a.b.2", "???") == at(CONFIG, "a.b.x", "???") == "???"
