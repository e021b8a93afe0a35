"""The interface to Hydra: finds config files, and composes a choice of them into one config."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, Self, cast

import yaml
from hydra import version
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins import file_config_source, importlib_resources_config_source, structured_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from samewise.runner.config.deprecated import rename_settings
from samewise.runner.config.file_faults import FileFaults
from samewise.runner.config.override_text import ONE_CHOICE
from samewise.runner.config.project import Project
from samewise.runner.config.schema import Experiment
from samewise.runner.config.yaml_files import read_yaml, require_modest
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.files import read_text

ROOT = "config"
"""The config that every experiment starts from: configs/config.yaml."""

PROJECT, GIVEN = "project", "given"
"""Whose folder of configs: the project's own, or one that --config-dir names, which may be a stranger's."""


class _Shared(ConfigSource):
    """Not copied for each composition, as Hydra would: nothing changes a source, and a copy of the schema takes longer than composing an experiment from it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class _Inside(_Shared):
    """Finds configs only in its own folder; `..` or an absolute path would load a file of one folder as if it were in another."""

    def is_config(self, config_path: str) -> bool:
        source: Any = super()
        return _is_inside(config_path) and source.is_config(config_path)

    def is_group(self, config_path: str) -> bool:
        source: Any = super()
        return _is_inside(config_path) and source.is_group(config_path)


