"""`samewise.datasets` is ours and `datasets` is Hugging Face's, in whatever environment and folder these tests run."""

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import pickle
from importlib import resources
from pathlib import Path

import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import samewise
from samewise.runner.errors import Problem

NAMES = ("configs", "recipes", "runner", "datasets")


@pytest.mark.parametrize("name", NAMES)
def test_the_folders_are_imported_from_where_samewise_is(name: str) -> None:
    module = importlib.import_module(f"samewise.{name}")
    home = Path(str(samewise.__file__)).parent
    assert [Path(entry) for entry in module.__path__] == [home / name]


def test_datasets_is_the_package_of_hugging_face() -> None:
    try:
        version = importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Hugging Face's datasets is not installed here")
    module = importlib.import_module("datasets")
    assert module.__version__ == version
    assert callable(module.load_dataset)


def test_an_object_survives_pickle() -> None:
    problem = Problem("optimizer.lr", "is negative", -1.0, "a number above 0")
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_a_spawned_process_finds_our_classes() -> None:
    problem = Problem("seed", "is missing")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(str, (problem,)) == "seed: is missing"


def test_the_configs_are_resources_of_the_package() -> None:
    assert resources.files("samewise.configs").joinpath("config.yaml").read_text().strip()


def test_hydra_finds_every_choice_of_every_group_in_the_package() -> None:
    folder = Path(str(samewise.__file__)).parent / "configs"
    expected = {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in folder.iterdir() if group.is_dir() and any(group.glob("*.yaml"))}
    assert "recipe" in expected
    with initialize_config_module(config_module="samewise.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        loader.ensure_main_config_source_available()
        sources = {source.path for source in loader.get_sources() if source.provider == "main"}
        found = {group: sorted(loader.get_group_options(group)) for group in expected}
    for resolver in ("hydra", "now", "python_version"):  # which Hydra leaves behind in this process
        OmegaConf.clear_resolver(resolver)
    assert sources == {"samewise.configs"}
    assert found == expected


@pytest.mark.parametrize("word", ["one", "another"])
def test_two_tests_may_use_the_same_package_name(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab_of_neighbours.py").write_text(f"WORD = {word!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert word == importlib.import_module("lab_of_neighbours").WORD
