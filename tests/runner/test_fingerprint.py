"""What is part of an experiment's identity, and what is not."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, open_dict

from samewise.runner.config import fingerprint as fingerprints
from samewise.runner.config.compose import compose
from samewise.runner.config.project import Project
from samewise.runner.config.tree import differences, plain

BARE = Project(Path(__file__).resolve().parents[2])


def config_of(*overrides: str) -> DictConfig:
    return compose(overrides, project=BARE).cfg


def fingerprint(cfg: DictConfig) -> str:
    return fingerprints.fingerprint_of(plain(cfg))


def identity(cfg: DictConfig) -> dict[str, Any]:
    return fingerprints.identity(plain(cfg))


@pytest.mark.parametrize(
    "override",
    [
        *("name=other", "run_root=/elsewhere", "device=cpu", "activation_checkpointing=[BasicBlock]", "loader.num_workers=3", "loader.prefetch_factor=5"),
        *("loader.pin_memory=false", "checkpoint.every_steps=10", "evaluate.pictures=false", "tracking=none", "tracking.uri=http://127.0.0.1:5000"),
        *("trace.layers_every_steps=0", "callbacks=none", "reproducibility.other_environment=record", "reproducibility.fill_uninitialized_memory=true"),
        *("strategy.rank_invariant=true", "optimizer.lr=1e-1", "+dataset.train.root=/data/here", "+dataset.download=true", "+dataset.cache_dir=/tmp/x"),
    ],
)
def test_settings_that_cannot_change_a_result_are_left_out(override: str) -> None:
    assert fingerprint(config_of(override)) == fingerprint(config_of())


def test_a_newer_setting_counts_only_if_it_differs_from_the_default() -> None:
    assert "limit" not in identity(config_of())["evaluate"]
    assert identity(config_of("evaluate.limit=2"))["evaluate"]["limit"] == 2
    assert "compile" not in identity(config_of())
    assert identity(config_of("compile=default"))["compile"] == {"mode": "default", "cuda_graphs": False}
    assert (
        fingerprint(config_of("compile=max")) != fingerprint(config_of("compile=default")) == fingerprint(config_of("compile=default", "compile.max_graphs=2"))
    )


@pytest.mark.parametrize(
    "override",
    [
        *("seed=1", "max_epochs=11", "evaluate.limit=2", "batch_size=32", "replicas=2", "accumulate=2", "optimizer.lr=0.2", "model=resnet34", "dataset=mnist"),
        *("loader.shuffle=false", "precision=bf16", "reproducibility.threads=2", "reproducibility=portable", "callbacks=ema", "callbacks=early_stopping"),
        *("strategy.rank_invariant=false", "memory_format=channels_last"),
    ],
)
def test_settings_that_can_change_a_result_count(override: str) -> None:
    assert fingerprint(config_of(override)) != fingerprint(config_of())


def test_a_weights_file_counts_by_its_content(tmp_path: Path) -> None:
    prints = list[str]()
    for name, content in (("a.pt", b"one"), ("b.pt", b"one"), ("c.pt", b"two")):
        (tmp_path / name).write_bytes(content)
        cfg = config_of()
        with open_dict(cfg):
            cfg.initialise = {"weights": str(tmp_path / name)}
        assert str(tmp_path) not in str(identity(cfg))
        prints.append(fingerprint(cfg))
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("given", "spelled_out", "other"),
    [
        (["initialise.frozen=[fc.*]"], ["+initialise.frozen_statistics=freeze"], ["+initialise.frozen_statistics=train"]),
        (["param_groups=head_only"], ["+param_groups.body.frozen_statistics=freeze"], ["+param_groups.body.frozen_statistics=train"]),
        (["callbacks=ema", "~callbacks.ema.every_steps"], ["+callbacks.ema.every_steps=1"], ["+callbacks.ema.every_steps=32"]),
    ],
)
def test_a_default_that_has_changed_counts_like_its_explicit_value(given: list[str], spelled_out: list[str], other: list[str]) -> None:
    left_out = config_of(*given)
    assert "freeze" in str(identity(left_out)) or "'every_steps': 1" in str(identity(left_out))
    assert fingerprint(left_out) == fingerprint(config_of(*given, *spelled_out)) != fingerprint(config_of(*given, *other))


def test_differences_name_the_path_and_both_values() -> None:
    assert differences(config_of("seed=1", "optimizer.lr=0.2"), config_of("+optimizer.foo=1")) == [
        ("optimizer.foo", "???", 1),
        ("optimizer.lr", 0.2, 0.1),
        ("seed", 1, 0),
    ]
    assert differences(config_of(), config_of()) == []
