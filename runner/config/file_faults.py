"""Finds what is wrong in config files, each fault with its line.

It is left out as the file is read, so that the rest can be composed and all faults of all files are
told at once.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from samewise.runner.config import schema
from samewise.runner.config.annotations import expected_type, is_typed
from samewise.runner.config.override_text import several_choices
from samewise.runner.config.yaml_files import lines_of
from samewise.runner.errors import Problem, did_you_mean, first_line, nearest

NO_SUCH_CHOICE = "no such choice"
FORM = "begin each entry with a dash: `- override /GROUP: CHOICE`"
NO_FOLDER = (
    "no config folder of yours is searched here: run the command in your project's folder, or "
    "add --config-dir FOLDER"
)


class FileFaults:
    """Collects faults while Hydra reads files; a file that is read twice is reported once.

    `groups` has the choices of each, `chosen` the groups that the root's defaults list has, so that
    another file has to override its choice.
    """

    def __init__(self, groups: Mapping[str, Sequence[str]], chosen: Collection[str]) -> None:
        self._groups, self._chosen = groups, chosen
        self._found = dict[tuple[str, str, str], Problem]()
        self.is_unreadable = False
        """Whether a file is not YAML: its values are unknown, so keys that seem to be missing may
        not be."""

    @property
    def problems(self) -> list[Problem]:
        return list(self._found.values())

    def remove_faults(
        self, package: str | None, whole: Any, file: Path, name: str, text: str
    ) -> tuple[str | None, dict[Any, Any]]:
        """The package and the content of a file, without its faulty parts."""
        lines, group = lines_of(text), name.rpartition("/")[0]
        under = place_in_config(package, name)
        if under.partition(".")[0] not in ("", *schema.Experiment.__dataclass_fields__):
            self._add(
                Problem(
                    "",
                    "sets nothing in the experiment: its values go under the name of its folder",
                    hint="begin it with `# @package _global_`, and set values below",
                    where=str(file),
                )
            )
            package, whole = "_global_", {}
        elif not isinstance(whole, dict):
            self._add(Problem("", "is not a mapping of keys to values", where=str(file)))
            whole = {}
        else:
            self._leave_out_choices(cast(dict[str, Any], whole), group, file, lines)
            self._leave_out_misplaced(cast(dict[str, Any], whole), under, file, lines)
            for path, problem in list(_wrong_values(cast(dict[str, Any], whole), under)):
                _remove(whole, path)
                self._add(
                    Problem(
                        problem.path,
                        problem.message,
                        problem.value,
                        problem.expected,
                        problem.hint,
                        f"{file}:{lines.get('.'.join(path), 1)}",
                    )
                )
        return package, whole

    def unreadable(self, error: yaml.YAMLError) -> None:
        self.is_unreadable = True
        self._add(problem_in_file(error))

    def _add(self, problem: Problem) -> None:
        # A file may be read more than once
        self._found[problem.where, problem.path, problem.message] = problem

    def _leave_out_choices(
        self, whole: dict[str, Any], group: str, file: Path, lines: Mapping[str, int]
    ) -> None:
        entries: Any = whole.get("defaults", [])
        if not isinstance(entries, list):
            self._add(
                Problem("defaults", "is not a list", hint=FORM, where=f"{file}:{lines['defaults']}")
            )
            entries = []
        remaining = list[Any]()
        for number, entry in enumerate(cast(list[Any], entries)):
            problem = self._wrong_choice(entry, group)
            if problem is None:
                remaining.append(entry)
            else:
                self._add(
                    Problem(
                        problem.path,
                        problem.message,
                        problem.value,
                        "",
                        problem.hint,
                        f"{file}:{lines.get(f'defaults.{number}', 1)}",
                    )
                )
        whole["defaults"] = remaining

    def _leave_out_misplaced(
        self, whole: dict[str, Any], under: str, file: Path, lines: Mapping[str, int]
    ) -> None:
        """Remove choices of a group that are written among the values (`dataset: digits`)."""
        for key, value in [] if under else list(whole.items()):
            if key in self._groups and is_choice(value):
                self._add(
                    Problem(
                        key,
                        "this names a choice of the group, and choices belong in the defaults list",
                        value,
                        hint=f"move it into the list under `defaults:`, as `- override /{key}: "
                        f"{_format_choice(value)}`",
                        where=f"{file}:{lines.get(key, 1)}",
                    )
                )
                del whole[key]

    def _wrong_choice(self, entry: Any, group: str) -> Problem | None:
        """Return the problem of an entry of the defaults list: its form, group or choice."""
        is_malformed = isinstance(entry, str) and " " in entry
        if is_malformed or (isinstance(entry, dict) and len(cast(dict[Any, Any], entry)) != 1):
            return Problem("defaults", "is not GROUP: CHOICE", entry, hint=FORM)
        if isinstance(entry, str) and entry not in ("_self_", "schema") and "${" not in entry:
            target, _, choice = (
                (entry[1:] if entry.startswith("/") else f"{group}/{entry}")
                .strip("/")
                .rpartition("/")
            )
            return self._wrong(target, choice.partition("@")[0]) if target else None
        if not isinstance(entry, dict):
            return None
        ((key, value),) = cast(dict[Any, Any], entry).items()
        *keywords, address = str(key).split() or [""]
        # An optional choice may be missing
        if "optional" in keywords or not address:
            return None
        name = address.partition("@")[0]
        target = name[1:] if name.startswith("/") else f"{group}/{name}".strip("/")
        is_overridden = "override" in keywords or "@" in address
        # A name without a slash is looked up in the folder of this file
        if target not in self._groups and name in self._chosen:
            target, is_overridden = name, False
        if group and target in self._chosen and not is_overridden:
            return Problem(
                target,
                "is already chosen in samewise's config.yaml, so this entry must override it",
                hint=f"write `- override /{target}: {_format_choice(value)}`, with the slash",
            )
        if problem := several_choices(target, value):
            return Problem(
                target,
                problem.message,
                value,
                hint=f"write `- override /{address.lstrip('/')}: {cast(list[Any], value)[0]}`, or "
                "another of them",
            )
        choices = cast(list[Any], value) if isinstance(value, list) else [value]
        return next(filter(None, (self._wrong(target, choice) for choice in choices)), None)

    def _wrong(self, group: str, choice: Any) -> Problem | None:
        if group not in self._groups:
            return Problem(group, "no such group", hint=nearest(group, self._groups))
        if (
            choice is None
            # The choice may depend on another
            or "${" in str(choice)
            or str(choice).removesuffix(".yaml") in self._groups[group]
            or choice == "???"
        ):
            return None
        choices = self._groups[group]
        # PyYAML follows YAML 1.1, where on and off are booleans
        if isinstance(choice, bool) and (word := "on" if choice else "off") in choices:
            return Problem(
                group,
                NO_SUCH_CHOICE,
                choice,
                hint=f'YAML reads {word} as {str(choice).lower()}: write "{word}", in quotes',
            )
        return Problem(
            group,
            NO_SUCH_CHOICE,
            choice,
            hint=did_you_mean(str(choice), choices) or f"`samewise list {group}` shows them",
        )


def place_in_config(package: str | None, name: str) -> str:
    """The path under which the values of a file are put."""
    return (
        name.rpartition("/")[0].replace("/", ".")
        if package in (None, "_group_")
        else ""
        if package == "_global_"
        else package
    )


def is_choice(value: Any) -> bool:
    """Return whether a value in a component's place is a choice's name, or a list of names."""
    names: Any = value if isinstance(value, list) and value else [value]
    return all(isinstance(name, str) and name != "???" and "${" not in name for name in names)


def _format_choice(value: Any) -> str:
    return (
        "null"
        if value is None
        else f"[{', '.join(map(str, cast(list[Any], value)))}]"
        if isinstance(value, list)
        else str(value)
    )


def problem_in_file(error: BaseException) -> Problem:
    """The problem that Hydra, OmegaConf or PyYAML found in a config file."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark
        # A text, whose file the caller names
        file = f"{mark.name}:" if mark and not str(mark.name).startswith("<") else "line "
        where = f"{file}{mark.line + 1}" if mark else "a config file"
        return Problem(
            where,
            f"is not valid YAML: {error.problem or error}",
            hint="check the indentation and the colon after each key, also in the line before; quote "
            "values that contain ': ' or '#'",
        )
    text = str(error)
    file = re.match(r"In '([^']+)'", text)
    where = f"{file[1]}.yaml" if file else ""
    unknown = re.search(r"Key '([^']+)' (?:not in|is not in struct|in not in struct)", text)
    key = re.search(r"full_key: (\S+)", text)
    if unknown:
        return Problem(
            where,
            f"no such key: {key[1] if key else unknown[1]}",
            hint=nearest(unknown[1], schema.Experiment.__dataclass_fields__),
        )
    message = first_line(error, after="raised while composing config:\n").rstrip(".")
    if key:
        message = f"{key[1]}: {message}"
    if missing := re.search(r"Could not (?:find|load) '([^']+)'", text):
        return Problem(where, f"names {missing[1]}, which does not exist")
    if several := re.search(r"Multiple values for (\w+)\. To override", text):
        return Problem(
            where,
            f"adds a second choice to the group {several[1]}",
            hint=f"without the +: {several[1]}=CHOICE, or [CHOICE,CHOICE]",
        )
    return Problem(where, message)


