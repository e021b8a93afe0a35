"""Finds the line of a file, or the override, that sets a value."""

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hydra.core.default_element import ResultDefault
from omegaconf import OmegaConf

from samewise.runner.config import schema
from samewise.runner.config.loader import Loader, faults_in_files
from samewise.runner.config.project import Project
from samewise.runner.config.tree import flat
from samewise.runner.config.yaml_files import lines_of
from samewise.runner.errors import Problem

OURS = "samewise's configs/"
"""What the files begin with that are not the project's own."""
_SCHEMA, _OVERRIDE = "samewise's runner/config/schema.py", "override "


@dataclass(frozen=True)
class FileValue:
    """A value that a config file (`optimizer/sgd`, as Hydra writes it) sets, and its place."""

    config: str
    path: str
    value: Any
    where: str


def origins(overrides: Sequence[str], *, project: Project) -> dict[str, str]:
    """The file or override that sets each value: the last one, in Hydra's order of merging.

    By config path: `samewise's configs/optimizer/sgd.yaml:3`, a project's own file with its whole
    path, `samewise's runner/config/schema.py:157`, or `override seed=1`.
    """
    # Faulty parts of files are left out, so that the rest can be located
    loader = Loader(project, faults_in_files(Loader(project)))
    selected, labels = loader.select(overrides), dict[str, str]()
    for file_value in values_of(loader, selected.defaults):
        _mark(labels, file_value.path, file_value.value, file_value.where)
    for override in selected.config_overrides:
        if not override.is_delete():
            for path, value in values_in(override.value(), override.key_or_group):
                _mark(labels, path, value, f"{_OVERRIDE}{override.input_line}")
    return labels


def own_defaults(overrides: Sequence[str], *, project: Project) -> set[str]:
    """The paths of the values that samewise's own files, as they are chosen, set."""
    loader = Loader(project, faults_in_files(Loader(project)))
    return {
        value.path
        for value in values_of(loader, loader.select(overrides).defaults)
        if value.where.startswith(OURS)
    }


def replaced_value(path: str, loader: Loader, overrides: Sequence[str]) -> Any:
    """The value that the chosen files set, if an override replaces it; else None."""
    if not any(text.lstrip("+").startswith(f"{path}=") for text in overrides):
        return None
    return next(
        (
            value.value
            for value in reversed(list(values_of(loader, loader.select(overrides).defaults)))
            if value.path == path
        ),
        None,
    )


def values_of(loader: Loader, chosen: Sequence[ResultDefault]) -> Iterator[FileValue]:
    """Each value set by the files of a defaults list, in Hydra's order of merging.

    A list is one value, since it replaces another list.
    """
    for default in chosen:
        name = str(default.config_path)
        file, package = loader.read(name), default.package
        lines = _lines_of_schema() if file.path is None else lines_of(loader.text_of(name))
        where = (
            _SCHEMA
            if file.path is None
            else str(file.path)
            if file.is_project
            else f"{OURS}{name}.yaml"
        )
        for path, value in values_in(OmegaConf.to_container(file.config)):
            yield FileValue(
                name,
                f"{package}.{path}" if package else path,
                value,
                f"{where}:{lines[path]}" if path in lines else where,
            )


def origin_of(path: str, set_by: Mapping[str, str]) -> str:
    """Return the origin of a value, or of the reference that leads to it.

    `mean: ${dataset.mean}` stands for all numbers of the mean.
    """
    while path and path not in set_by:
        path = path.rpartition(".")[0]
    return set_by.get(path, "")


def locate_problems(
    problems: Sequence[Problem], overrides: Sequence[str], project: Project
) -> list[Problem]:
    """The problems, each with the line of the file that sets its value, if a file does."""
    overridden = {override.lstrip("+").partition("=")[0] for override in overrides}
    # Only if needed, since `origins` goes through all files again
    if all(problem.where or problem.path in (*overridden, "") for problem in problems):
        return list(problems)
    set_by, located = origins(overrides, project=project), list[Problem]()
    for problem in problems:
        where = "" if problem.where else set_at(problem.path, set_by)
        located.append(
            problem
            if not where or where.startswith((_SCHEMA, _OVERRIDE))
            else replace(problem, where=where)
        )
    return located


def set_at(path: str, set_by: Mapping[str, str]) -> str:
    """Return where a value is set; for a missing value or a part, where its container is set."""
    while path:
        inner = [key for key in set_by if key.startswith(f"{path}.")]
        for key in (path, f"{path}._target_", *inner[:1]):
            if key in set_by:
                return set_by[key]
        path = path.rpartition(".")[0]
    return ""


def values_in(value: Any, under: str = "") -> Iterator[tuple[str, Any]]:
    """The paths and values that a file or override sets."""
    if isinstance(value, dict) and value:
        for key, part in cast(dict[Any, Any], value).items():
            yield from values_in(part, f"{under}.{key}" if under else str(key))
    elif under:
        yield under, value


def _mark(labels: dict[str, str], under: str, value: Any, label: str) -> None:
    """Record `label` for every value in `value`.

    A list or scalar replaces everything at its path and below.
    """
    for path in [path for path in labels if path.startswith(f"{under}.")] if value != {} else []:
        del labels[path]
    for path, _ in flat(value, under) if isinstance(value, list) else [(under, value)]:
        labels[path] = label


def _lines_of_schema() -> dict[str, int]:
    """The line of each setting's default in schema.py, by its path."""
    classes = {
        statement.name: statement
        for statement in ast.parse(inspect.getsource(schema)).body
        if isinstance(statement, ast.ClassDef)
    }

    def lines(name: str, under: str = "") -> Iterator[tuple[str, int]]:
        for field in classes[name].body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield f"{under}{field.target.id}", field.lineno
                if isinstance(field.annotation, ast.Name) and field.annotation.id in classes:
                    yield from lines(field.annotation.id, f"{under}{field.target.id}.")

    return dict(lines("Experiment"))
