"""A config file from others reads none of this user's variables, sends nothing to its author's addresses, and is limited in size."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torchvision
from samewise_security_write_reachable import reachable

from samewise.runner.config.compose import compose, dump, load, parse
from samewise.runner.config.instantiate import instantiate, locate
from samewise.runner.config.project import find
from samewise.runner.config.slots import KINDS
from samewise.runner.errors import ConfigError

SECRET = "s3cret-of-mine"
READS = ["${oc.env:MINE}", "\\${oc.env:MINE}", "${oc.${debug.x}:MINE}"]


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A folder of configs with one experiment file, as --config-dir names it."""
    monkeypatch.setenv("MINE", SECRET)
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        (tmp_path / "theirs" / "experiment").mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / "experiment" / "x.yaml").write_text(f"# @package _global_\n# X\ndefaults:\n  - resnet18_digits\n  - _self_\n{text}\n")
        return tmp_path / "theirs"

    return write


@pytest.mark.parametrize("value", READS)
def test_a_config_file_from_others_reads_no_environment_variable(value: str, samewise: Callable[..., Any], theirs: Callable[[str], Path]) -> None:
    folder = theirs(f"name: {value!r}")
    done = samewise("show", "experiment=x", "--config-dir", folder, code=2)
    assert SECRET not in done.stdout + done.stderr
    assert "x.yaml" in done.stderr


def test_a_config_file_from_others_may_refer_to_values_of_the_config(samewise: Callable[..., Any], theirs: Callable[[str], Path]) -> None:
    done = samewise("show", "experiment=x", "--config-dir", theirs("batch_size: 32\nname: 'a${oc.select:batch_size,${seed}}:b${seed}'"), code=0)
    assert "name: a32:b0" in done.stdout


def test_a_saved_config_reads_no_environment_variable(theirs: Callable[[str], Path], tmp_path: Path) -> None:
    text = dump(compose(["experiment=resnet18_digits"], project=find()))
    saved = tmp_path / "config.yaml"
    saved.write_text(text)
    assert load(saved).cfg.seed == 0
    for value in READS:
        saved.write_text(text.replace("\nname: null", f"\nname: {value!r}"))
        assert value in saved.read_text()
        with pytest.raises(ConfigError) as caught:
            load(saved)
        assert SECRET not in str(caught.value)
        assert "config.yaml" in str(caught.value)


ELSEWHERE = ["../../received/other/y", "/../received/other/y", "/{}/received/other/y", "/experiment/../../received/other/y"]
"""Paths to another of a stranger's files from the project's own folder of configs, whose files may do more."""