def _wrong_values(whole: dict[str, Any], under: str) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """Keys that the schema does not have and values of wrong types, by their path in the file."""
    pending: list[tuple[tuple[str, ...], Any]] = [
        ((key,), value) for key, value in whole.items() if key != "defaults"
    ]
    prefix, typed = under.split(".") if under else [], OmegaConf.structured(schema.Experiment)
    for path, value in pending:
        names = [*prefix, *map(str, path)]
        full, above = ".".join(names), ".".join(names[:-1])
        # Keys of components are checked later, by the signatures of their classes
        if above and not is_typed(typed, above):
            continue
        keys: Mapping[str, Any] = getattr(
            OmegaConf.get_type(typed, above or None), "__dataclass_fields__", {}
        )
        if names[-1] not in keys:
            yield path, Problem(full, "no such key", hint=nearest(names[-1], keys))
        elif isinstance(value, dict) and is_typed(typed, full):
            pending += [
                ((*path, str(key)), part) for key, part in cast(dict[Any, Any], value).items()
            ]
        else:
            try:
                # OmegaConf itself decides which values fit, as when it merges the file
                OmegaConf.update(typed, full, value)
            except OmegaConfBaseException as error:
                typed = OmegaConf.structured(schema.Experiment)
                yield (
                    path,
                    Problem(
                        full, "wrong type", value, expected_type(typed, full) or first_line(error)
                    ),
                )


def _remove(whole: Any, path: Sequence[str]) -> None:
    for key in path[:-1]:
        whole = whole[key]
    del whole[path[-1]]
