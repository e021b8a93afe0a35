"""The schemas with which editors complete and check config files."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from omegaconf import OmegaConf
from referencing import Registry, Resource

from samewise.runner.commands.init import make
from samewise.runner.config import json_schema, json_types, project
from samewise.runner.config.instantiate import locate

NAMED = ("callbacks", "param_groups")
"""Groups whose keys are names of the user's choice."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new project with its schemas."""
    folder, path = tmp_path_factory.mktemp("schema") / "lab", list(sys.path)
    make(folder, "schema_lab")
    json_schema.write(project.find(folder), folder / ".schema")
    yield folder
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "schema_lab"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def wrong(lab: Path) -> Callable[[str, Any], list[str]]:
    """The problems that a group's schema finds in the text of a file."""
    schemas = {file.stem: json.loads(file.read_text()) for file in (lab / ".schema").iterdir()}
    Draft7Validator.check_schema(schemas["definitions"])
    registry = Registry().with_resource("definitions.json", Resource.from_contents(schemas["definitions"]))
    validators = {name: Draft7Validator(schema, registry=registry) for name, schema in schemas.items()}

    def find(group: str, said: Any) -> list[str]:
        said = yaml.safe_load(said) if isinstance(said, str) else said
        return [error.message for error in validators[group if group in validators else "experiment"].iter_errors(said)]

    return find


def files_of(folder: Path) -> list[tuple[str, Path]]:
    return [(file.relative_to(folder).parts[0].removesuffix(".yaml"), file) for file in sorted(folder.rglob("*.yaml"))]


@pytest.mark.parametrize("group", ["experiment", pytest.param("others", marks=pytest.mark.slow)])
def test_all_existing_configs_are_valid(lab: Path, repository: Path, wrong: Callable[[str, Any], list[str]], group: str) -> None:
    every = [*files_of(repository / "configs"), *files_of(lab / "configs")]
    mine = [(name, file) for name, file in every if (name == "experiment") == (group == "experiment")]
    found = {str(file): wrong(name, OmegaConf.to_container(OmegaConf.load(file), resolve=False)) for name, file in mine}
    assert found
    assert {file: problems for file, problems in found.items() if problems} == {}


def components(value: Any) -> Iterator[dict[str, Any]]:
    """The mappings with a `_target_` in a config."""
    if isinstance(value, dict) and "${" not in value.get("_target_", "${"):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from components(inner)


def test_every_key_of_a_component_and_of_a_group_has_a_description(lab: Path, repository: Path) -> None:
    groups = json.loads((lab / ".schema" / "definitions.json").read_text())["definitions"]
    keys = list[tuple[str, str, dict[str, Any]]]()
    for group, file in files_of(repository / "configs"):
        config = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        described = [(one, json_types.call_schema(locate(one["_target_"], "part", ()))["properties"]) for one in components(config)]
        described += [(config, groups[group]["properties"])] if "properties" in groups.get(group, ()) and group not in NAMED else []
        keys += [(str(file), key, about.get(key, {})) for one, about in described for key in one if key not in ("_target_", "_partial_", "_args_", "defaults")]
    assert len(keys) > 1500
    assert [(file, key) for file, key, about in keys if not about.get("description")] == []


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("optimizer", "{_target_: torch.optim.SGD, momentun: 0.9}"),
        ("optimizer", "{_target_: torch.optim.SGD, lr: fast}"),
        ("optimizer", "{_target_: torch.optim.SDG}"),
        ("model", "{_target_: torchvision.models.resnet18, num_clases: 3}"),
        ("model", "{_target_: schema_lab.model.SmallNet, outputs: 3, widht: 4}"),
        ("dataset", "{train: {_target_: samewise.datasets.digits.Digits, splt: train}}"),
        ("dataset", "{train: {_target_: torch.nn.Linear}}"),
        ("transforms", "{train: {sample: [], bach: []}}"),
        ("transforms", "{train: {batch: [{_target_: samewise.datasets.transforms.numeric.Normalize, men: 3}]}}"),
        ("scheduler", "{_target_: samewise.runner.optim.schedules.Sequential, schedules: {a: {_target_: samewise.runner.optim.schedules.Cosine, tmax: 3}}}"),
        ("callbacks", "{defaults: [progres]}"),
        ("loss", "{_target_: samewise.recipes.parts.losses.Focal, gama: 2.0}"),
        ("metrics", "{f1: {avrage: macro}}"),
        ("experiment", "{batch_sise: 3}"),
        ("experiment", "{evaluate: {moniter: valid/loss}}"),
        ("experiment", "{loader: {order: {_target_: samewise.runner.data.order.First, sample: 3}}}"),
        ("experiment", "{optimizer: {learning_rate: 0.1}}"),
        ("experiment", "{dataset: {train: {splt: train}}}"),
        ("experiment", "{callbacks: {ema: {decoy: 0.9}}}"),
        ("experiment", "{defaults: [override /optimiser: sgd]}"),
        ("experiment", "{defaults: [override /model: small_ned]}"),
    ],
)
def test_a_misspelt_key_and_a_wrong_type_are_marked(wrong: Callable[[str, Any], list[str]], group: str, said: str) -> None:
    assert len(wrong(group, said)) == 1


def test_a_file_that_is_not_yaml_is_named_and_the_schemas_know_the_others(tmp_path: Path) -> None:
    texts = {"half": "# Mine\nlr: [1\n", "odd": "# Mine\nlr: !!int x\n", "made": "# Mine\nlr: !mine x\n", "whole": "# Mine\nlr: 1\n"}
    (tmp_path / "optimizer").mkdir()
    for name, text in texts.items():
        (tmp_path / "optimizer" / f"{name}.yaml").write_text(text)
    schemas, problems = json_schema.project_schemas(project.Project(tmp_path, configs=(tmp_path,)))
    assert [problem.path.rpartition("optimizer/")[2] for problem in problems] == ["half.yaml:3", "made.yaml:2", "odd.yaml"]
    assert set(texts) <= set(schemas["definitions"]["definitions"]["choice-of-optimizer"]["anyOf"][0]["enum"])
