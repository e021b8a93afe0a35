"""List the groups, a group's choices, and the experiments, each with one line of description."""

import argparse
import shutil
import sys

from samewise.runner.commands import PROJECT, project_from
from samewise.runner.errors import ConfigError, nearest
from samewise.runner.records.json_text import to_json

ARGUMENTS = {
    "group": {
        "nargs": "?",
        "help": "a group, such as `optimizer` or `experiment` (default: list all groups)",
    },
    **PROJECT,
    "--json": {"action": "store_true", "help": "print as JSON"},
}
EXAMPLES = """\
examples:
  samewise list
  samewise list experiment
  samewise list optimizer --json"""


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config.catalogue import choices_of, group_summaries

    project = project_from(args)
    groups = group_summaries(project)
    ConfigError.raise_if(
        args.group not in (None, *groups),
        "",
        "unknown group",
        args.group,
        "one of the groups that `samewise list` shows",
        nearest(str(args.group), groups),
    )
    rows = groups if args.group is None else choices_of(args.group, project=project)
    print(to_json(rows, indent=2) if args.json else _table(rows))
    return 0


def _table(rows: dict[str, str]) -> str:
    """Return two columns; on a terminal the second is cut to fit."""
    width = max((len(name) for name in rows), default=0)
    room = shutil.get_terminal_size().columns - width - 2 if sys.stdout.isatty() else None
    return "\n".join(
        f"{name:<{width}}  "
        f"{text if room is None or len(text) <= room else text[: max(room - 3, 10)] + '...'}".rstrip()
        for name, text in rows.items()
    )
