"""The interface to Hydra: finds config files, and composes a choice of them into one config.

Hydra decides from the defaults lists which files are merged, and in which order. It sees nothing
else of them: they are read and merged here.
"""

import contextlib
import pickle
import re
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath, SearchPathElement
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from hydra.version import VersionBase, setbase
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

from samewise.runner.config.file_faults import FileFaults
from samewise.runner.config.override_text import ONE_CHOICE
from samewise.runner.config.project import Project
from samewise.runner.config.schema import Experiment
from samewise.runner.config.yaml_files import read_yaml, require_modest
from samewise.runner.errors import ConfigError
from samewise.runner.records.files import read_text

ROOT = "config"
"""The config that every experiment starts from: configs/config.yaml."""
SCHEMA = "schema"
"""The first config that the root builds on: the settings of schema.py, typed."""
_SETTINGS = "hydra/config"
"""The config that Hydra puts before the root: the settings of Hydra itself. It is empty here, and
the schema has no place for others."""
_RESOLVERS = (
    "now",
    "hydra",
    "python_version",
    "hydra_override_dirname",
    "hydra_deprecated_override_dirname",
)
"""What Hydra adds to the `${...}` that every config of the process may use."""


@dataclass(frozen=True)
class ConfigFile:
    """The content of a config file.

    Args:
        path: The file's path; None: the schema, which is not a file.
        is_project: True for a file of the project's config folders, not of samewise's.
        package: The package of its values (`# @package _global_`); None: the name of its group.
        defaults: Its defaults list.
        config: Its other values, with their references.
    """

    path: Path | None
    is_project: bool
    package: str | None
    defaults: Any
    config: Any