class FileConfigSource(_Inside, file_config_source.FileConfigSource):
    """Hydra's class with limits, under the same name, so that Hydra recognises it even if a program uses Hydra itself."""

    faults: FileFaults | None = None
    """Takes what is wrong in a file out of it; None: Hydra raises over it."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path) / self._normalize_file_name(config_path)
        if (text := read_text(file)) is not None:
            require_modest(text, str(file), interpolations="own" if self.provider == GIVEN else "all")
        if text is None or self.faults is None:
            return _renamed(super().load_config(config_path), file, config_path)
        try:
            return self.faults.remove_faults(_renamed(super().load_config(config_path), file, config_path), file, config_path, text)
        except yaml.YAMLError as error:
            self.faults.unreadable(error)
            return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", OmegaConf.create({}), {"package": "_global_"})


def _renamed(result: ConfigResult, file: Path, config_path: str) -> ConfigResult:
    group, package = config_path.rpartition("/")[0], result.header["package"]
    under = group.replace("/", ".") if package in (None, "_group_") else "" if package == "_global_" else str(package)
    result.config = rename_settings(cast(DictConfig, result.config), str(file), under)
    return result


class ImportlibResourcesConfigSource(_Inside, importlib_resources_config_source.ImportlibResourcesConfigSource):
    """Hydra's class under the same name, which parses a file once, in a third less time to compose, and looks once for what is in a package."""

    def load_config(self, config_path: str) -> ConfigResult:
        return _parsed((self.provider, self.path, config_path), super().load_config)

    def is_config(self, config_path: str) -> bool:
        return _found(super().is_config, self.path, config_path)

    def is_group(self, config_path: str) -> bool:
        return _found(super().is_group, self.path, config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return _found(super().list, self.path, config_path, results_filter)


class StructuredConfigSource(_Shared, structured_config_source.StructuredConfigSource):
    """Hydra's class under the same name, which copies a node of the schema in a third of the time."""

    def load_config(self, config_path: str) -> ConfigResult:
        return _parsed(("", "", config_path), super().load_config)


def _parsed(key: tuple[str, str, str], load: Callable[[str], ConfigResult]) -> ConfigResult:
    if key not in _PARSED:
        _PARSED[key] = pickle.dumps(load(key[2]), pickle.HIGHEST_PROTOCOL)
    return pickle.loads(_PARSED[key])


def _found(look: Callable[..., Any], package: str, *where: Any) -> Any:
    key = (look.__name__, package, *where)
    if key not in _FOUND:
        _FOUND[key] = look(*where)
    return _FOUND[key]


class _Loader(ConfigLoaderImpl):
    """Hydra's class without `hydra.searchpath`, which would load from elsewhere and import packages; `hydra_settings` reports it.

    It keeps the list of files that it has composed, which takes Hydra half of the time to compose.
    """

    _newest: list[ResultDefault]

    def __init__(self, path: ConfigSearchPathImpl) -> None:
        super().__init__(path)
        self.chosen = dict[tuple[str, ...], list[ResultDefault]]()

    def load_configuration(self, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any) -> DictConfig:
        cfg = super().load_configuration(config_name, overrides, *args, **kwargs)
        self.chosen[tuple(overrides)] = self._newest
        return cfg

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        self._newest = defaults
        return super()._compose_config_from_defaults_list(defaults, repo)

    def _process_config_searchpath(self, config_name: str | None, parsed_overrides: list[Override], repo: CachingConfigRepository) -> None:
        pass


_PARSED = dict[tuple[str, str, str], bytes]()
"""Pickled, in this process and for it: a copy of a config takes copy.deepcopy three times as long."""


_FOUND = dict[tuple[Any, ...], Any]()
"""What is in a package: its files stay as they are while the process lasts."""


def _interpolation_map(create: Callable[..., DictConfig], overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
    """Hydra's function of this name, which makes a map of all choices for every config file: an empty one if no default of the file will look into it."""
    return create(overrides, defaults, self_added) if any(default.is_interpolation() for default in defaults) else OmegaConf.create()


@cache
def _set_up_hydra() -> None:
    version.setbase("1.3")
    library: Any = defaults_list
    library._create_interpolation_map = partial(_interpolation_map, library._create_interpolation_map)
    for source in (FileConfigSource, ImportlibResourcesConfigSource, StructuredConfigSource):  # Hydra itself would import every plugin
        SourcesRegistry.instance().types[source.scheme()] = source
    JobRuntime.instance().set("name", "samewise")
    ConfigStore.instance().store(name="schema", node=Experiment, provider="samewise")
    # Without Hydra's own choices (launcher, sweeper, logging, help): a third of the files, all discarded in `remove_hydra`.
    ConfigStore.instance().store(group="hydra", name="config", node=HydraConf(defaults=[]), provider="samewise")


def config_loader(project: Project, faults: FileFaults | None = None) -> ConfigLoaderImpl:
    """Hydra's loader for the project's config folders, then samewise's. Errors in their files are added to `faults`; without `faults` Hydra raises them."""
    _set_up_hydra()
    path = ConfigSearchPathImpl()
    path.append("hydra", "pkg://hydra.conf")
    for folder in project.configs:
        _require_no_root(folder / f"{ROOT}.yaml")
        path.append(GIVEN if folder in project.given else PROJECT, f"file://{folder}")
    path.append("main", "pkg://samewise.configs")
    path.append("schema", "structured://")
    loader = _Loader(path)
    for source in loader.get_sources():
        if isinstance(source, FileConfigSource):
            source.faults = faults
    return loader


def _require_no_root(file: Path) -> None:
    """Raise a ConfigError for a file that would replace samewise's root config; an identical copy is allowed."""
    if file.is_file() and read_text(file) != resources.files("samewise.configs").joinpath(f"{ROOT}.yaml").read_text(encoding="utf-8"):
        hint = "give it another name; an experiment's file belongs in the folder `experiment`"
        raise ConfigError(Problem(str(file), "would take the place of samewise's own config.yaml, which every experiment starts from", hint=hint))


def _is_inside(config_path: str) -> bool:
    return not config_path.startswith("/") and ".." not in config_path.split("/")


def text_of(loader: ConfigLoaderImpl, config: str) -> str:
    """The content of a config's file (`optimizer/sgd`); empty if there is none."""
    source = next((one for one in loader.get_sources() if one.is_config(config)), None)
    if source is None or source.scheme() not in ("file", "pkg"):
        return ""
    folder = Path(source.path) if source.scheme() == "file" else resources.files(source.path.replace("/", "."))
    return folder.joinpath(f"{config}.yaml").read_text(encoding="utf-8")


def groups(loader: ConfigLoaderImpl, under: str = "") -> dict[str, list[str]]:
    """The choices of every group (`{"optimizer": ["adamw", "sgd"]}`); nested groups by their path (`debug/sizes`)."""
    found = dict[str, list[str]]()
    for name in loader.repository.get_group_options(under, ObjectType.GROUP):  # Hydra's method of this name creates a repository at each call
        group = f"{under}/{name}" if under else name
        if group == "hydra" or name.startswith("_"):
            continue
        found[group] = loader.repository.get_group_options(group, ObjectType.CONFIG)
        found |= groups(loader, group)
    return found


def faults_in_files(loader: ConfigLoaderImpl) -> FileFaults:
    """The faults in config files that this loader finds, given its groups and those in the root's defaults list."""
    chosen = read_yaml(text_of(loader, ROOT))["defaults"]
    return FileFaults(groups(loader), {key for entry in chosen if isinstance(entry, dict) for key in cast(dict[str, Any], entry)})


def root_config(loader: ConfigLoaderImpl, given: Sequence[str]) -> DictConfig:
    """The root config with overrides as Hydra composes it, with Hydra's own settings."""
    return loader.load_configuration(ROOT, list(given), RunMode.RUN, from_shell=False)


def chosen_files(loader: ConfigLoaderImpl, given: Sequence[str]) -> list[ResultDefault]:
    """The config files that overrides choose, in Hydra's order of merging."""
    known = loader.chosen.get(tuple(given)) if isinstance(loader, _Loader) else None
    return loader.compute_defaults_list(ROOT, list(given), RunMode.RUN).defaults if known is None else known


def choices_in(cfg: DictConfig) -> dict[str, str]:
    """The choice of each group in the result of `root_config`."""
    return {str(group): str(choice) for group, choice in cfg.hydra.runtime.choices.items() if choice is not None and not str(group).startswith("hydra/")}


def chooses_several(cfg: DictConfig) -> bool:
    """Whether a list may have chosen several of a group that takes one choice, in the result of `root_config`: Hydra then lists no choice for it."""
    return any(group not in cfg.hydra.runtime.choices for group in ONE_CHOICE)


def remove_hydra(cfg: DictConfig) -> DictConfig:
    """Remove Hydra's own settings from the config, in place."""
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


@cache
def _hydra_defaults() -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(HydraConf(defaults=[])), resolve=False))


def hydra_settings(composed: DictConfig) -> list[Problem]:
    """Problems for settings of Hydra itself in a config file, such as other places to look for configs."""
    plain, usual = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=False)), _hydra_defaults()
    found = [key for key in plain if key not in ("job", "overrides", "runtime") and plain[key] != usual.get(key)]
    found += [f"job.{key}" for key, value in plain["job"].items() if key not in ("name", "override_dirname", "config_name") and value != usual["job"].get(key)]
    found += [group.partition("/")[2] for group in plain["runtime"]["choices"] if str(group).startswith("hydra/")]
    words = "a config file may not set this: samewise uses Hydra only to compose configs"
    return [Problem(f"hydra.{key}", words, hint="remove it; further folders of configs are given with --config-dir or in pyproject.toml") for key in found]
