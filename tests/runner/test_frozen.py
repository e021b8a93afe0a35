"""Frozen layers stay frozen: parameters and running statistics, in every strategy, through evaluations and resuming."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samewise_tiny import DIGITS
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.errors import ConfigError
from samewise.runner.optim.frozen import is_kept_in_eval_mode
from samewise.runner.optim.groups import freeze_groups, parameter_groups
from samewise.runner.optim.initialise import initialise
from samewise.runner.records import checkpoint
from samewise.runner.records.folder import RunFolder
from samewise.runner.strategies.sync_batch_norm import synchronise
from samewise.runner.training.build import build
from samewise.runner.training.evaluation import measure_split
from samewise.runner.training.loop import fit

BARE = Project(Path(__file__).resolve().parents[2])
TINY = [*DIGITS, "model.width=8", "max_steps=6", "evaluate.every_steps=2"]
BY_INITIALISE = ["initialise.frozen=[layer1.*]"]
BY_GROUPS = ["param_groups=none", "+param_groups.body={match: layer1.*, frozen: true}"]


def changed_names(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The names of parameters and buffers that have changed, by any bit."""
    assert list(before) == list(after)
    return {name for name, value in before.items() if not torch.equal(value.cpu(), after[name].cpu())}


def initial(*overrides: str, folder: Path) -> dict[str, Tensor]:
    model = build(compose([*TINY, *overrides], project=BARE), BARE, RunFolder(folder / "initial"), alone=True).model
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(*overrides: str, folder: Path) -> dict[str, Tensor]:
    run = build(compose([*TINY, *overrides], project=BARE), BARE, RunFolder(folder / "trained"))
    fit(run)
    return run.model.state_dict()


@pytest.mark.parametrize(
    ("how", "further"),
    [
        (BY_INITIALISE, []),
        (BY_GROUPS, ["strategy=elastic", "replicas=4"]),
        pytest.param(BY_INITIALISE, ["memory_format=channels_last", "accumulate=2", "callbacks=ema"], marks=pytest.mark.slow),
    ],
)
def test_only_frozen_layers_keep_their_parameters_and_statistics(how: list[str], further: list[str], tmp_path: Path) -> None:
    before = initial(*how, *further, folder=tmp_path)
    assert changed_names(before, train(*how, *further, folder=tmp_path)) == {name for name in before if not name.startswith("layer1.")}


@pytest.mark.slow
def test_a_resumed_run_keeps_frozen_layers_and_has_the_same_bits(tmp_path: Path, samewise: Callable[..., Any]) -> None:
    given = [*TINY, *BY_INITIALISE, "checkpoint.every_steps=2", "checkpoint.keep_last=9"]
    whole = json.loads(samewise("train", *given, f"run_root={tmp_path / 'whole'}", "--json").stdout)
    taken = Path(whole["folder"]) / "checkpoints" / "step-00000002"
    resumed = json.loads(samewise("train", *given, f"resume_from={taken}", f"run_root={tmp_path / 'resumed'}", "--json").stdout)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    after = checkpoint.load(Path(resumed["folder"]) / "checkpoints" / "latest")["model"]
    assert not any(name.startswith("layer1.") for name in changed_names(initial(*BY_INITIALISE, folder=tmp_path), after))


