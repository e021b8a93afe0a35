"""Find every problem that can be found without training."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from samewise.runner.commands import OVERRIDES, compose_arguments
from samewise.runner.errors import ConfigError
from samewise.runner.processes import variables
from samewise.runner.records.json_text import to_json
from samewise.runner.tracking import address, backends

if TYPE_CHECKING:
    from samewise.runner.training.layers import Layer

ARGUMENTS = {
    **OVERRIDES,
    "--strict": {
        "action": "store_true",
        "help": "exit with code 2 on warnings too: settings that cannot do what they say",
    },
    "--static": {
        "action": "store_true",
        "help": "only read the config: build nothing, load no data",
    },
    "--depth": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "levels of modules in the model's summary; 0: only the model (default: 1)",
    },
    "--json": {
        "action": "store_true",
        "help": "print {name, fingerprint, problems, notes, layers, checkpoint} as JSON",
    },
}
EXCLUSIVE = ("--strict", "--static")
EXAMPLES = """\
examples:
  samewise check experiment=resnet18_digits
  samewise check experiment=resnet50_imagenet dataset.root=/data/imagenet
  samewise check experiment=resnet18_digits strategy=elastic replicas=512 batch_size=1024 strategy.nproc=512
  samewise check experiment=resnet18_digits --depth 3                        every layer of the model
  samewise check experiment=resnet18_digits --static --json"""


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config.check import problems, settings_are_sound

    composed = compose_arguments(args, strict=False)
    if settings_are_sound(composed):
        # Before torch is imported, which the rules below do
        variables.prepare(composed.cfg.reproducibility)
    found_problems, notes = (
        problems(composed, composed.project),
        [f"warning: {caution}" for caution in composed.cautions],
    )
    uri = None if composed.problems else composed.tracking_uri
    found_problems += filter(None, [address.problem(uri)]) if uri else []
    found_problems += (
        [] if composed.problems else backends.problems(backends.backends_of(composed.cfg.tracking))
    )
    summary: list[Layer] = []
    checkpoint, table = dict[str, int](), list[str]()
    if not found_problems and not args.static:
        try:
            from samewise.runner.training import layers, memory
            from samewise.runner.training.dry_run import dry_run

            notes = dry_run(
                composed,
                composed.project,
                lambda run: (
                    summary.extend(layers.summarise(run, args.depth)),
                    checkpoint.update(memory.checkpoint_of(run)),
                ),
            )
            table = [*layers.table_lines(summary), *memory.checkpoint_lines(checkpoint)]
        except ConfigError as error:
            if not args.json:
                raise
            found_problems = list(error.problems)
    has_warnings = args.strict and any(note.startswith("warning: ") for note in notes)
    if args.json:
        values = [
            {key: value for key, value in vars(problem).items() if value not in ("", ...)}
            for problem in found_problems
        ]
        print(
            to_json(
                {
                    "name": composed.name,
                    "fingerprint": composed.fingerprint,
                    "problems": values,
                    "notes": notes,
                    "layers": summary,
                    "checkpoint": checkpoint,
                },
                indent=2,
            )
        )
        return ConfigError.exit_code if found_problems or has_warnings else 0
    ConfigError.raise_all(found_problems)
    title = f"no problems found in {composed.name} ({composed.fingerprint[:12]})"
    print("\n  ".join([title, *notes, *table]))
    return ConfigError.exit_code if has_warnings else 0
