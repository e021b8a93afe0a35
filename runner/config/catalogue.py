"""What there is to choose, each with its description, and which file or override a value comes from."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf

from samewise.runner.config.loader import GIVEN, PROJECT, ROOT, config_loader, groups
from samewise.runner.config.project import Project
from samewise.runner.config.schema import Experiment
from samewise.runner.config.tree import flat


def choices_of(group: str, *, project: Project) -> dict[str, str]:
    """Each choice of a group with the first comment of its file."""
    loader = config_loader(project)
    return {name: _comment(loader, f"{group}/{name}") for name in loader.get_group_options(group, ObjectType.CONFIG)}


def group_summaries(project: Project) -> dict[str, str]:
    """Each group with the description of its key in the schema and its number of choices."""
    found = dict[str, str]()
    for group, names in groups(config_loader(project)).items():
        about = GROUPS.get(group) or field_summaries(Experiment).get(group, "")
        found[group] = f"{about} ({len(names)} choice{'' if len(names) == 1 else 's'})".lstrip()
    return found


GROUPS = {
    "experiment": "Complete experiments, each with the result to expect.",
    "debug": "Any experiment, reduced in size.",
    "debug/sizes": "What debug=tiny sets for each recipe.",
    "loss": "The loss of the recipes that take one (recipe=classification); none: the recipe's own.",
    "checkpoint": "When checkpoints are written and which are kept.",
    "tracking": "Where metrics, configs and pictures go.",
    "reproducibility": "Determinism, and what to do where it is not possible.",
}
"""Groups that are not a key of the schema, or whose key is described elsewhere."""


def field_summaries(kind: type) -> dict[str, str]:
    """The docstring of each field of a settings class: the string that stands under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = dict[str, str]()
    for line, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[line.target.id] = str(after.value.value)
    return found


def origins(given: Sequence[str], *, project: Project) -> dict[str, str]:
    """The file or override that each value comes from: the last that sets it, in the order in which Hydra merges them.

    Returns:
        Config path to `optimizer/sgd.yaml`, with the folder before it where it is a project's own, `schema`, or the override.
    """
    loader = config_loader(project)
    defaults = loader.compute_defaults_list(ROOT, project.with_experiment(given), RunMode.RUN)
    found = dict[str, str]()
    for default in defaults.defaults:
        if default.config_path is None or default.config_path.startswith("hydra/"):
            continue
        loaded = loader.repository.load_config(default.config_path)
        assert loaded is not None
        package = default.package if default.package is not None else loaded.header["package"]
        if default.config_path == "schema":
            label = "runner/config/schema.py"
        elif loaded.provider in (PROJECT, GIVEN):
            label = f"{loaded.path.removeprefix('file://')}/{default.config_path}.yaml"
        else:
            label = f"configs/{default.config_path}.yaml"
        _mark(found, package or "", OmegaConf.to_container(loaded.config), label)
    for override in defaults.config_overrides:
        if not override.is_delete():
            _mark(found, override.key_or_group, override.value(), f"override {override.input_line}")
    return found


def _mark(found: dict[str, str], under: str, value: Any, label: str) -> None:
    """Note `label` for every value in `value`; a list or scalar replaces whatever stood at its path and below."""
    if isinstance(value, dict) and value:
        for key, part in cast(dict[str, Any], value).items():
            _mark(found, f"{under}.{key}" if under else str(key), part, label)
        return
    for path in [path for path in found if path.startswith(f"{under}.")]:
        del found[path]
    for path, _ in flat(value, under) if isinstance(value, list) else [(under, value)]:
        found[path] = label


_FOR_PROGRAMS = re.compile(r"@package|yaml-language-server:")


def _comment(loader: ConfigLoaderImpl, config: str) -> str:
    """The first comment of a config file that says something (neither `# @package` nor an editor's)."""
    for source in loader.get_sources():
        if source.is_config(config):
            return next((line.lstrip("# ").strip() for line in _head(source, config) if line.startswith("#") and not _FOR_PROGRAMS.search(line)), "")
    return ""


def _head(source: ConfigSource, config: str) -> list[str]:
    name = f"{config}.yaml"
    if source.scheme() == "file":
        return (Path(source.path) / name).read_text(encoding="utf-8").splitlines()[:20]
    if source.scheme() == "pkg":
        return resources.files(source.path.replace("/", ".")).joinpath(name).read_text(encoding="utf-8").splitlines()[:20]
    return []