@pytest.mark.parametrize("how", [BY_INITIALISE, BY_GROUPS])
def test_frozen_norms_are_in_eval_mode_before_training_and_after_an_evaluation(how: list[str], tmp_path: Path) -> None:
    """A block may call `F.batch_norm(..., training=self.norm.training)` itself."""
    run = build(compose([*TINY, *how], project=BARE), BARE, RunFolder(tmp_path))
    norms = {name: module for name, module in run.model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    held = {name for name in norms if name.startswith("layer1.")}
    assert {name for name, norm in norms.items() if not norm.training} == held
    measure_split(run, "valid", run.model)
    assert {name for name, norm in norms.items() if not norm.training} == held


def test_frozen_batch_norms_stay_frozen_when_synchronised() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    initialise(model, {"frozen": ["1.*"]})
    synchronise(model)
    before = copy.deepcopy(model[1].state_dict())
    assert isinstance(model[1], nn.SyncBatchNorm)
    model[:2].train()(torch.randn(5, 3))
    assert changed_names(before, model[1].state_dict()) == set()


ADAM = ["optimizer=adamw", "optimizer.lr=0.001", "~optimizer.momentum", "~optimizer.nesterov"]
LATER = ["param_groups=none", "+param_groups.body={match: 're:^(conv1|bn1|layer1)', frozen_until: 1}", *ADAM]


@pytest.mark.parametrize("further", [[], pytest.param(["strategy=elastic", "replicas=2", "accumulate=2"], marks=pytest.mark.slow)])
def test_layers_frozen_until_an_epoch_are_trained_from_its_first_step(further: list[str], tmp_path: Path) -> None:
    """An epoch has four steps."""
    given = [*TINY, *LATER, *further]
    before = initial(*LATER, *further, folder=tmp_path)
    waits = {name for name in before if name.startswith(("conv1", "bn1", "layer1"))}
    run = build(compose([*given, "max_steps=4"], project=BARE), BARE, RunFolder(tmp_path / "until"))
    fit(run)
    assert changed_names(before, run.model.state_dict()) == before.keys() - waits
    run = build(compose(given, project=BARE), BARE, RunFolder(tmp_path / "beyond"))
    fit(run)
    assert changed_names(before, run.model.state_dict()) == before.keys()
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    steps = {names[id(parameter)]: int(state["step"]) for parameter, state in run.phases[0].optimizer.state.items()}
    assert steps == {name: 2 if name in waits else 6 for name in names.values()}


class Block(nn.Module):
    """Norms without parameters beside layers that have some, in the block itself and in a nested one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.partly = nn.BatchNorm1d(3)
        self.spectral = parametrizations.spectral_norm(nn.Linear(3, 3))
        nn.init.normal_(self.spectral.parametrizations.weight.original)  # so that its vectors have far to go
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(3, 2)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.drop(self.spectral(self.partly(self.norm(self.inner(value))))))


@pytest.mark.parametrize(
    ("frozen", "held"),
    [
        (["head.*"], set()),
        (["inner.0.*"], {"inner"}),  # all parameters around it
        (["inner.0.weight"], set()),
        (["inner.*"], {"inner"}),
        (["norm.*"], {"norm"}),  # by its statistics: it has no parameters
        (["norm"], {"inner", "norm", "partly"}),  # the kind
        (["type:BatchNorm1d"], {"inner", "norm", "partly"}),
        (["partly.weight"], set()),
        (["partly.weight", "partly.bias"], {"partly"}),
        (["spectral.*"], {"spectral"}),
        ([r"re:^(?!head\.)"], {"inner", "norm", "partly", "spectral"}),
        (["*"], {"inner", "norm", "partly", "spectral"}),
    ],
)
def test_a_layer_keeps_its_statistics_only_if_it_is_frozen_as_a_whole(frozen: list[str], held: set[str]) -> None:
    torch.manual_seed(0)
    by_initialise = Block()
    initialise(by_initialise, {"frozen": frozen})
    by_groups = Block()
    freeze_groups(by_groups, {"frozen": {"match": frozen, "frozen": True}})
    for model in (by_initialise, by_groups):
        before = copy.deepcopy(model.state_dict())
        model.train()(torch.randn(5, 3))
        assert {name.partition(".")[0] for name in changed_names(before, model.state_dict())} == {"inner", "norm", "partly", "spectral"} - held
        assert model.drop.training, "dropout is no state: it goes on"
        places = {"inner": "inner.1", "spectral": "spectral.parametrizations.weight.0"}
        assert {name for name, module in model.named_modules() if is_kept_in_eval_mode(module)} == {places.get(name, name) for name in held}


def test_a_frozen_layer_may_be_part_of_another_layer_too() -> None:
    shared = nn.BatchNorm1d(3, affine=False)
    model = nn.ModuleDict({"first": shared, "second": nn.BatchNorm1d(3, affine=False), "head": nn.Linear(3, 3)})
    model["second"].inner = shared
    initialise(model, {"frozen": ["second.inner.*"]})
    assert [name for name, module in model.named_modules() if is_kept_in_eval_mode(module)] == ["first", "second"]


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ({"match": "head.*", "frozen": True, "frozen_statistics": "no"}, "param_groups.a.frozen_statistics"),
        ({"match": "head.*", "frozen_statistics": "train"}, "param_groups.a.frozen_statistics"),
        ({"match": "norm.*", "weight_decay": 0.0}, "param_groups.a.match"),
    ],
)
def test_invalid_frozen_settings_are_refused(rule: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        parameter_groups(Block(), {"a": rule})
    assert [problem.path for problem in error.value.problems] == [path]
    with pytest.raises(ConfigError, match=r"initialise.frozen_statistics: no such choice"):
        initialise(Block(), {"frozen": ["head.*"], "frozen_statistics": "none"})
