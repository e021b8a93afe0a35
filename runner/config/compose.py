"""Overrides to a config.

Hydra's part: the search path, the defaults list, the merge, the override grammar. docs/design.md lists the
few other places that import Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from samewise.runner.config import header, monitors, other_choice
from samewise.runner.config import overrides as faults
from samewise.runner.config.file_faults import is_choice, problem_in_file
from samewise.runner.config.fingerprint import combine, fingerprint_of, is_outside, reached_code
from samewise.runner.config.loader import choices_in, chooses_several, config_loader, faults_in_files, groups, root_config, set_for_hydra, without_hydra
from samewise.runner.config.origins import located
from samewise.runner.config.override_text import read_overrides
from samewise.runner.config.project import Project
from samewise.runner.config.references import require_modest_references
from samewise.runner.config.schema import Experiment
from samewise.runner.config.tree import plain
from samewise.runner.config.yaml_files import require_modest
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import hugging_face
from samewise.runner.records.files import read_text
from samewise.runner.records.folder import RunFolder, beside, latest
from samewise.runner.records.found import checkpoint_of
from samewise.runner.records.sources import Code
from samewise.runner.records.sweep_folder import label as in_words
from samewise.runner.secrets import redact


@dataclass(frozen=True)
class Composed:
    """A config and where it came from.

    Args:
        cfg: The config, typed by `schema.Experiment`, closed to new keys; interpolations are resolved as they are read.
        choices: The chosen file of each group (`{"optimizer": "sgd"}`); groups with none chosen are left out.
        overrides: The command line's, as given, headed by the project's own experiment where they choose none.
        project: The user's own packages and config folders, as they were when it was composed.
        problems: What was wrong, when asked for instead of an exception; `cfg` then lacks the overrides at fault.
        label: What was overridden of what decides the result: `lr=0.03 seed=1`; empty where nothing was.
        place: The run's folder, where that is settled already.
        cautions: What was left out of it and what stays, where the command line makes another choice than its experiment.
        is_saved: Whether it was read from a run's config.yaml, which does not say what set a value.
    """

    cfg: DictConfig
    choices: dict[str, str] = field(default_factory=dict[str, str])
    overrides: tuple[str, ...] = ()
    project: Project = field(default_factory=lambda: Project(Path.cwd()))
    problems: tuple[Problem, ...] = ()
    label: str = ""
    place: Path | None = None
    cautions: tuple[Problem, ...] = ()
    is_saved: bool = False

    def __repr__(self) -> str:
        """In one line, for a notebook: the whole config is `samewise show`'s."""
        return f"Composed(name={self.name!r}, label={self.label!r})"

    @property
    def name(self) -> str:
        """The experiment's name: `name`, else the choice of `experiment=`, else the recipe's, the model's and the data set's."""
        given = self.cfg.get("name") or self.choices.get("experiment")
        parts = [self.choices[group] for group in ("recipe", "model", "dataset") if group in self.choices]
        return str(given or "-".join(parts) or "experiment").replace("/", "-")

    @cached_property
    def whole(self) -> dict[str, Any]:
        """The config as `plain` gives it, to be read only: resolving each interpolation takes a good part of the time to compose."""
        return cast(dict[str, Any], plain(self.cfg))

    @cached_property
    def code(self) -> Code:
        """The user's own code that the config reaches, as it was when first asked for."""
        return reached_code(self.whole, self.project.packages)

    @cached_property
    def fingerprint(self) -> str:
        """The identity's sha256, in hexadecimal."""
        return combine(fingerprint_of(self.whole), self.code.files)

    @cached_property
    def folder(self) -> RunFolder:
        """Where the run is kept: `RUN_ROOT/NAME/FINGERPRINT[:12]`; the latest, where it was trained again beside others."""
        return RunFolder(self.place or latest(self._first))

    def anew(self) -> Composed:
        """The same, to be trained again beside all runs of it that are there."""
        return replace(self, place=beside(self._first))

    @property
    def _first(self) -> Path:
        return Path(self.cfg.run_root) / self.name / self.fingerprint[:12]

    @property
    def tracking_uri(self) -> str | None:
        """Of the MLflow store; None where nothing is sent there."""
        return self.cfg.tracking.uri if self.cfg.tracking.enabled and "mlflow" in self.cfg.tracking.report_to else None


