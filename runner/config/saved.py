"""Runs on disk: found by folder, fingerprint or MLflow run id; their configs, with values overridden. Imports neither torch nor mlflow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samewise.runner.config import compose
from samewise.runner.config.compose import Composed
from samewise.runner.config.tree import differences, paths, plain
from samewise.runner.errors import ConfigError, Problem, first_line, nearest
from samewise.runner.records import shapes
from samewise.runner.records.files import read_json, read_mapping
from samewise.runner.records.folder import RunFolder


def find(name: str, *, run_root: Path) -> RunFolder:
    """The run called `name`: its folder, the start of its fingerprint, or its MLflow run id.

    Raises:
        ConfigError: none matches, or several do.
    """
    given = Path(name)
    if (given / "config.yaml").is_file():
        return RunFolder(given)
    matching = [
        run
        for run in below(run_root)
        if _is_called(run.path.name, name) or name in (read_mapping(run.tracking, shapes.TRACKING).get("run_id"), f"{run.path.parent.name}/{run.path.name}")
    ]
    if not matching:
        matching = [run for run in below(run_root) if run.path.name.startswith(name)]
    if not matching:
        matching = [run for run in below(run_root) if run.path.parent.name == name]
    if len(matching) == 1:
        return matching[0]
    if matching:
        names = ", ".join(f"{run.path.parent.name}/{run.path.name}" for run in matching[:5])
        raise ConfigError(Problem("RUN", f"{len(matching)} runs match", name, "one run", f"give more characters: {names}"))
    if bare := [one for one in (given, *run_root.glob("*/*")) if one.is_dir() and (one == given or one.name.startswith(name) or str(one).endswith(f"/{name}"))]:
        raise ConfigError(Problem(str(bare[0]), "the folder is there, but there is no config.yaml in it", expected="a run's folder", hint=RESTORE))
    known = [known for run in below(run_root) for known in (run.path.name, run.path.parent.name)]
    expected = "a run's folder, the start of its fingerprint, or its MLflow run id"
    raise ConfigError(Problem("RUN", f"no such run in {run_root}", name, expected, nearest(name, known)))


def _is_called(folder: str, name: str) -> bool:
    """Whether a folder has that name, or begins with it; `3f2a-2` is the second of those that begin with `3f2a`."""
    (own, _, number), (start, _, wanted) = folder.partition("-"), name.partition("-")
    return own.startswith(start) and number == wanted


def below(run_root: Path) -> Iterator[RunFolder]:
    """All runs in a run root."""
    for config in sorted(run_root.glob("*/*/config.yaml")):
        yield RunFolder(config.parent)


def config_of(folder: RunFolder, overrides: Sequence[str] = ()) -> Composed:
    """A run's saved config, with values of it overridden."""
    return config_in(folder.config, overrides)


def config_in(file: Path, overrides: Sequence[str] = ()) -> Composed:
    """A saved config, with values of it overridden (`seed=1`, `loader.num_workers=2`).

    Raises:
        ConfigError: an override names no key of the config, or its value does not fit.
    """
    saved = compose.load(file)
    cfg: Any = saved.cfg
    problems: list[Problem] = []
    for override in overrides:
        key, separator, _ = override.partition("=")
        try:
            given = OmegaConf.from_dotlist([override])
            if not separator or OmegaConf.select(cfg, key, default=_ABSENT) is _ABSENT:
                problems.append(Problem(key, "no such key in the run's config", override, hint=nearest(key, paths(cfg))))
                continue
            if isinstance(OmegaConf.select(cfg, key), DictConfig) and not isinstance(OmegaConf.select(given, key), DictConfig):
                problems.append(Problem(key, "is a group of the run's config; only values can be overridden", override, f"{key}.NAME=VALUE"))
                continue
            cfg = OmegaConf.merge(cfg, given)
        except OmegaConfBaseException as error:
            problems.append(Problem(key, first_line(error), override))
    if problems:
        raise ConfigError(*problems)
    label = " ".join(filter(None, (saved.label, compose.label_of(overrides))))
    return dataclasses.replace(saved, cfg=cfg, overrides=tuple(overrides), label=label)


def answers(folder: RunFolder, cfg: DictConfig) -> bool:
    """Whether a finished run of the same fingerprint is what `cfg` asks for: data in the same places, and no other device asked for by name."""
    device = (read_json(folder.environment, shapes.ENVIRONMENT) or {}).get("device", {}).get("kind")
    same_data = differences({"dataset": plain(compose.load(folder.config).cfg.dataset)}, {"dataset": plain(cfg.dataset)}) == []
    return same_data and str(cfg.device) in ("auto", device)


RESTORE = "if it is one, restore the file from a copy: nothing else says what was trained"
_ABSENT = object()
