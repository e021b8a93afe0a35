"""Write JSON Schemas of all config files, so that editors complete and check them."""

import argparse
import sys
from pathlib import Path

from samewise.runner.commands import PROJECT, project_from
from samewise.runner.records.files import require_writable

ARGUMENTS = {
    "--out": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "where to write them (default: .schema in the project's folder)",
    },
    **PROJECT,
}
EXAMPLES = """\
The schemas cover groups, choices, settings and the arguments of all classes that a config may name, including your own classes that your configs name.
Run the command again after you add a class or a choice. An editor with a YAML language server then completes them, and marks unknown keys and
wrong types. It finds the schema by a line in the config file:

  # yaml-language-server: $schema=../../.schema/model.json        in configs/model/mine.yaml
  # yaml-language-server: $schema=../../.schema/experiment.json   in configs/experiment/mine.yaml, and in every file that begins with `# @package _global_`

or, in VS Code with the extension YAML, from `yaml.schemas` in .vscode/settings.json. `samewise init` writes both.

examples:
  samewise schema
  samewise schema --out ~/schemas --package lab --config-dir configs"""


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config.json_schema import write

    project = project_from(args)
    folder = args.out or project.root / ".schema"
    require_writable("--out", folder, hint="" if args.out else "--out FOLDER writes them elsewhere")
    files, problems = write(project, folder)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    print(f"{len(files)} files in {folder}; `samewise schema --help` says how an editor finds them")
    return 0
