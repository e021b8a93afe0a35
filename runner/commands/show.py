"""Show the resolved config, and where each value comes from."""

from __future__ import annotations

import argparse
import json
import sys

from samewise.runner.commands import add_overrides, compose_arguments


def configure(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    parser.add_argument(
        "--origin",
        action="store_true",
        help="show the line of the file, or the override, that each value comes from",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print name, fingerprint, folder, choices, config (and origins) as JSON",
    )
    parser.epilog = """\
examples:
  samewise show experiment=resnet18_digits
  samewise show experiment=resnet18_digits optimizer.lr=0.05 --origin
  samewise show experiment=resnet18_digits --json"""


def run(args: argparse.Namespace) -> int:
    from samewise.runner.config.origins import origin_of
    from samewise.runner.config.tree import flat

    composed = compose_arguments(args)
    for caution in composed.cautions:
        print(f"warning: {caution}", file=sys.stderr)
    config = composed.whole
    set_by = composed.set_by if args.origin else {}
    where = {path: origin_of(path, set_by) for path, _ in flat(config)} if args.origin else {}
    if args.json:
        head = {
            "name": composed.name,
            "fingerprint": composed.fingerprint,
            "folder": str(composed.folder.path),
            "choices": composed.choices,
            "config": config,
        }
        print(json.dumps(head | ({"origins": where} if where else {}), indent=2))
        return 0
    print(f"# name:        {composed.name}")
    print(f"# fingerprint: {composed.fingerprint}")
    print(f"# folder:      {composed.folder.path}")
    if args.origin:
        lines = [
            (f"{path}: {json.dumps(value, ensure_ascii=False, default=str)}", where[path])
            for path, value in flat(config)
        ]
        width = min(60, max(len(text) for text, _ in lines))
        print("\n".join(f"{text:<{width}}  # {origin}" for text, origin in lines))
    else:
        import yaml

        print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")
    return 0
