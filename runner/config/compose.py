"""Composes overrides to a config.

Hydra's part: the search path, the defaults list, the merge, the override grammar
(docs/decisions/compose.md).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samewise.runner.config import monitors, other_choice
from samewise.runner.config import overrides as faults
from samewise.runner.config.file_faults import NO_FOLDER, is_choice, problem_in_file
from samewise.runner.config.fingerprint import (
    combine,
    fingerprint_of,
    is_outside,
    reached_code,
)
from samewise.runner.config.loader import Loader, faults_in_files
from samewise.runner.config.origins import locate_problems, origins, replaced_value
from samewise.runner.config.override_text import read_overrides, repeated
from samewise.runner.config.project import Project
from samewise.runner.config.references import (
    find_references,
    require_modest_references,
    restore_references,
)
from samewise.runner.config.schema import SOURCES, Experiment
from samewise.runner.config.tree import plain
from samewise.runner.config.yaml_files import require_modest, write_yaml
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records import header, hugging_face
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
        cfg: The config, typed by `schema.Experiment`, closed to new keys; interpolations are
            resolved as they are read.
        choices: The chosen file of each group (`{"optimizer": "sgd"}`); groups with none chosen are
            left out.
        overrides: Those of the command line, preceded by the project's own experiment if they
            choose none.
        project: The user's own packages and config folders, as they were when it was composed.
        problems: What was wrong, when asked for instead of an exception; `cfg` then lacks the
            overrides at fault.
        label: The overrides that affect the result: `lr=0.03 seed=1`; empty if there are none.
        place: The run's folder, if it is fixed already.
        cautions: Values left out, and values kept, if the command line chooses other options than
            its experiment; keys that it sets twice.
        sources: How the user named files that the config has by path, by setting: `run:first`.
        is_saved: Whether it was read from a run's config.yaml, which does not record the origin of
            values.
    """

    cfg: DictConfig
    choices: dict[str, str] = field(default_factory=dict[str, str])
    overrides: tuple[str, ...] = ()
    project: Project = field(default_factory=lambda: Project(Path.cwd()))
    problems: tuple[Problem, ...] = ()
    label: str = ""
    place: Path | None = None
    cautions: tuple[Problem, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    is_saved: bool = False

    def __repr__(self) -> str:
        """One line, for notebooks; `samewise show` prints the whole config."""
        return f"Composed(name={self.name!r}, label={self.label!r})"

    @property
    def name(self) -> str:
        """The experiment's name.

        `name`, else the choice of `experiment=`, else the recipe's, the model's and the data set's.
        """
        chosen = self.cfg.get("name") or self.choices.get("experiment")
        parts = [
            self.choices[group] for group in ("recipe", "model", "dataset") if group in self.choices
        ]
        # `experiment=audio/first` has one folder of runs, `audio-first`
        return str(chosen or "-".join(parts) or "experiment").replace("/", "-")

    @cached_property
    def whole(self) -> dict[str, Any]:
        """The plain config, read-only; cached, since resolving takes much of the time."""
        return cast(dict[str, Any], plain(self.cfg))

    @cached_property
    def set_by(self) -> Mapping[str, str]:
        """The file or override that sets each value (`origins.origins`), as the files were read."""
        return origins(self.overrides, project=self.project)

    @cached_property
    def code(self) -> Code:
        """The user's code that the config reaches, as it was when first read."""
        return reached_code(self.whole, self.project.packages)

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of the identity, in hexadecimal."""
        return combine(fingerprint_of(self.whole), self.code.files)

    @cached_property
    def folder(self) -> RunFolder:
        """The run's folder: `RUN_ROOT/NAME/FINGERPRINT[:12]`, or the latest of those beside it."""
        return RunFolder(self.place or latest(self._first))

    def with_new_folder(self) -> Composed:
        """The same, with a new folder beside those of its existing runs."""
        return replace(self, place=beside(self._first))

    @property
    def _first(self) -> Path:
        return Path(self.cfg.run_root) / self.name / self.fingerprint[:12]

    @property
    def tracking_uri(self) -> str | None:
        """The URI of the MLflow store; None if nothing is sent there."""
        return (
            self.cfg.tracking.uri
            if self.cfg.tracking.enabled and "mlflow" in self.cfg.tracking.report_to
            else None
        )


def compose(overrides: Sequence[str], *, project: Project, strict: bool = True) -> Composed:
    """Compose one experiment.

    ConfigError with a problem for every override that is wrong, and for what is wrong in a file.

    Args:
        overrides: Overrides as Hydra writes them: `experiment=resnet18_digits`, `optimizer.lr=0.05`,
            `+optimizer.nesterov=true`.
        project: Where the user's own config folders lie.
        strict: Raise what is wrong; else return it as `problems`, with the config that the
            faultless overrides give.
    """
    overrides = project.with_experiment(overrides)
    loader = reader = Loader(project)
    well, problems = read_overrides(overrides)
    good = [str(override.input_line) for override in well]
    try:
        # Most overrides are right: only if composing fails is each tried by itself
        cfg = None if problems else loader.compose(good)
        # Hydra accepts both: the faults are then found one by one
        if cfg is not None and (loader.chooses_several(good) or _has_choice_among_values(cfg)):
            cfg = None
    except faults.FAILURES:
        cfg = None
    if cfg is None:
        in_files = faults_in_files(loader)
        reader = Loader(project, in_files)
        cfg, good, problems = faults.diagnose(
            overrides, load=reader.compose, groups=loader.groups()
        )
        # The choice may be in a config folder that is not searched from here
        if not project.configs:
            problems = [
                replace(problem, hint=problem.hint or NO_FOLDER)
                if "`samewise list" in problem.expected and problem.value
                else problem
                for problem in problems
            ]
        problems = [*in_files.problems, *problems]
        # Keys that seem to be missing may be in the file that is not YAML
        if cfg is None or in_files.is_unreadable:
            raise ConfigError(*problems)
    chosen = reader.choices(good)
    # Before anything resolves them: a few lines can exceed any memory
    require_modest_references(cfg)
    changes = other_choice.changes(reader, good, chosen.get("experiment"))
    cautions = (*other_choice.settle(cfg, changes, good), *repeated(well))
    sources = named_sources(cfg)
    monitored, taken = settle(cfg, good, replaced_value("evaluate.monitor", reader, good))
    problems += [
        *monitored,
        *locate_problems([*faults.unresolvable(cfg), *taken], good, project),
    ]
    if problems and strict:
        raise ConfigError(*problems)
    return Composed(
        cfg,
        chosen,
        tuple(good),
        project,
        tuple(problems),
        label_of(good),
        cautions=cautions,
        sources=sources,
    )


def named_sources(cfg: DictConfig) -> dict[str, str]:
    """Return the files of a config that are named `run:RUN` or `hf:NAME`, by setting."""
    return {
        # A run as a teacher gives the weights
        key.replace("teacher", "weights"): source
        for key in (*SOURCES, "distil.teacher")
        if (
            source := str(OmegaConf.select(cfg, key, throw_on_resolution_failure=False))
        ).startswith(("run:", hugging_face.PREFIX))
    }


def settle(
    cfg: DictConfig, overrides: Sequence[str], before: Any = None
) -> tuple[list[Problem], list[Problem]]:
    """Replace shorthands by their present meaning: monitors, their modes, and sources of weights.

    Args:
        cfg: Changed in place.
        overrides: The overrides of the command line.
        before: The `evaluate.monitor` that the overrides replaced.

    Returns:
        Problems of the metrics and of the sources.
    """
    teacher: Any = OmegaConf.select(cfg, "distil.teacher", throw_on_resolution_failure=False)
    if is_run := isinstance(teacher, str) and teacher.startswith("run:"):
        cfg.distil.weights = teacher
    problems = [problem for key in SOURCES for problem in _settle_sources(cfg, key)]
    if is_run:
        problems = [
            replace(x, path="distil.teacher") if x.path == "distil.weights" else x for x in problems
        ]
    if is_run and cfg.distil.weights != teacher:
        config = RunFolder(Path(cfg.distil.weights).parents[1]).config
        cfg.distil.teacher = load(config).whole["model"]
    return monitors.settle(cfg, overrides, before), problems


def _has_choice_among_values(cfg: DictConfig) -> bool:
    """Return whether a file sets `dataset: digits` as a value.

    A choice belongs into the defaults list.
    """
    whole: Any = OmegaConf.to_container(cfg, resolve=False)
    return any(
        isinstance(whole[setting.name], str) and is_choice(whole[setting.name])
        for setting in fields(Experiment)
        if setting.type == "Any"
    )


def _settle_sources(cfg: DictConfig, key: str) -> list[Problem]:
    """Pin `run:RUN` and `hf:NAME` to their present meaning, which a resumed run reads again."""
    source: Any = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
    try:
        if isinstance(source, str) and source.startswith("run:"):
            OmegaConf.update(
                cfg,
                key,
                str(
                    checkpoint_of(
                        source.removeprefix("run:"), run_root=Path(cfg.run_root).expanduser()
                    )
                ),
            )
        elif (
            isinstance(source, str)
            and source.startswith(hugging_face.PREFIX)
            and key != "resume_from"
        ):
            OmegaConf.update(cfg, key, hugging_face.settle_commit(source))
    except ConfigError as error:
        return [
            replace(problem, path=key if problem.path == "RUN" else problem.path)
            for problem in error.problems
        ]
    return []


def load(path: Path) -> Composed:
    """Load a run's saved config, with its types.

    ConfigError if the file does not exist or is not a config.
    """
    text = read_text(path)
    if text is None:
        raise ConfigError(Problem(str(path), "does not exist", expected="a run's config.yaml"))
    return parse(text, str(path))


def parse(text: str, name: str = "config") -> Composed:
    """Parse what `dump` wrote; a ConfigError if it is not a config."""
    cfg, choices, label, sources = pickle.loads(_parsed(text, name))
    return Composed(cfg, choices, label=label, sources=sources, is_saved=True)


@lru_cache(maxsize=16)
def _parsed(text: str, name: str) -> bytes:
    """Return the config, choices, label and sources, pickled in this process and for it.

    Commands read a config several times, and unpickling takes a sixtieth of the time to parse.
    """
    # Before OmegaConf reads the text, which takes it 1 ms for each value
    require_modest(text, name, interpolations="none")
    try:
        parsed: Any = OmegaConf.create(text)
        ConfigError.raise_if(
            not isinstance(parsed, DictConfig) or not parsed,
            name,
            "is not a config: no mapping in it",
        )
        cfg = OmegaConf.merge(OmegaConf.structured(Experiment), parsed)
        choices, label = header.read(text)
        assert isinstance(cfg, DictConfig)
        restore_references(cfg, header.read_references(text) or {})
        OmegaConf.set_struct(cfg, True)
        return pickle.dumps(
            (cfg, choices, label, header.read_sources(text)), pickle.HIGHEST_PROTOCOL
        )
    except RecursionError:
        raise ConfigError(Problem(name, "is not a run's config: it is nested too deeply")) from None
    except (
        yaml.YAMLError,
        OmegaConfBaseException,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
    ) as error:  # PyYAML's constructors raise any exception
        raise ConfigError(
            Problem(name, f"is not a run's config: {problem_in_file(error)}")
        ) from None


def dump(composed: Composed) -> str:
    """Format the resolved config as YAML for `load`; its head has choices, label and references."""
    return dump_plain(
        OmegaConf.to_container(composed.cfg, resolve=True, enum_to_str=True), composed
    )


def dump_plain(whole: Any, composed: Composed) -> str:
    """The same for one that is already plain."""
    return header.write(
        composed.choices, composed.label, find_references(composed.cfg), composed.sources
    ) + write_yaml(whole, default_flow_style=False)


def label_of(overrides: Sequence[str]) -> str:
    """A short text of the overrides that change the result.

    Those that only say where and how to run are left out.
    """
    values = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    seed = values.pop("seed", None)
    settings = {
        key: value
        for key, value in values.items()
        if key == "debug" or (key != "experiment" and not is_outside(key.lstrip("+~")))
    }
    return redact(in_words(settings, seed)) if settings or seed is not None else ""