class Loader:
    """Finds files in the project's config folders, then in samewise's, and composes them.

    A name is Hydra's: `optimizer/sgd`. One with `..`, or an absolute one, is not found: it would
    load a file of one folder as if it were in another.

    Args:
        project: Has the config folders.
        faults: Takes what is wrong in a file of the project's out of it; None: composing raises one
            of `overrides.FAILURES`.
    """

    def __init__(self, project: Project, faults: FileFaults | None = None) -> None:
        for folder in project.configs:
            _require_no_root(folder / f"{ROOT}.yaml")
        self._project, self._faults = project, faults
        self._folders = (*project.configs, _library())
        self._selected = dict[tuple[str, ...], Any]()

    def is_config(self, name: str) -> bool:
        """Return whether a config of this name exists."""
        return name in (SCHEMA, _SETTINGS) or any(self._find(name))

    def is_group(self, name: str) -> bool:
        """Return whether a group (a folder) of this name exists."""
        return _is_inside(name) and any((folder / name).is_dir() for folder in self._folders)

    def choices_of(self, group: str) -> list[str]:
        """The configs of a group, sorted."""
        return sorted(
            {
                file.stem
                for place in self._places(group)
                for file in place.glob("*.yaml")
                if file.is_file()
            }
        )

    def groups_in(self, group: str) -> list[str]:
        """The groups directly in a group, sorted."""
        return sorted(
            {
                entry.name
                for place in self._places(group)
                for entry in place.iterdir()
                if entry.is_dir() and not entry.name.startswith("_")
            }
        )

    def groups(self, under: str = "") -> dict[str, list[str]]:
        """The choices of every group (`{"optimizer": ["adamw", "sgd"]}`).

        Nested groups by their path (`debug/sizes`).
        """
        group_choices = dict[str, list[str]]()
        for name in self.groups_in(under):
            group = f"{under}/{name}" if under else name
            # Hydra's own settings are not a group to choose from
            if group != "hydra":
                group_choices[group] = self.choices_of(group)
                group_choices |= self.groups(group)
        return group_choices

    def text_of(self, name: str) -> str:
        """The content of a config's file; empty if there is none."""
        return next((read_text(path) or "" for _, path in self._find(name)), "")

    def read(self, name: str) -> ConfigFile:
        """A config that exists, to be changed as the caller likes."""
        if name in (SCHEMA, _SETTINGS):
            return ConfigFile(
                None,
                False,
                "_global_",
                [],
                pickle.loads(_schema()) if name == SCHEMA else OmegaConf.create(),
            )
        folder, path = next(self._find(name))
        text, is_project = read_text(path) or "", folder in self._project.configs
        if is_project:
            require_modest(
                text,
                str(path),
                interpolations="own" if folder in self._project.outside_configs else "all",
            )
        if not is_project or self._faults is None:
            package, defaults, config = pickle.loads(_parsed(str(path), text))
            return ConfigFile(path, is_project, package, defaults, config)
        package = _package(text)
        try:
            config = OmegaConf.load(path)
        except yaml.YAMLError as error:
            self._faults.unreadable(error)
            return ConfigFile(path, is_project, "_global_", [], OmegaConf.create())
        package, values = self._faults.remove_faults(
            package, OmegaConf.to_container(config, resolve=False), path, name, text
        )
        return ConfigFile(
            path, is_project, package, values.pop("defaults", []), OmegaConf.create(values)
        )

    def select(self, overrides: Sequence[str]) -> Any:
        """Select configs for overrides, as Hydra does.

        Returns:
            The configs in their order of merging (`defaults`) and the overrides of values
            (`config_overrides`).
        """
        key = tuple(overrides)
        if key not in self._selected:
            # Hydra makes its sources once in a process, for all loaders
            asking = _asking.set(self)
            try:
                with _current_rules():
                    self._selected[key] = _hydra().compute_defaults_list(
                        ROOT, list(overrides), RunMode.RUN
                    )
            finally:
                _asking.reset(asking)
        return self._selected[key]

    def choices(self, overrides: Sequence[str]) -> dict[str, str]:
        """The choice of each group; groups with none are left out."""
        return {
            group: str(choice)
            for group, choice in self.select(overrides).overrides.known_choices.items()
            if choice is not None
        }

    def chooses_several(self, overrides: Sequence[str]) -> bool:
        """Return whether a list may have chosen several of a group that takes one choice.

        Hydra then lists no choice for it.
        """
        return any(
            group not in self.select(overrides).overrides.known_choices for group in ONE_CHOICE
        )

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The root config with overrides, closed to new keys."""
        selected, cfg = self.select(overrides), OmegaConf.create()
        # `read` returns a new config each time, so no copy is needed to merge it
        with flag_override(cfg, "no_deepcopy_set_nodes", True):
            for default in selected.defaults:
                config = self.read(default.config_path).config
                if default.config_path.startswith("debug/sizes/"):
                    self._remove_unfit(config, selected)
                if default.package:
                    inner, config = config, OmegaConf.create()
                    OmegaConf.update(config, default.package, inner, merge=False)
                try:
                    cfg.merge_with(config)
                except OmegaConfBaseException as error:
                    raise ConfigCompositionException(
                        f"In '{default.config_path}': {type(error).__name__} raised while "
                        f"composing config:\n{error}"
                    ) from None
        # Files may add keys to open groups; overrides need a + for that
        OmegaConf.set_struct(cfg, True)
        apply(selected.config_overrides, cfg)
        return cfg

    def _remove_unfit(self, sizes: DictConfig, selected: Any) -> None:
        """Remove the sizes that the model's files lack, or that a data set of its own decides."""
        files = [x.config_path for x in selected.defaults if x.config_path.startswith("model/")]
        arguments = {key for file in files for key in self.read(file).config}
        dataset = str(selected.overrides.known_choices.get("dataset"))
        misfits = {
            "model": set(sizes.get("model") or ()) - arguments if files else set[Any](),
            "dataset": set[Any]()
            if dataset.startswith("generated_")
            else {"num_classes", "image_size"},
        }
        for group, names in misfits.items():
            for name in names.intersection(sizes.get(group) or ()):
                del sizes[group][name]

    def _find(self, name: str) -> Iterator[tuple[Path, Path]]:
        """The folders that have a file of this name, and the files.

        The first is the one that is read.
        """
        files = (
            # Hydra takes a choice's name with its extension too
            (folder, folder / (name if name.endswith(".yaml") else f"{name}.yaml"))
            for folder in self._folders
            if _is_inside(name)
        )
        return ((folder, file) for folder, file in files if file.is_file())

    def _places(self, group: str) -> Iterator[Path]:
        return (
            folder / group
            for folder in self._folders
            if _is_inside(group) and (folder / group).is_dir()
        )


def faults_in_files(loader: Loader) -> FileFaults:
    """Return a collector of faults in config files, for the loader's groups and root defaults."""
    chosen = read_yaml(loader.text_of(ROOT))["defaults"]
    return FileFaults(
        loader.groups(),
        {key for entry in chosen if isinstance(entry, dict) for key in cast(dict[str, Any], entry)},
    )