@pytest.mark.parametrize("entry", ELSEWHERE)
def test_a_config_file_from_others_includes_no_file_from_elsewhere(entry: str, samewise: Callable[..., Any], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MINE", SECRET)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.samewise]\nconfigs = "own"\n')
    for folder in ("own/experiment", "received/experiment", "received/other"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "received" / "other" / "y.yaml").write_text("# @package _global_\nname: ${oc.env:MINE}\n")
    (tmp_path / "received" / "experiment" / "x.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - resnet18_digits\n  - {entry.format(tmp_path)}@_global_\n  - _self_\n"
    )
    done = samewise("show", "experiment=x", "--config-dir", "received", code=2)
    assert SECRET not in done.stdout + done.stderr
    assert "x.yaml:4: " in done.stderr
    assert "no such group" in done.stderr


@pytest.mark.parametrize("where", ["pkg://stranger_here", "file://{}/more"])
def test_a_config_file_cannot_extend_the_search_path_of_hydra(
    where: str, repository: Path, samewise: Callable[..., Any], theirs, tmp_path: Path, monkeypatch
) -> None:
    """Hydra imports a package to look for configs in it, before anybody can refuse that."""
    (tmp_path / "stranger_here.py").write_text("import pathlib\npathlib.Path(__file__).with_name('mark').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "more" / "experiment").mkdir(parents=True)
    (tmp_path / "more" / "experiment" / "z.yaml").write_text("# @package _global_\nname: ${oc.env:MINE}\n")
    folder = theirs("")
    root = (repository / "configs" / "config.yaml").read_text()
    (folder / "config.yaml").write_text(f"{root}\nhydra: {{searchpath: ['{where.format(tmp_path)}']}}\n")
    for experiment in ("x", "z"):
        done = samewise("show", f"experiment={experiment}", "--config-dir", folder, code=2)
        assert "would take the place of samewise's own config.yaml" in done.stderr
        assert SECRET not in done.stdout + done.stderr
    assert not (tmp_path / "mark").exists()


BOMBS = {
    "aliases of a long text": f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n",
    "depth": "a: " + "[" * 1_000_000 + "\n",
    "itself": "a: &a [*a]\n",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_yaml_bomb_is_refused_without_using_much_memory(kind: str, samewise: Callable[..., Any], theirs: Callable[[str], Path]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = samewise("show", "experiment=x", "--config-dir", theirs(BOMBS[kind]), code=2)
    assert "x.yaml" in done.stderr
    with pytest.raises(ConfigError, match="config"):
        parse(BOMBS[kind], "config.yaml")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


AGAIN = {
    "texts": "${param_groups.aN}${param_groups.aN}",
    "relative": "${.aN}${.aN}",
    "selected": "${oc.select:param_groups.aN,x}${oc.select:param_groups.aN}",
    "by name": "${${param_groups.n}.aN}${${param_groups.n}.aN}",
    "mappings": {"l": "${param_groups.aN}", "r": "${param_groups.aN}"},
    "lists": ["${param_groups.aN}", "${param_groups.aN}"],
}
"""A value that repeats the one before it."""


@pytest.mark.parametrize("kind", AGAIN)
@pytest.mark.parametrize("command", ["show", "sweep"])
def test_values_that_grow_exponentially_by_reference_are_refused(kind: str, command: str, samewise: Callable[..., Any], theirs: Callable[[str], Path]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    again = json.dumps(AGAIN[kind])
    doubling = "".join(f"  a{number}: {again.replace('aN', f'a{number - 1}')}\n" for number in range(1, 40))
    folder = theirs(f"param_groups:\n  n: param_groups\n  a0: xxxxxxxxxx\n{doubling}")
    done = samewise(command, "experiment=x", "--config-dir", folder, *(["seed=1,2", "--list"] if command == "sweep" else []), code=2)
    assert "param_groups.a" in done.stderr
    assert "would not fit into memory" in done.stderr
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


REACHABLE = Path(__file__).with_name("reachable.txt")

WRONG_KIND = {
    "a parent of jobs among the callbacks": ("callbacks.x", "samewise.runner.launchers.parent.Parent"),
    "a launcher among the callbacks": ("callbacks.x", "samewise.runner.launchers.local.Local"),
    "a function that writes a file": ("recipe", "samewise.recipes.parts.transcripts.save_csv"),
    "a function that compiles names": ("model", "torchvision.models.feature_extraction.create_feature_extractor"),
    "a function that fetches": ("model", "torchvision.models.get_model_weights"),
    "a data set that unpickles": ("dataset.train", "torchvision.datasets.LSUN"),
    "a model as a data set": ("dataset.train", "torch.nn.Linear"),
    "a data set as a model": ("model", "samewise.datasets.digits.Digits"),
    "a model as an optimizer": ("optimizer", "torch.nn.Linear"),
    "a method": ("model", "torch.nn.Module.load_state_dict"),
    "a class method": ("model", "torch.nn.Embedding.from_pretrained"),
    "an optimizer inside a model": ("model._args_.0", "torch.optim.SGD"),
    "a model inside a strategy": ("strategy.part", "torch.nn.Linear"),
    "a data set inside a callback": ("callbacks.x.part", "samewise.datasets.digits.Digits"),
    "an autograd function": ("transforms.train.sample.0", "torch.nn.modules.linear.F"),
}


@pytest.mark.parametrize(("path", "target"), WRONG_KIND.values(), ids=WRONG_KIND)
def test_a_component_of_another_kind_is_refused_before_it_is_called(path: str, target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instantiate({"_target_": target}, path, allowed=())
    assert caught.value.problems[0].path == f"{path}._target_"


LAB = """
import pathlib
from torch import nn
from torch.utils.data import Dataset

def leaves_a_mark(path):
    pathlib.Path(path).write_text("called")

def net(width: int = 1) -> nn.Linear:
    return nn.Linear(width, width)

def data() -> Dataset:
    return [1, 2]

def perhaps() -> "nn.Module | None":
    return None

class Settings:
    def __init__(self, path):
        self.path = path

class Net(nn.Module):
    def __init__(self, settings=None, path=None, made=None):
        super().__init__()
        self.given = settings, path, made

    @classmethod
    def leave_a_mark(cls, path):
        leaves_a_mark(path)
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "lab_of_slots.py").write_text(LAB)
    monkeypatch.syspath_prepend(tmp_path)
    return "lab_of_slots"


@pytest.mark.parametrize("target", ["leaves_a_mark", "Net.leave_a_mark", "Settings", "pathlib.Path", "nn.Linear"])
@pytest.mark.parametrize("path", sorted(pattern.replace("*", "x") for pattern in KINDS))
def test_in_the_users_package_only_the_right_kind_is_called(path: str, target: str, lab: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        instantiate({"_target_": f"{lab}.{target}", "path": str(tmp_path / "mark")}, path, allowed=(lab,))
    assert not (tmp_path / "mark").exists()


def test_a_users_function_is_called_only_if_annotated_to_return_the_kind(lab: str) -> None:
    assert instantiate({"_target_": f"{lab}.net", "width": 3}, "model", allowed=(lab,)).in_features == 3
    with pytest.raises(ConfigError, match=r"annotate what it returns.*def leaves_a_mark\(\.\.\.\) -> CLASS") as caught:
        locate(f"{lab}.leaves_a_mark", "model", (lab,))
    assert "is not a torch.nn.Module" in caught.value.problems[0].message
    with pytest.raises(ConfigError, match=r"`-> nn.Module \| None` does not say that it always returns one"):
        locate(f"{lab}.perhaps", "model", (lab,))


def test_a_users_class_of_any_kind_can_be_an_argument_of_another(lab: str) -> None:
    node = {"_target_": f"{lab}.Net", "settings": {"_target_": f"{lab}.Settings", "path": "a"}, "path": 1, "made": 2}
    settings, *rest = instantiate(node, "model", allowed=(lab,)).given
    assert settings.path == "a"
    assert rest == [1, 2]  # names that the runner uses itself are the component's own


def test_everything_that_a_config_can_call_has_been_reviewed() -> None:
    """After an update, run `python tests/security/write_reachable.py`, then review what was added."""
    listed = {line.partition("  ")[0]: line.partition("  ")[2] for line in REACHABLE.read_text().splitlines() if not line.startswith("#")}
    found = reachable()
    fresh = found.keys() - listed.keys()
    versions = REACHABLE.read_text().splitlines()[0].removeprefix("# ")
    if versions == f"torchvision {torchvision.__version__.partition('+')[0]}":
        assert found == listed
    assert not [name for name in fresh if name.startswith("samewise.")]
    assert not [name for name in fresh if found[name].rpartition(", ")[2] != "class"]  # functions of another version are reviewed one by one, too
