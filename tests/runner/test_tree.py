from samewise.runner.config.tree import at, differences, flat

CONFIG = {"a": {"b": [1, 2], "c": {}, "d": []}, "e": [{"f": None}]}


def test_every_value_of_a_config_has_a_path():
    assert list(flat(CONFIG)) == [("a.b.0", 1), ("a.b.1", 2), ("a.c", {}), ("a.d", []), ("e.0.f", None)]
    assert list(flat(CONFIG, lists=False)) == [("a.b", [1, 2]), ("a.c", {}), ("a.d", []), ("e.0.f", None)]


def test_a_value_is_found_by_its_path():
    assert at(CONFIG, "a.b") == [1, 2]
    assert at(CONFIG, "a.x", "???") is None
    assert at(CONFIG, "a.b.1") == 2
    assert at(CONFIG, "a.b.2", "???") == at(CONFIG, "a.b.x", "???") == "???"


def test_an_empty_list_or_mapping_is_no_difference_of_its_own():
    filled = {"a": {"b": [1], "c": {"e": {"f": 2}}, "d": []}}
    assert differences({"a": {"b": [], "c": {}}}, filled) == [("a.b.0", "???", 1), ("a.c.e.f", "???", 2), ("a.d", "???", [])]
    assert differences(filled, {"a": {}}) == [("a.b.0", 1, "???"), ("a.c.e.f", 2, "???"), ("a.d", [], "???")]
    assert differences({"a": {}}, {"a": []}) == [("a", {}, [])]
    assert differences({"a": None}, filled)[0] == ("a", None, "???")
