"""JSON Schemas of config files, for editors: of the root, of whole experiments, and of each group.

A file may leave out what others give (`defaults`, an experiment, the command line), so nothing is
required of it; what is written is held to what takes it.
"""

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from samewise.runner.config import json_types, slots
from samewise.runner.config.annotations import ANY, PART, REFERENCE, Schema, schema_of
from samewise.runner.config.catalogue import choices_of, field_summaries
from samewise.runner.config.file_faults import problem_in_file
from samewise.runner.config.instantiate import locate
from samewise.runner.config.json_types import DEFAULTS, closed_object
from samewise.runner.config.loader import Loader
from samewise.runner.config.overrides import FAILURES
from samewise.runner.config.project import Project
from samewise.runner.config.schema import SPLITS, Experiment
from samewise.runner.config.tree import flat
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.records.files import write_atomically

ROOT = "experiment"
"""The schema of the root, and of all files that are `@package _global_`."""
MARK = "written by `samewise schema`"
Members = dict[Any, list[str]]
"""Classes and functions, each with all its names."""


def project_schemas(project: Project) -> tuple[dict[str, Schema], list[Problem]]:
    """Return the JSON schemas of a project's files by name, and the problems of those files.

    The names are `experiment` (the root and every `@package _global_` file), each group that is a
    key of the root, and `definitions`. Arguments of components with problems are unknown.
    """
    writer = Writer(project)
    definitions = {_id(name): definition for name, definition in writer.definitions().items()}
    wholes = {name: _id(f"file of {name}") for name in writer.choices} | {ROOT: "root"}
    # By the mark, `write` recognises the files that it may replace
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "$comment": MARK}
    schemas = {
        name: head | {"allOf": [{"$ref": f"definitions.json#/definitions/{whole}"}]}
        for name, whole in wholes.items()
        if whole in definitions
    }
    return {**schemas, "definitions": head | {"definitions": definitions}}, writer.problems


