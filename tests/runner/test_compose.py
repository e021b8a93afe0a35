"""From overrides to a config."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import samewise
from samewise.runner.config import catalogue, check
from samewise.runner.config.compose import compose, dump, load
from samewise.runner.config.origins import origins
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BARE = Project(ROOT)
CHOICES = sorted(f"{file.parent.relative_to(ROOT / 'configs')}={file.stem}" for file in (ROOT / "configs").glob("**/*.yaml") if file.parent != ROOT / "configs")


@pytest.fixture
def mine(tmp_path: Path) -> Project:
    """A project with a config folder of its own."""
    return Project(tmp_path, configs=(tmp_path,))


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize("experiment", [choice for choice in CHOICES if choice.startswith("experiment=")])
def test_every_experiment_composes_with_debug_tiny(experiment: str) -> None:
    composed = compose([experiment, "debug=tiny"], project=BARE)
    assert composed.choices["dataset"].startswith("generated_")
    assert composed.cfg.max_steps == 20
    assert composed.cfg.batch_size <= 16


@pytest.mark.parametrize("group", sorted({choice.split("=")[0] for choice in CHOICES}))
def test_every_choice_has_a_description(group: str) -> None:
    for name, line in catalogue.choices_of(group, project=BARE).items():
        assert len(line) > 8, name


def test_overrides_win_over_debug_over_the_experiment_over_the_defaults(mine: Project, tmp_path: Path) -> None:
    write(
        tmp_path,
        "experiment/first.yaml",
        "# @package _global_\n# One of mine\ndefaults:\n  - override /optimizer: adamw\n  - _self_\nbatch_size: 32\nmax_steps: 7\n",
    )
    plain = compose(["experiment=first"], project=mine)
    assert (plain.cfg.batch_size, plain.cfg.max_steps, plain.choices["optimizer"]) == (32, 7, "adamw")
    small = compose(["experiment=first", "debug=tiny", "batch_size=16", "optimizer=sgd"], project=mine)
    assert (small.cfg.batch_size, small.cfg.max_steps, small.choices["optimizer"]) == (16, 20, "sgd")


def test_debug_tiny_keeps_what_another_data_set_is_and_gives_a_model_no_sizes_of_another(mine: Project, tmp_path: Path) -> None:
    digits = compose(["experiment=resnet18_digits", "debug=tiny", "dataset=digits"], project=mine)
    assert (digits.cfg.dataset.image_size, digits.cfg.max_steps) == (8, 20)
    write(tmp_path, "model/faster.yaml", "# A detector\n_target_: lab.Faster\nnum_classes: ${dataset.num_classes}\nmin_size: 800\n")
    boxes = compose(["recipe=detection", "transforms=none", "debug=tiny", "dataset=coco_folder", "model=faster"], project=mine)
    assert dict(boxes.cfg.model) == {"_target_": "lab.Faster", "num_classes": 2, "min_size": 64}


def test_a_projects_choices_are_found_and_win_over_samewises(mine: Project, tmp_path: Path) -> None:
    write(tmp_path, "dataset/ours.yaml", "# Ours\nnum_classes: 3\nchannels: 1\nmean: [0.5]\nstd: [0.5]\n")
    write(tmp_path, "precision/fp32.yaml", "# Ours too\n_target_: lab.Precision\n")
    composed = compose(["dataset=ours"], project=mine)
    assert composed.cfg.recipe.num_classes == 3
    assert composed.cfg.precision._target_ == "lab.Precision"
    assert catalogue.choices_of("dataset", project=mine)["ours"] == "Ours"
    assert "digits" in catalogue.choices_of("dataset", project=mine)


def test_a_saved_config_loads_again_with_its_types_choices_and_fingerprint(tmp_path: Path) -> None:
    composed = compose(["optimizer.lr=0.05", "evaluate.mode=max", "evaluate.monitor=valid/accuracy", "debug=overfit"], project=BARE)
    file = tmp_path / "config.yaml"
    file.write_text(dump(composed))
    again = load(file)
    assert (again.fingerprint, again.name, again.choices) == (composed.fingerprint, composed.name, composed.choices)
    assert OmegaConf.get_type(again.cfg, "loader").__name__ == "Loader"
    file.write_text(file.read_text().replace("batch_size: 64", "batch_size: many"))
    with pytest.raises(ConfigError, match="batch_size"):
        load(file)
    file.write_text("a: [")
    with pytest.raises(ConfigError, match="not a run's config"):
        load(file)
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "nothing.yaml")


def test_the_origin_of_each_value_is_its_file_or_override(mine: Project, tmp_path: Path) -> None:
    write(tmp_path, "experiment/first.yaml", "# @package _global_\n# One of mine\nbatch_size: 32\noptimizer:\n  lr: 0.3\n")
    where = origins(["experiment=first", "seed=4", "optimizer.momentum=0.8"], project=mine)
    assert where["seed"] == "override seed=4"
    assert where["optimizer.momentum"] == "override optimizer.momentum=0.8"
    assert where["optimizer.lr"] == f"{tmp_path}/experiment/first.yaml:5"
    assert where["batch_size"] == f"{tmp_path}/experiment/first.yaml:3"
    for path, says in (("optimizer._target_", "_target_: torch.optim.SGD"), ("max_epochs", "max_epochs: int"), ("loader.num_workers", "num_workers: int")):
        file, _, line = where[path].rpartition(":")
        assert file.startswith("samewise's "), "not taken for the project's"
        assert (Path(samewise.__path__[0]) / file.removeprefix("samewise's ")).read_text().splitlines()[int(line) - 1].strip().startswith(says)


def problems_of(given: list[str], project: Project = BARE) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        compose(given, project=project)
    return {problem.path: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("resnet18", "", "KEY=VALUE"),
        ("a=[", "a", "cannot be read"),
        ("seed=range(3)", "seed", "several values make a sweep"),
        ("model=null", "model", "a choice is needed"),
        ("hydra.run.dir=x", "hydra.run.dir", "no effect here"),
        ("optimizer.nestrov=true", "optimizer.nestrov", "did you mean 'optimizer.nesterov'?"),
        ("optimizer.other=1", "optimizer.other", "+optimizer.other=1"),
        ("+seed=3", "seed", "already"),
        ("name=${nope.x}", "name", "refers to a value that does not exist"),
        ("loader.pin_memory=perhaps", "loader.pin_memory", "true or false"),
        ("optimizer=torch.optim.AdamW", "optimizer", "did you mean 'adamw'?"),
        ("optimizer.betas=(0.9,0.99)", "optimizer.betas", "a list is [A,B]"),
        ("batch=32", "batch", "did you mean 'batch_size'?"),
        ("early_stopping=true", "early_stopping", "did you mean callbacks=[default,early_stopping]?"),
        ("device=cuda:1", "device", "CUDA_VISIBLE_DEVICES=1"),
        ("metrics=accuracy", "metrics", "accuracy is computed without being asked for"),
        ("initialise.freeze=[conv1.*]", "initialise.freeze", "did you mean initialise.frozen?"),
    ],
)
def test_a_wrong_override_is_reported_at_its_path(override: str, path: str, words: str) -> None:
    told = problems_of([override])
    assert words in told[path]


def test_problems_in_all_files_are_reported_at_once(mine: Project, tmp_path: Path) -> None:
    write(tmp_path, "optimizer/ours.yaml", "# x\n_target_: torch.optim.SGD\n_partial_: true\nmomentun: 0.9\n")
    write(tmp_path, "evaluate/ours.yaml", "# x\nmode: maximum\n")
    lines = ["# @package _global_", "# x", "defaults:", "  - /evaluate: ours", "  - /callbacks@callbacks.x: emma"]
    lines += ["  - override /optimizer: ours", "  - override /model: resnet8", "max_epoch: 3", "evaluate:", "  every_epoch: 2", "loader: {num_workers: no}"]
    lines += ["model:", "  depth: 3"]
    write(tmp_path, "experiment/bad.yaml", "\n".join(lines))
    composed = compose(["experiment=bad", "sed=3"], project=mine, strict=False)
    told = {problem.path: problem for problem in check.problems(composed, mine)}
    wheres = {path: problem.where.removeprefix(f"{tmp_path}/") for path, problem in told.items()}
    here = "experiment/bad.yaml"
    assert wheres == {
        "model": f"{here}:7",
        "callbacks": f"{here}:5",
        "max_epoch": f"{here}:8",
        "evaluate.every_epoch": f"{here}:10",
        "loader.num_workers": f"{here}:11",
        "evaluate.mode": "evaluate/ours.yaml:2",
        "optimizer.momentun": "optimizer/ours.yaml:4",
        "sed": "",
    }
    assert (told["max_epoch"].hint, told["optimizer.momentun"].hint[:23]) == ("did you mean 'max_epochs'?", "did you mean 'momentum'?"[:23])


def test_a_config_cannot_create_python_objects(mine: Project, tmp_path: Path) -> None:
    write(tmp_path, "experiment/bad.yaml", "# @package _global_\n# x\nname: !!python/object/apply:os.system ['touch pwned']\n")
    assert "not valid YAML" in "\n".join(problems_of(["experiment=bad"], mine).values())