def apply(overrides: Iterable[Override], cfg: DictConfig) -> None:
    """Change values of a config in place, as Hydra does.

    What it refuses raises one of `overrides.FAILURES`.
    """
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if override.package is not None:
            raise ConfigCompositionException(f"there is no group {key}")
        if str(override.type).endswith("EXTEND_LIST"):  # which only Hydra 1.4 has
            raise ConfigCompositionException(
                "extend_list(...) is not supported: write the whole list"
            )
        before: Any = (
            OmegaConf.select(cfg, key, throw_on_missing=False)
            if override.is_delete() or override.is_add()
            else None
        )
        if override.is_delete():
            if before is None or value not in (None, before):
                raise ConfigCompositionException(
                    f"{key} is null, has another value or does not exist"
                )
            above, _, last = key.rpartition(".")
            with open_dict(cfg):
                del (OmegaConf.select(cfg, above) if above else cfg)[last]
        elif override.is_add() and before is not None and not isinstance(value, dict | list):
            raise ConfigCompositionException(f"{key} exists")
        else:
            OmegaConf.update(
                cfg, key, value, force_add=override.is_add() or override.is_force_add()
            )


_asking = ContextVar[Loader]("asking")
"""The loader for which Hydra is at work."""


class _Source(ConfigSource):
    """Shows Hydra the configs of the loader that asks it: their defaults lists and packages."""

    @staticmethod
    def scheme() -> str:
        return "samewise"

    def load_config(self, config_path: str) -> ConfigResult:
        file = _asking.get().read(config_path)
        return ConfigResult(
            self.provider,
            self.full_path(),
            # Hydra sees nothing else of the file, which is merged in `compose`
            OmegaConf.create({"defaults": file.defaults}),
            {"package": file.package},
        )

    def is_group(self, config_path: str) -> bool:
        return _asking.get().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        return _asking.get().is_config(config_path)

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> Any:
        loader = _asking.get()
        return (
            loader.choices_of(config_path)
            if results_filter is ObjectType.CONFIG
            else loader.groups_in(config_path)
        )


class _SearchPath(SearchPathPlugin):
    """Lets Hydra look for configs nowhere but in samewise's source, as long as samewise asks."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if _asking.get(None) is not None:
            search_path.get_path()[:] = [SearchPathElement("main", f"{_Source.scheme()}://")]


_BASE: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""Later versions have one set of rules, and warn if one is chosen."""


@contextlib.contextmanager
def _current_rules() -> Generator[None]:
    """Let Hydra's newest rules apply, and then those of the program again."""
    base = VersionBase.instance()
    before = base.version_base
    if _BASE:
        setbase(_BASE["version_base"])
    try:
        yield
    finally:
        base.version_base = before


@cache
def _hydra() -> ConfigLoader:
    """Hydra's loader. The program's own use of Hydra stays as it is."""
    for plugin in (_Source, _SearchPath):
        Plugins.instance().register(plugin)
    used = GlobalHydra.instance()
    hydra_settings, resolvers = used.hydra, set(filter(OmegaConf.has_resolver, _RESOLVERS))
    # Hydra refuses to be initialised twice, and the program may use it itself
    used.clear()
    try:
        with (
            # Hydra's set-up and its plugins warn of what the user cannot change
            warnings.catch_warnings(action="ignore"),
            hydra.initialize_config_module(
                "samewise.configs", job_name=JobRuntime.instance().get("name"), **_BASE
            ),
        ):
            return GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.set_instance(used)
        used.hydra = hydra_settings
        for name in filter(OmegaConf.has_resolver, {*_RESOLVERS} - resolvers):
            OmegaConf.clear_resolver(name)


@cache
def _library() -> Path:
    return Path(str(resources.files("samewise.configs")))


@cache
def _schema() -> bytes:
    """Return the schema, pickled in this process and for it.

    copy.deepcopy takes three times as long as unpickling.
    """
    return pickle.dumps(OmegaConf.structured(Experiment), pickle.HIGHEST_PROTOCOL)


@lru_cache(maxsize=1000)
def _parsed(file: str, text: str) -> bytes:
    """Return the package, defaults list and values of a file's text, pickled as in `_schema`."""
    values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    defaults = values.pop("defaults", []) if isinstance(values, dict) else []
    return pickle.dumps(
        (_package(text), defaults, OmegaConf.create(values)), pickle.HIGHEST_PROTOCOL
    )


def _package(text: str) -> str | None:
    """The package that the head of a config file names."""
    for line in filter(None, map(str.strip, text.splitlines())):
        if not re.match(r"#\s*@", line):
            break
        key, *values = line.lstrip("#").split()
        if key == "@package" and values:
            return values[0]
    return None


def _require_no_root(file: Path) -> None:
    """Raise a ConfigError for a file that would replace samewise's root config.

    An identical copy is allowed.
    """
    ConfigError.raise_if(
        file.is_file()
        and read_text(file) != (_library() / f"{ROOT}.yaml").read_text(encoding="utf-8"),
        str(file),
        "would take the place of samewise's own config.yaml, which every experiment starts from",
        hint="give it another name; an experiment's file belongs in the folder `experiment`",
    )


def _is_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/")