def write(project: Project, folder: Path) -> tuple[list[Path], list[Problem]]:
    """Write the schemas into a folder.

    Return the files, and the problems as `project_schemas` does. ConfigError if a file in their
    place is something else.
    """
    schemas, problems = project_schemas(project)
    files = {folder / f"{name}.json": schema for name, schema in schemas.items()}
    ConfigError.raise_all(
        Problem(
            str(file),
            "exists and is not one of samewise's schemas",
            hint="--out names another folder",
        )
        for file in files
        if file.exists() and MARK not in file.read_text(encoding="utf-8", errors="replace")[:200]
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file, schema in files.items():
        write_atomically(file, json.dumps(schema, indent=1, default=str) + "\n")
    return list(files), problems


class Writer:
    """Writes the definitions that the schemas share."""

    def __init__(self, project: Project) -> None:
        loader = Loader(project)
        self.packages = project.packages
        self.problems = list[Problem]()
        self.choices = {group: choices_of(group, project=project) for group in loader.groups()}
        known_slots = slots.known_slots()
        self.places: dict[str, Members] = {
            place: {slot: names for (of, slot), names in known_slots.items() if of == kind}
            for place, kind in slots.KINDS.items()
        }
        self.parts: Members = {
            slot: names
            for (kind, slot), names in known_slots.items()
            if any(kind in kinds for kinds in slots.PARTS.values())
        }
        self.facts = dict[str, set[str]]()
        self.elsewhere = dict[
            str, str
        ]()  # groups that choose a part of a component: the path set by their files
        self.comments = dict[str, str]()  # by path: what a file says beside a key
        self.taken_by = dict[
            str, list[tuple[str, str]]
        ]()  # by path: the components, and the argument of each, that get just this value
        self.used = dict[str, list[str]]()  # by path, and by place: the components of its choices
        short = {name: names[0] for names in known_slots.values() for name in names}
        for group, names in self.choices.items():
            for name in names:
                self._read(loader, group, name, short)

    def _read(self, loader: Loader, group: str, name: str, short: dict[str, str]) -> None:
        """Collect from a choice's file the components and the keys that it uses."""
        try:
            file = loader.read(f"{group}/{name}")
        except FAILURES as error:
            problem = problem_in_file(error)
            self.problems.append(
                dataclasses.replace(problem, path=problem.path or f"{group}/{name}.yaml")
            )
            return
        raw: Any = OmegaConf.to_container(file.config, resolve=False)
        package = file.package or group
        under = "" if package == "_global_" else package.replace("/", ".")
        if under and group.partition("/")[0] not in Experiment.__dataclass_fields__:
            self.elsewhere[group] = under
        if under and isinstance(raw, dict):
            self.facts.setdefault(group, set()).update(map(str, raw))
            self.comments |= {
                f"{group}.{key}": text
                for key, text in re.findall(
                    r"^(\w+):.* # +(.+)$", loader.text_of(f"{group}/{name}"), re.MULTILINE
                )
            }
        for free, fact in re.findall(
            r"\$\{(?:oc\.select:)?(dataset|transforms)\.(\w+)", json.dumps(raw)
        ):  # an experiment may add values that it refers to
            self.facts.setdefault(free, set()).add(fact)
        values = dict(flat(raw, under))
        for path, target in values.items():
            where, _, last = path.rpartition(".")
            if reference := re.fullmatch(r"\$\{(\w+\.\w+)\}", str(target)):
                taker = str(values.get(f"{where}._target_"))
                self.taken_by.setdefault(reference[1], []).append((short.get(taker, taker), last))
            if (
                last == "_target_"
                and isinstance(target, str)
                and (target in short or self._is_own(target, where))
            ):
                for key in filter(None, (where, slots.place_at(where))):
                    self.used.setdefault(key, []).append(short.get(target, target))

    def _is_own(self, target: str, path: str) -> bool:
        """Register a valid component of the user's own; return whether it is one."""
        if not slots.within(target, self.packages):
            return False
        try:
            located = locate(target, path, self.packages)
        except ConfigError as error:
            self.problems.extend(error.problems)
            return False
        place = slots.place_at(path)
        names = (self.places[place] if place else self.parts).setdefault(located, [])
        names.extend([target] if target not in names else [])
        return True

    def definitions(self) -> dict[str, Schema]:
        """The definitions by name: components, places, choices, groups, files and the root."""
        self.found: dict[str, Schema] = {
            names[0]: json_types.call_schema(member)
            for members in (*self.places.values(), self.parts)
            for member, names in members.items()
        }
        for names in self.used.values():
            # Components with problems have no definition
            names[:] = [name for name in dict.fromkeys(names) if name in self.found]
        self.found |= json_types.SHARED
        for name, members in (("part", self.parts), *self.places.items()):
            self.found |= {
                f"target of {name}": self._target(members),
                name if name == "part" else f"place {name}": _component(name, members),
            }
        for group, names in self.choices.items():
            self.found[f"choice of {group}"] = _choice(names)
        self.found["by group"] = self._by_group()
        summaries, kinds, keys = (
            field_summaries(Experiment),
            typing.get_type_hints(Experiment),
            dict[str, Schema](),
        )
        for field in dataclasses.fields(Experiment):
            name = field.name
            whole = (
                self._settings(name, kinds[name])
                if dataclasses.is_dataclass(kinds[name])
                else self._value(name) or schema_of(kinds[name])
            )
            if name in self.choices:
                self.found[name] = whole
                self.found[f"file of {name}"] = self._file(
                    name, self._value(name, of_file=True) or whole
                )
            keys[name] = {
                "description": summaries.get(name) or json_types.description(kinds[name]),
                **({"allOf": [_ref(name)]} if name in self.choices else whole | _default(field)),
            }
        for group, path in self.elsewhere.items():
            part = (
                self._changes_schema(path)
                if path in slots.KINDS
                else self._part(path)
                if path in self.used
                else self._parts(group, path)
            )
            self.found[f"file of {group}"] = self._file(group, part)
        self.found["root"] = self._file("", closed_object(keys | {"defaults": DEFAULTS}))
        return self.found

    def _value(self, group: str, *, of_file: bool = False) -> Schema | None:
        """The schema of a group's key.

        In a file of the group itself, other keys are allowed too, for other files to refer to.
        """
        facts = {
            fact: ANY | self._meaning(f"{group}.{fact}")
            for fact in sorted(self.facts.get(group, ()))
        }
        free: Any = ANY if of_file else False
        if group == "dataset":
            splits = {
                split: self._changes_schema("dataset.*")
                | {"description": f"The data set of the {split} split."}
                for split in SPLITS
            }
            return closed_object(
                facts | splits | {"defaults": DEFAULTS},
                patternProperties={
                    f"^({'|'.join(SPLITS)})_": self._changes_schema("dataset.*") | {"else": True}
                },
                additionalProperties=free,
            )
        if group == "transforms":
            schema = {
                "type": ["object", "string"],
                "if": {"type": "object"},
                "then": _ref("place transforms.*.*.*"),
                "else": REFERENCE,
            }
            listed = {
                "type": ["array", "string", "null"],
                "items": schema,
                "if": {"type": "string"},
                "then": REFERENCE,
            }
            phase = closed_object(
                {
                    "sample": listed | {"description": "For each sample, as it is loaded."},
                    "batch": listed | {"description": "For each batch, on the device."},
                }
            )
            phases = {
                "train": phase | {"description": "The transforms in training."},
                "eval": phase | {"description": "The transforms in evaluation."},
            }
            return closed_object(facts | phases | {"defaults": DEFAULTS}, additionalProperties=free)
        if group == "callbacks":
            return closed_object(
                {name: self._changes_schema("callbacks.*", f"callbacks.{name}") for name in facts}
                | {"defaults": DEFAULTS},
                additionalProperties=_ref("place callbacks.*"),
            )
        if group == "initialise":
            return closed_object(facts | {"defaults": DEFAULTS})
        if group == "param_groups":
            return {
                "type": "object",
                "properties": {"defaults": DEFAULTS},
                "additionalProperties": {"type": ["object", "null"]},
            }
        if group == "optimizer":  # or one for each phase
            changed = self._changes_schema(group)
            return changed | {"else": changed["else"] | {"additionalProperties": _ref("optimizer")}}
        if group == "recipe":  # with changes to a chosen loss, and to metrics
            changed = self._changes_schema(group)
            keys = changed["else"]["properties"]
            keys["loss"] = {
                "anyOf": [keys["loss"], self._changes_schema(group, "recipe.loss")["else"]]
            }
            keys["metrics"] = self._parts("metrics", "recipe.metrics")
            return changed
        return self._changes_schema(group) if group in slots.KINDS else None

    def _meaning(self, path: str) -> Schema:
        """Return the description of the argument that gets the value at a path, or the file's."""
        takers = [
            self.found[name]["properties"].get(argument, {})
            for name, argument in self.taken_by.get(path, ())
            if name in self.found
        ]
        texts = [
            *(taker["description"] for taker in takers if "description" in taker),
            *([self.comments[path]] if path in self.comments else []),
        ]
        return {"description": texts[0]} if texts else {}

    def _changes_schema(self, place: str, path: str = "") -> Schema:
        """A component, or changes to the chosen one: any argument that the choices have there."""
        several = dict[str, list[Schema]]()
        for name in self.used.get(path or place, ()):
            for key, value in self.found[name]["properties"].items():
                if value not in several.setdefault(key, []):
                    several[key].append(value)
        keys = {
            key: values[0] if len(values) == 1 else {"anyOf": values}
            for key, values in several.items()
        } | {"_target_": _ref(f"target of {place}")}
        return {
            "if": {"type": "object", "required": ["_target_"]},
            "then": _ref(f"place {place}"),
            "else": closed_object(keys, type=["object", "null"]),
        }

    def _part(self, path: str) -> Schema:
        """A part of a component, or changes to the chosen one."""
        return {
            "type": "object",
            "if": {"required": ["_target_"]},
            "then": PART,
            "else": self._changes_schema("recipe", path)["else"],
        }

    def _parts(self, group: str, path: str) -> Schema:
        """A component's parts by name: those that choices name, and any other."""
        return closed_object(
            {name: self._part(f"{path}.{name}") for name in sorted(self.facts.get(group, ()))},
            additionalProperties=PART,
        )

    def _settings(self, name: str, kind: Any) -> Schema:
        about, kinds, keys = field_summaries(kind), typing.get_type_hints(kind), dict[str, Schema]()
        for field in dataclasses.fields(kind):
            path = f"{name}.{field.name}"
            keys[field.name] = (
                (
                    self._changes_schema(path)
                    if path in slots.KINDS
                    else schema_of(kinds[field.name])
                )
                | _default(field)
                | {"description": about[field.name]}
            )
        return closed_object(keys | {"defaults": DEFAULTS})

    def _target(self, members: Members) -> Schema:
        aliases = sorted(name for names in members.values() for name in names[1:])
        patterns = [
            *([f"^({'|'.join(map(re.escape, aliases))})$"] if aliases else []),
            *([rf"^({'|'.join(self.packages)})\."] if self.packages else []),
        ]
        return {
            "anyOf": [
                {"enum": sorted(names[0] for names in members.values())},
                *({"type": "string", "pattern": pattern} for pattern in patterns),
                REFERENCE,
            ]
        }

    def _by_group(self) -> Schema:
        """An entry of a defaults list that chooses from a group."""
        return closed_object(
            {f"override /{group}": _ref(f"choice of {group}") for group in self.choices},
            patternProperties={
                rf"^((override|optional) )*/?{group}(@[\w.]+)?$": _ref(f"choice of {group}")
                for group in self.choices
            },
            maxProperties=1,
        )

    def _file(self, group: str, whole: Schema) -> Schema:
        """The schema of a group's file, or of the root, with its defaults list."""
        names = {"enum": ["_self_", *self.choices.get(group, ())]}
        references = {"type": "string", "pattern": r"[/@$]"} if group else {"type": "string"}
        defaults = {
            "type": "array",
            "items": {"anyOf": [names, references, _ref("by group")]},
            "description": "What this builds on; later lines win.",
        }
        return {"type": "object", "properties": {"defaults": defaults}, "allOf": [whole]}


def _default(field: dataclasses.Field[Any]) -> Schema:
    return json_types.default_of(
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def _component(name: str, members: Members) -> Schema:
    return {
        "type": "object",
        "properties": {"_target_": _ref(f"target of {name}")},
        "required": ["_target_"],
        "allOf": [
            {
                "if": {"properties": {"_target_": _name_schema(names)}, "required": ["_target_"]},
                "then": _ref(names[0]),
            }
            for names in sorted(members.values(), key=lambda names: names[0])
        ],
    }


def _name_schema(names: list[str]) -> Schema:
    """Any of a component's names; an editor offers only the first."""
    return {
        "anyOf": [
            {"const": names[0]},
            *(
                [{"type": "string", "pattern": f"^({'|'.join(map(re.escape, names[1:]))})$"}]
                if names[1:]
                else []
            ),
        ]
    }


def _choice(names: dict[str, str]) -> Schema:
    schema = {"enum": list(names), "enumDescriptions": list(names.values())}
    return {"anyOf": [schema, {"type": "array", "items": schema}, REFERENCE, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/definitions/{_id(name)}"}


def _id(name: str) -> str:
    """A name made safe for a JSON pointer."""
    return re.sub(r"[^\w.]", "-", name)
