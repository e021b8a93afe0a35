"""Index shards of samples, or verify that they have not changed."""

import argparse
import os

from samewise.runner.errors import DataError, Problem, number_of

EXAMPLES = """examples:
  samewise data index data/pictures                  the shards in data/pictures, or in train, valid and test below it
  samewise data index data/pictures --label species  the label is in a column, or a field of .json, called species
  samewise data index data/cells --label objects --image image
  samewise data verify data/pictures                 read all shards and compare them with their index
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("index", "verify"),
        help="index: find the samples of new and changed shards; verify: read all bytes again, and "
        "name the shards that have changed",
    )
    parser.add_argument("root", metavar="FOLDER", help="the shards, as for dataset=shards")
    parser.add_argument(
        "--label",
        default="label",
        metavar="NAME",
        help="the column or member with the label, the objects or the transcript; empty: samples have "
        "none (default: label)",
    )
    parser.add_argument(
        "--image",
        default="",
        metavar="NAME",
        help="the column or member with the image, if the label is objects (dataset=shard_boxes)",
    )


def run(args: argparse.Namespace) -> int:
    from samewise.runner.records.console import show_progress
    from samewise.runner.shards.index import open_index, split_folders, verify

    root, differing = os.path.expanduser(args.root).rstrip("/"), list[Problem]()
    for folder in split_folders(root).values() or [root]:
        if args.action == "verify":
            index, problems = verify(folder, args.label, show_progress, image=args.image)
            differing += problems
        else:
            index = open_index(
                folder, args.label, image=args.image, accepts_changes=True, show=show_progress
            )
        size = sum(shard.size for shard in index.shards)
        print(
            f"{folder}: {number_of(len(index.samples), 'sample')} in {number_of(len(index.shards), 'shard')}, "
            f"{size:,} bytes, {number_of(len(index.labels), 'label')}; {index.path}"
        )
    DataError.raise_all(differing)
    return 0
