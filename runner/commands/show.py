"""Show the resolved config, and where each value comes from."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_type_hints

from samewise.runner.commands import OVERRIDES, compose_arguments
from samewise.runner.errors import ConfigError

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed

ARGUMENTS = {
    **OVERRIDES,
    "--origin": {
        "action": "store_true",
        "help": "show the line of the file, or the override, that each value comes from",
    },
    "--meanings": {
        "action": "store_true",
        "help": "show what each key means; imports the classes that the config names",
    },
    "--json": {
        "action": "store_true",
        "help": "print name, fingerprint, folder, choices, config (and origins or meanings) as JSON",
    },
}
EXAMPLES = """\
It does not check values; `samewise check` does.

examples:
  samewise show experiment=resnet18_digits
  samewise show experiment=resnet18_digits optimizer.lr=0.05 --origin
  samewise show experiment=resnet18_digits --meanings | grep ^scheduler
  samewise show experiment=resnet18_digits --json"""


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config.catalogue import title_of
    from samewise.runner.config.check.settings import keys_are_known
    from samewise.runner.config.origins import origin_of
    from samewise.runner.config.tree import flat

    composed = compose_arguments(args)
    ConfigError.raise_all(keys_are_known(composed.whole))
    for caution in composed.cautions:
        print(f"warning: {caution}", file=sys.stderr)
    config = composed.whole
    set_by = composed.set_by if args.origin else {}
    where = {path: origin_of(path, set_by) for path, _ in flat(config)} if args.origin else {}
    meanings = dict(_meanings(composed)) if args.meanings else {}
    if args.json:
        values = {
            "name": composed.name,
            "title": title_of(composed),
            "fingerprint": composed.fingerprint,
            "folder": str(composed.folder.path),
            "choices": composed.choices,
            "config": config,
        }
        notes = {"origins": where, "meanings": meanings}
        print(
            json.dumps(values | {name: paths for name, paths in notes.items() if paths}, indent=2)
        )
        return 0
    print(f"# name:        {composed.name}")
    if title := title_of(composed):
        print(f"# title:       {title}")
    print(f"# fingerprint: {composed.fingerprint}")
    print(f"# folder:      {composed.folder.path}")
    if args.origin or args.meanings:
        lines = [
            (
                f"{path}: {json.dumps(value, ensure_ascii=False, default=str)}",
                "; ".join(filter(None, (where.get(path), _nearest_meaning(path, meanings)))),
            )
            for path, value in flat(config)
        ]
        width = min(60, max(len(text) for text, _ in lines))
        print("\n".join(f"{text:<{width}}  # {note}".rstrip(" #") for text, note in lines))
    else:
        import yaml

        print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")
    return 0


def _nearest_meaning(path: str, meanings: Mapping[str, str]) -> str:
    """Return the meaning of a path, or of the list or mapping that it is in."""
    while path not in meanings and path.count(".") > 1:
        path = path.rpartition(".")[0]
    return meanings.get(path, "")


def _meanings(composed: Composed) -> Iterator[tuple[str, str]]:
    """Yield each key's path with its meaning.

    A setting has its meaning from the schema, a component's argument from its docstring, a value
    that an argument refers to from that argument, and any other from the comment beside it in the
    file.
    """
    from samewise.runner.config.catalogue import field_summaries
    from samewise.runner.config.instantiate import locate
    from samewise.runner.config.json_types import arguments, description
    from samewise.runner.config.loader import Loader
    from samewise.runner.config.references import find_references
    from samewise.runner.config.schema import Experiment
    from samewise.runner.config.tree import flat

    loader = Loader(composed.project)
    meanings = {
        f"{group}.{key}": text
        for group, choice in composed.choices.items()
        for key, text in re.findall(
            r"^(\w+):.* # +(.+)$", loader.text_of(f"{group}/{choice}"), re.MULTILINE
        )
    }
    for path, target in flat(composed.whole):
        if path.endswith("_target_"):
            parent_path = path.removesuffix("_target_")
            # A component that is refused has no meanings here; `check` says why
            with suppress(ConfigError):
                component = locate(target, parent_path.rstrip("."), composed.project.packages)
                meanings |= {
                    f"{parent_path}{name}": text for name, text in arguments(component).items()
                }
                meanings[path] = description(component)
    for path, text in find_references(composed.cfg).items():
        if path in meanings:
            meanings[text.strip("${}")] = meanings[path]
    sections: dict[str, Any] = {"": Experiment} | {
        f"{name}.": kind
        for name, kind in get_type_hints(Experiment).items()
        if dataclasses.is_dataclass(kind)
    }
    for prefix, kind in sections.items():
        meanings |= {f"{prefix}{name}": text for name, text in field_summaries(kind).items()}
    yield from meanings.items()
