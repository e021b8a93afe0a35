"""Published weights by name: from the cache or downloaded, only if their checksum matches; the weights of a run by its name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from torch import nn
from torchvision import models

from samewise.runner.config.compose import compose, dump, parse
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.optim.initialise import initialise
from samewise.runner.records.files import sha256

NAME = "torchvision:IMAGENET1K_V1"
OF_SQUEEZENET = {"made_by": "torchvision.models.squeezenet1_1"}
HEAD = ["classifier.1.*"]


class Published:
    """Weights of a SqueezeNet at an address on this machine, in place of those that torchvision publishes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(1)
        self.model = models.squeezenet1_1()
        torch.save(self.model.state_dict(), folder / "weights.pth")
        self.digest = sha256(folder / "weights.pth")
        self.there = (folder / "weights.pth").rename(folder / f"squeezenet1_1-{self.digest[:8]}.pth")
        self.cached = folder / "torch" / "hub" / "checkpoints" / self.there.name
        monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
        self.patch = monkeypatch
        self.move_to(self.there.as_uri())

    def move_to(self, address: str) -> None:
        self.patch.setattr(models.SqueezeNet1_1_Weights.IMAGENET1K_V1.value, "url", address)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    return Published(tmp_path, monkeypatch)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return models.squeezenet1_1(num_classes=10)


def problem(model: nn.Module, settings: dict[str, Any], **more: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        initialise(model, settings, **more)
    (one,) = caught.value.problems
    assert isinstance(one, Problem)
    return one


def test_published_weights_are_fetched_once_and_leave_head_and_generators_alone(published: Published) -> None:
    untouched, after = new_model(), torch.rand(1)
    for there in (True, False):
        model = new_model()
        initialise(model, {"weights": NAME, "exclude": HEAD}, **OF_SQUEEZENET)
        assert torch.equal(torch.rand(1), after)
        state = model.state_dict()
        theirs = {name: untouched.state_dict()[name] if name.startswith("classifier.1.") else value for name, value in published.model.state_dict().items()}
        assert all(torch.equal(state[name], theirs[name]) for name in state)
        if there:
            published.there.unlink()  # from now on only the cache has them


def test_without_a_network_the_error_says_what_to_download_to_where(published: Published) -> None:
    address = f"http://127.0.0.1:1/{published.there.name}"
    published.move_to(address)
    told = problem(new_model(), {"weights": NAME}, **OF_SQUEEZENET)
    assert told.message.startswith("cannot be downloaded: ")
    assert told.hint == f"download {address} on a machine with network access, and copy the file to {published.cached}"
    assert not published.cached.exists()


def test_a_file_with_another_checksum_is_neither_read_nor_kept(published: Published) -> None:
    published.there.write_bytes(published.there.read_bytes()[:-1] + b"?")
    assert "invalid hash value" in problem(new_model(), {"weights": NAME}, **OF_SQUEEZENET).message
    assert not published.cached.exists()
    published.cached.write_bytes(b"not a file of weights")
    assert problem(new_model(), {"weights": NAME}, **OF_SQUEEZENET).message.startswith("the file in torch's cache does not match its checksum")


def test_torchaudio_files_need_a_checksum_from_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cached = tmp_path / "hub" / "torchaudio" / "models" / "conv_tasnet_base_libri2mix.pt"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"something")
    told = problem(nn.Linear(1, 1), {"weights": "torchaudio:CONVTASNET_BASE_LIBRI2MIX"})
    assert (told.path, told.hint) == ("initialise.sha256", f"initialise.sha256={sha256(cached)} accepts the file that was downloaded ({cached})")
    told = problem(nn.Linear(1, 1), {"weights": "torchaudio:CONVTASNET_BASE_LIBRI2MIX", "sha256": "0" * 64})
    assert told.message.startswith("the file in torch's cache does not match")


def run_below(root: Path) -> Path:
    """A run with a checkpoint at step 2, the best, and one at step 4."""
    run = root / "digits" / "3f2a00000000"
    for step in ("2", "4"):
        folder = run / "checkpoints" / f"step-{step:0>8}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"sha256": step * 64}))
    (run / "config.yaml").touch()
    (run / "checkpoints" / "latest").symlink_to("step-00000004")
    (run / "checkpoints" / "best").symlink_to("step-00000002")
    return run


def test_the_weights_of_a_run_are_its_best_checkpoint_and_count_in_the_fingerprint(tmp_path: Path) -> None:
    best = run_below(tmp_path) / "checkpoints" / "step-00000002"

    def compose_weights(weights: str, strict: bool = True) -> Any:
        return compose([f"run_root={tmp_path}", f"initialise.weights={weights}"], project=Project(tmp_path), strict=strict)

    by_name, by_path = compose_weights("run:3f2a"), compose_weights(str(best))
    assert by_name.cfg.initialise.weights == str(best)
    assert by_name.fingerprint == by_path.fingerprint
    (best / "manifest.json").write_text(json.dumps({"sha256": "5" * 64}))
    assert compose_weights("run:3f2a").fingerprint != by_name.fingerprint
    (told,) = compose_weights("run:3f2b", strict=False).problems
    assert (told.path, told.message) == ("initialise.weights", f"no such run in the folder {tmp_path}")
    assert by_name.sources == parse(dump(by_name)).sources == {"initialise.weights": "run:3f2a"}
    (best.parent / "best").unlink()
    assert compose_weights("run:digits").cfg.initialise.weights == str(best.parent / "step-00000004")


def test_weights_of_runs_go_by_the_users_words_in_differences_and_in_mlflow(samewise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    best = run_below(Path("runs")) / "checkpoints" / "step-00000002"

    def recorded(weights: str) -> str:
        composed = compose([f"initialise.weights={weights}", "experiment=resnet18_digits", "name=new"], project=Project(tmp_path))
        composed.folder.create()
        composed.folder.config.write_text(dump(composed))
        composed.folder.metrics.write_text('{"status": "FINISHED", "time_ms": 1}\n')
        return str(composed.folder.path)

    first, last = recorded("run:3f2a"), recorded("run:3f2a/last")
    assert "  initialise.weights: 'run:3f2a' | 'run:3f2a/last'\n" in samewise("diff", first, last).stdout
    assert {run["differs"]["initialise.weights"] for run in json.loads(samewise("runs", "--where=name=new", "--diff", "--json").stdout)} == {
        "run:3f2a",
        "run:3f2a/last",
    }
    assert samewise("sync", first).returncode == 0
    run = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db").get_run(json.loads((Path(first) / "tracking.json").read_text())["run_id"])
    assert run.data.params["initialise.weights"] == "run:3f2a"
    shutil.copytree(best, best.with_name("step-00000003"))
    (best.with_name("step-00000003") / "manifest.json").write_text(json.dumps({"sha256": "7" * 64}))
    (best.parent / "best").unlink()
    (best.parent / "best").symlink_to("step-00000003")
    other = recorded("run:3f2a")
    assert f"  initialise.weights: 'run:3f2a (sha256:{'2' * 12})' | 'run:3f2a (sha256:{'7' * 12})'\n" in samewise("diff", first, other).stdout
