"""Names with one or two wrong letters, in a file and as an override: the place and the right name are reported."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from samewise.runner.config import check
from samewise.runner.config.check import unread
from samewise.runner.config.compose import compose
from samewise.runner.config.loader import Loader
from samewise.runner.config.project import Project
from samewise.runner.config.tree import at
from samewise.runner.errors import nearest

BASE = "experiment=resnet18_digits"
PARTS = ("model", "optimizer", "scheduler", "recipe", "dataset", "dataset.train", "strategy", "loader", "evaluate", "checkpoint", "trace", "reproducibility")


def misspelt(word: str, chance: random.Random) -> str:
    """A word with one or two letters removed, inserted, replaced or swapped; only one in words of up to four letters, or nobody could guess the word."""
    for _ in range(chance.randint(1, 2) if len(word) > 4 else 1):
        place, letter = chance.randrange(len(word)), chance.choice(string.ascii_lowercase)
        before, one, after = word[:place], word[place], word[place + 1 :]
        word = before + chance.choice([after, letter + one + after, letter + after, after[:1] + one + after[1:]]) or word
    return word


def cases(count: int, seed: int) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """The right name, the wrong one, and what to give: lines of a file (the wrong one in the last), or an override."""
    chance, project = random.Random(seed), Project(Path.cwd())
    whole, choices = compose([BASE], project=project).whole, Loader(project).groups()
    keys = [f"{part}.{key}" for part in PARTS for key in (at(whole, part) or {}) if not key.startswith("_") and len(key) > 2]
    for number in range(count):
        group, path = chance.choice(["model", "optimizer", "scheduler", "dataset", "recipe", "precision"]), chance.choice(keys)
        is_choice = chance.random() < 0.3
        above, _, right = path.rpartition(".") if not is_choice else (group, "", chance.choice(choices[group]))
        wrong = misspelt(right, chance)
        if wrong in (right, *choices[group]) or not wrong.isidentifier():
            continue
        parts = above.split(".")
        if number % 2:
            yield right, wrong, [], [f"{group}={wrong}" if is_choice else f"+{path.removesuffix(right)}{wrong}=1"]
        elif is_choice:
            yield right, wrong, [f"  - override /{group}: {wrong}"], []
        else:
            yield right, wrong, [*(f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)), f"{'  ' * len(parts)}{wrong}: 1"], []


@pytest.mark.parametrize(
    ("count", "seed"),
    [(5, 0), pytest.param(20, 5, marks=pytest.mark.slow), *(pytest.param(75, seed, marks=[pytest.mark.slow, pytest.mark.long]) for seed in (1, 2, 3, 4))],
)
def test_a_typo_is_reported_with_its_place_and_mostly_the_right_name(count: int, seed: int, tmp_path: Path) -> None:
    file, tried, missed = tmp_path / "configs" / "experiment" / "typo.yaml", 0, list[tuple[str, str, str]]()
    file.parent.mkdir(parents=True)
    for right, wrong, lines, overrides in cases(count, seed):
        given = overrides or ["experiment=typo"]
        if lines:
            file.write_text("\n".join(["# @package _global_", "# A typo", "defaults:", "  - resnet18_digits", *lines]))
        else:
            given = [BASE, *given]
        project = Project(tmp_path, configs=(tmp_path / "configs",))
        composed = compose(given, project=project, strict=False)
        problems = [*check.problems(composed, project), *unread.cautions(composed)]
        tried += 1
        assert problems, (right, wrong, given)
        if lines:
            number = len(file.read_text().splitlines())
            assert f"{file}:{number}" in {problem.where for problem in problems}, (wrong, problems)
        else:
            assert any(wrong in f"{problem.path} {problem.value}" for problem in problems), (wrong, problems)
        if not any(f"'{right}'" in problem.hint or f".{right}'" in problem.hint for problem in problems):
            missed.append((right, wrong, problems[0].hint))
    assert tried > count * 0.6
    assert len(missed) <= 0.05 * tried, missed


@pytest.mark.parametrize(
    ("name", "known", "right"),
    [
        ("lr_facto", ["lr", "lr_factor"], "lr_factor"),
        ("lr_factr", ["lr", "lr_factor", "weight_decay"], "lr_factor"),
        ("f1_score", ["f1", "r2_score"], "f1"),
        ("lr_multiplier", ["lr", "lr_factor"], "lr"),
    ],
)
def test_the_nearest_name_is_the_one_with_the_fewest_wrong_letters(name: str, known: list[str], right: str) -> None:
    assert nearest(name, known) == f"did you mean '{right}'?"


@pytest.mark.parametrize("in_file", [False, True])
def test_a_key_that_the_chosen_data_set_has_is_no_typo(in_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "configs" / "experiment" / "sized.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\ndefaults:\n  - override /dataset: table\ndataset:\n  image_size: 32\n")
    given = ["experiment=sized"] if in_file else ["dataset=table", "dataset.image_size=32"]
    composed = compose([*given, "dataset.table_path=T.csv", "model.width=4"], project=Project(tmp_path, configs=(tmp_path / "configs",)))
    assert unread.problems(composed) == []
    assert [problem.path for problem in unread.cautions(composed)] == ["dataset.image_size"]
    misspelt = compose([*given, "+dataset.imag=name"], project=composed.project)
    assert [problem.hint for problem in unread.problems(misspelt)] == ["did you mean 'image'?"]
