"""Components from configs, and what a config may not name."""

import sys
from pathlib import Path

import pytest

from samewise.runner.config.instantiate import instantiate, locate
from samewise.runner.errors import ConfigError

STRANGERS = [
    *("os.system", "numpy.load", "torch.hub.load", "torch.nn.functional.importlib.import_module", "torch.nn.Module.__init__.__globals__"),
    *("torch.nn.functional.torch.load", "torch.nn.modules.module.Any", "torchvision.datasets.utils.download_and_extract_archive", "torchvision.io.read_file"),
    "samewise.runner.callbacks.progress.time.sleep",
]


@pytest.mark.parametrize("target", STRANGERS)
def test_a_target_outside_the_components_is_refused(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        instantiate({"_target_": target, "_args_": ["echo"]}, "model", allowed=())
    assert caught.value.problems[0].path == "model._target_"
    assert caught.value.problems[0].value == target


@pytest.mark.parametrize(
    "target",
    [None, 3, "", ".", "torch..nn", "torch.nn.Linear()", "torch.nn.Linear; import os", " torch.nn.Linear", "torch.nn._reduction.get_enum", "torch.nn.Linear\n"],
)
def test_a_target_that_is_not_a_name_is_refused(target: object) -> None:
    with pytest.raises(ConfigError, match=r"model\._target_"):
        instantiate({"_target_": target}, "model", allowed=())


def test_a_missing_timm_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"needs timm; hint: pip install '\.\[timm\]'"):
        instantiate({"_target_": "timm.optim.lamb.Lamb", "_partial_": True}, "optimizer", allowed=())


def test_a_forbidden_target_is_refused_inside_arguments_lists_and_partials() -> None:
    evil = {"_target_": "os.system", "_partial_": True}
    for node in ({"_target_": "torch.nn.Sequential", "_args_": [evil]}, {"a": [{"b": evil}]}, {"_target_": "torch.nn.ReLU", "inplace": evil}):
        with pytest.raises(ConfigError, match=r"os\.system"):
            instantiate(node, "model", allowed=())


def test_a_library_data_set_may_not_download_from_another_address(tmp_path: Path) -> None:
    node = {"_target_": "torchaudio.datasets.SPEECHCOMMANDS", "root": str(tmp_path), "url": "http://127.0.0.1:9/x.tar.gz", "download": True}
    with pytest.raises(ConfigError, match=r"dataset\.train\.url"):
        instantiate(node, "dataset.train", allowed=())


def test_a_declared_package_may_be_named_but_not_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lab_of_ours"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nfrom subprocess import run\nfrom torch.nn import Identity\nclass Thing(Identity):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(instantiate({"_target_": "lab_of_ours.Thing"}, "model", allowed=("lab_of_ours",))).__name__ == "Thing"
    for target in ("lab_of_ours.os.system", "lab_of_ours.run"):
        with pytest.raises(ConfigError):
            locate(target, "model", ("lab_of_ours",))
    with pytest.raises(ConfigError, match="outside the packages"):
        locate("lab_of_ours.Thing", "model", ())


def test_a_name_that_does_not_exist_is_reported_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\._target_: does not exist(.|\n)*did you mean 'SGD'") as caught:
        instantiate({"_target_": "torch.optim.SDG"}, "optimizer", allowed=())
    assert caught.value.exit_code == 2


def test_a_constructor_that_fails_is_reported_at_its_path_with_the_cause() -> None:
    with pytest.raises(ConfigError, match=r"model\.0: Dropout failed: dropout probability") as caught:
        instantiate([{"_target_": "torch.nn.Dropout", "p": 3.0}], "model", allowed=())
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_wrong_argument_in_a_users_class_is_blamed_on_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, *, width=3):\n        super().__init__()\n        self.conv = nn.Conv2d(1, width, 3, paddin=1)\n"
    (tmp_path / "lab_with_a_typo.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"model: Net failed: .*'paddin'; hint: raised at .*lab_with_a_typo\.py:5"):
        instantiate({"_target_": "lab_with_a_typo.Net"}, "model", allowed=("lab_with_a_typo",))
    with pytest.raises(ConfigError, match=r"model\.widht: Net has no such argument"):
        instantiate({"_target_": "lab_with_a_typo.Net", "widht": 3}, "model", allowed=("lab_with_a_typo",))
