"""Each place in a config takes only its kind of component: nothing else is called, whatever the config says."""

from pathlib import Path

import pytest
import torchvision
from samewise_security_write_reachable import reachable

from samewise.runner.config.instantiate import instantiate, locate
from samewise.runner.config.slots import KINDS
from samewise.runner.errors import ConfigError

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
