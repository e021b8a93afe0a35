"""Overrides to a config.

Hydra's part: the search path, the defaults list, the merge, the override grammar. docs/design.md lists the
few other places that import Hydra.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins import file_config_source
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobRuntime
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from samewise.runner.config import header
from samewise.runner.config import overrides as faults
from samewise.runner.config.fingerprint import fingerprint, is_outside
from samewise.runner.config.project import Project
from samewise.runner.config.schema import Experiment
from samewise.runner.config.tree import flat
from samewise.runner.config.yaml_files import require_modest
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.files import read_text
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.sweep_folder import label as in_words

ROOT = "config"
"""The config that every experiment starts from: configs/config.yaml."""


@dataclass(frozen=True)
class Composed:
    """A config and where it came from.

    Args:
        cfg: The config, typed by `schema.Experiment`, closed to new keys; interpolations are resolved as they are read.
        choices: The chosen file of each group (`{"optimizer": "sgd"}`); groups with none chosen are left out.
        overrides: The command line's, as given.
        project: The user's own packages and config folders, as they were when it was composed.
        problems: What was wrong, when asked for instead of an exception; `cfg` then lacks the overrides at fault.
        label: What was overridden of what decides the result: `lr=0.03 seed=1`; empty where nothing was.
    """

    cfg: DictConfig
    choices: dict[str, str] = field(default_factory=dict[str, str])
    overrides: tuple[str, ...] = ()
    project: Project = field(default_factory=lambda: Project(Path.cwd()))
    problems: tuple[Problem, ...] = ()
    label: str = ""

    @property
    def name(self) -> str:
        """The experiment's name: `name`, else the choice of `experiment=`, else the recipe's, the model's and the data set's."""
        given = self.cfg.get("name") or self.choices.get("experiment")
        parts = [self.choices[group] for group in ("recipe", "model", "dataset") if group in self.choices]
        return str(given or "-".join(parts) or "experiment").replace("/", "-")

    @property
    def fingerprint(self) -> str:
        """The identity's sha256, in hexadecimal."""
        return fingerprint(self.cfg)

    @property
    def folder(self) -> RunFolder:
        """Where the run is kept: `RUN_ROOT/NAME/FINGERPRINT[:12]`."""
        return RunFolder(Path(self.cfg.run_root) / self.name / self.fingerprint[:12])

    @property
    def tracking_uri(self) -> str | None:
        """Of the MLflow store; None where tracking is off."""
        return self.cfg.tracking.uri if self.cfg.tracking.enabled else None


def compose(given: Sequence[str], *, project: Project, strict: bool = True) -> Composed:
    """Compose one experiment.

    Args:
        given: Overrides as Hydra writes them: `experiment=resnet18_digits`, `optimizer.lr=0.05`, `+optimizer.nesterov=true`.
        project: Where the user's own config folders lie.
        strict: Raise what is wrong; else return it as `problems`, with the config that the faultless overrides give.

    Raises:
        ConfigError: with a problem for every override that is wrong, and for what is wrong in a file.
    """
    loader = config_loader(project)
    well, problems = faults.read_overrides(given)
    good = [str(override.input_line) for override in well]
    try:
        cfg = None if problems else root_config(loader, good)
    except faults.FAILURES:
        cfg = None
    if cfg is None:
        cfg, good, problems = faults.diagnose(given, load=lambda some: root_config(loader, some), groups=groups(loader))
        if cfg is None:
            raise ConfigError(*problems)
    chosen = choices_in(cfg)
    problems += _set_for_hydra(cfg.hydra)
    cfg = without_hydra(cfg)
    problems += faults.unresolvable(cfg)
    if problems and strict:
        raise ConfigError(*problems)
    return Composed(cfg, chosen, tuple(good), project, tuple(problems), label_of(good))


def load(path: Path) -> Composed:
    """Read a run's saved config again, with its types.

    Raises:
        ConfigError: the file does not exist, or it is not a config.
    """
    text = read_text(path)
    if text is None:
        raise ConfigError(Problem(str(path), "does not exist", expected="a run's config.yaml"))
    return parse(text, str(path))


def parse(text: str, name: str = "config") -> Composed:
    """What `dump` wrote.

    Raises:
        ConfigError: it is not a config.
    """
    require_modest(text, name, interpolations="none")
    try:
        if not isinstance(yaml.safe_load(text), dict):
            raise ConfigError(Problem(name, "is not a config: no mapping in it"))
        cfg = OmegaConf.merge(OmegaConf.structured(Experiment), OmegaConf.create(text))
        choices, label = header.read(text)
    except RecursionError:
        raise ConfigError(Problem(name, "is not a run's config: it is nested too deeply")) from None
    except (
        yaml.YAMLError,
        OmegaConfBaseException,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
    ) as error:  # PyYAML's constructors raise what they like
        raise ConfigError(Problem(name, f"is not a run's config: {faults.problem_in_file(error)}")) from None
    assert isinstance(cfg, DictConfig)
    OmegaConf.set_struct(cfg, True)
    return Composed(cfg, choices, label=label)


def dump(composed: Composed) -> str:
    """The resolved config as YAML, headed by lines with the choices and the label, for `load`."""
    return dump_plain(OmegaConf.to_container(composed.cfg, resolve=True, enum_to_str=True), composed.choices, composed.label)