def compose(given: Sequence[str], *, project: Project, strict: bool = True) -> Composed:
    """Compose one experiment.

    Args:
        given: Overrides as Hydra writes them: `experiment=resnet18_digits`, `optimizer.lr=0.05`, `+optimizer.nesterov=true`.
        project: Where the user's own config folders lie.
        strict: Raise what is wrong; else return it as `problems`, with the config that the faultless overrides give.

    Raises:
        ConfigError: with a problem for every override that is wrong, and for what is wrong in a file.
    """
    given = project.with_experiment(given)
    loader = reader = config_loader(project)
    well, problems = read_overrides(given)
    good = [str(override.input_line) for override in well]
    try:
        cfg = None if problems else root_config(loader, good)
        if cfg is not None and (chooses_several(cfg) or _has_choice_among_values(cfg)):
            cfg = None
    except faults.FAILURES:
        cfg = None
    if cfg is None:
        in_files = faults_in_files(loader)
        reader = config_loader(project, in_files)
        cfg, good, problems = faults.diagnose(given, load=lambda some: root_config(reader, some), groups=groups(loader))
        problems = [*in_files.problems, *problems]
        if cfg is None or in_files.is_unreadable:
            raise ConfigError(*problems)
    chosen = choices_in(cfg)
    found = set_for_hydra(cfg.hydra)
    cfg = without_hydra(cfg)
    require_modest_references(cfg)
    cautions = other_choice.settle(cfg, other_choice.changes(reader, good, chosen.get("experiment")), good, project)
    cautions += other_choice.without_weights(reader, good, chosen, cfg)
    monitored, taken = settle(cfg, good)
    problems += monitored
    problems += located([*found, *faults.unresolvable(cfg), *taken], good, project)
    if problems and strict:
        raise ConfigError(*problems)
    return Composed(cfg, chosen, tuple(good), project, tuple(problems), label_of(good), cautions=tuple(cautions))


def settle(cfg: DictConfig, given: Sequence[str]) -> tuple[list[Problem], list[Problem]]:
    """Have what stands for something else say what it means now: a list of monitored metrics, their modes, a run or a name that weights are of.

    Returns:
        What is wrong with the metrics, and with what is taken.
    """
    return monitors.settle(cfg, given), [*_settle_taken(cfg, "initialise.weights"), *_settle_taken(cfg, "resume_from")]


def _has_choice_among_values(cfg: DictConfig) -> bool:
    """Whether a file sets `dataset: digits`, where only the defaults list chooses: OmegaConf takes it for a value."""
    nodes: Any = (cfg._get_node(one.name) for one in fields(Experiment) if one.type == "Any")  # pyright: ignore[reportPrivateUsage]
    return any(node is not None and isinstance(node._value(), str) and is_choice(node._value()) for node in nodes)


def _settle_taken(cfg: DictConfig, key: str) -> list[Problem]:
    """Have what is given as `run:RUN`, or weights as `hf:NAME`, mean what it does now: the run may go on, or another begin like it."""
    given: Any = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
    try:
        if isinstance(given, str) and given.startswith("run:"):
            OmegaConf.update(cfg, key, str(checkpoint_of(given.removeprefix("run:"), run_root=Path(cfg.run_root).expanduser())))
        elif isinstance(given, str) and given.startswith(hugging_face.PREFIX) and key == "initialise.weights":
            OmegaConf.update(cfg, key, hugging_face.settle_commit(given))
    except ConfigError as error:
        return [replace(one, path=key if one.path == "RUN" else one.path) for one in error.problems]
    return []


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
    """What `dump` wrote; a ConfigError where it is not a config."""
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
        raise ConfigError(Problem(name, f"is not a run's config: {problem_in_file(error)}")) from None
    assert isinstance(cfg, DictConfig)
    OmegaConf.set_struct(cfg, True)
    return Composed(cfg, choices, label=label, is_saved=True)


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
    return redact(in_words(kept, seed)) if kept or seed is not None else ""