def dump_plain(whole: Any, choices: Mapping[str, str], label: str = "") -> str:
    """The same of a config that is plain already."""
    text = yaml.dump(whole, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=get_omega_conf_dumper())
    return header.write(choices, label) + text


def label_of(overrides: Sequence[str]) -> str:
    """What overrides change of the result, in a few words; what only says where and how a run is carried out is left out."""
    values = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    seed = values.pop("seed", None)
    kept = {key: value for key, value in values.items() if key == "debug" or (key != "experiment" and not is_outside(key.lstrip("+~")))}
    return in_words(kept, seed) if kept or seed is not None else ""


_PROJECT, _GIVEN = "project", "given"
"""Whose folder of configs: the project's own, or one that --config-dir names, which may be a stranger's."""


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's own, with limits; of its name, or Hydra would not take it for the same where a program uses Hydra itself too."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path) / self._normalize_file_name(config_path)
        if (text := read_text(file)) is not None:
            require_modest(text, str(file), interpolations="own" if self.provider == _GIVEN else "all")
        return super().load_config(config_path)


def config_loader(project: Project) -> ConfigLoaderImpl:
    """Hydra's loader over the project's config folders, then samewise's."""
    version.setbase("1.3")
    for source in (FileConfigSource, ImportlibResourcesConfigSource, StructuredConfigSource):  # Hydra itself would import all plugins there are
        SourcesRegistry.instance().types[source.scheme()] = source
    JobRuntime.instance().set("name", "samewise")
    ConfigStore.instance().store(name="schema", node=Experiment, provider="samewise")
    # Without what Hydra chooses for itself (launcher, sweeper, logging, help), a third of the files, all of it thrown away in `without_hydra`.
    ConfigStore.instance().store(group="hydra", name="config", node=HydraConf(defaults=[]), provider="samewise")
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder in project.configs:
        path.append(_GIVEN if folder in project.given else _PROJECT, f"file://{folder}")
    path.append("main", "pkg://samewise.configs")
    path.append("schema", "structured://")
    return ConfigLoaderImpl(path)


def groups(loader: ConfigLoaderImpl, under: str = "") -> dict[str, list[str]]:
    """The choices of every group (`{"optimizer": ["adamw", "sgd"]}`), groups within groups by their path (`debug/sizes`)."""
    found = dict[str, list[str]]()
    for name in loader.repository.get_group_options(under, ObjectType.GROUP):  # the loader's own of this name makes a repository for each call
        group = f"{under}/{name}" if under else name
        if group == "hydra" or name.startswith("_"):
            continue
        found[group] = loader.repository.get_group_options(group, ObjectType.CONFIG)
        found |= groups(loader, group)
    return found


def root_config(loader: ConfigLoaderImpl, given: Sequence[str]) -> DictConfig:
    """The root config with overrides, as Hydra composes it, its own settings included."""
    return loader.load_configuration(ROOT, list(given), RunMode.RUN, from_shell=False)


def choices_in(cfg: DictConfig) -> dict[str, str]:
    """The choice of each group in what `root_config` gave."""
    return {str(group): str(choice) for group, choice in cfg.hydra.runtime.choices.items() if choice is not None and not str(group).startswith("hydra/")}


def without_hydra(cfg: DictConfig) -> DictConfig:
    """The config less Hydra's own settings; changed in place."""
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def _set_for_hydra(composed: DictConfig) -> list[Problem]:
    """What a config file sets for Hydra itself, such as where else it would look for configs."""
    initial = OmegaConf.structured(HydraConf(defaults=[]))
    plain, usual = (cast(dict[str, Any], OmegaConf.to_container(node, resolve=False)) for node in (composed, initial))
    found = [key for key in plain if key not in ("job", "overrides", "runtime") and plain[key] != usual.get(key)]
    found += [f"job.{key}" for key, value in plain["job"].items() if key not in ("name", "override_dirname", "config_name") and value != usual["job"].get(key)]
    found += [group.partition("/")[2] for group in plain["runtime"]["choices"] if str(group).startswith("hydra/")]
    words = "a config file sets this for Hydra, which samewise uses to compose configs and for nothing else"
    return [Problem(f"hydra.{key}", words, hint="remove it; further folders of configs are given with --config-dir or in pyproject.toml") for key in found]


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
    defaults = loader.compute_defaults_list(ROOT, list(given), RunMode.RUN)
    found = dict[str, str]()
    for default in defaults.defaults:
        if default.config_path is None or default.config_path.startswith("hydra/"):
            continue
        loaded = loader.repository.load_config(default.config_path)
        assert loaded is not None
        package = default.package if default.package is not None else loaded.header["package"]
        if default.config_path == "schema":
            label = "runner/config/schema.py"
        elif loaded.provider in (_PROJECT, _GIVEN):
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


def _comment(loader: ConfigLoaderImpl, config: str) -> str:
    """The first comment of a config file that says something (not `# @package`)."""
    for source in loader.get_sources():
        if source.is_config(config):
            return next((line.lstrip("# ").strip() for line in _head(source, config) if line.startswith("#") and "@package" not in line), "")
    return ""


def _head(source: ConfigSource, config: str) -> list[str]:
    name = f"{config}.yaml"
    if source.scheme() == "file":
        return (Path(source.path) / name).read_text(encoding="utf-8").splitlines()[:20]
    if source.scheme() == "pkg":
        return resources.files(source.path.replace("/", ".")).joinpath(name).read_text(encoding="utf-8").splitlines()[:20]
    return []
