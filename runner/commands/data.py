"""Index shards of samples, verify that they have not changed, or convert data to shards."""

import argparse
import os
from pathlib import Path

from samewise.runner.commands import PROJECT, compose_arguments
from samewise.runner.errors import DataError, Problem, number_of, require_at_least

EXAMPLES = """examples:
  samewise data index data/pictures                  the shards in data/pictures, or in train, valid and test below it
  samewise data index data/pictures --label species  the label is in a column, or a field of .json, called species
  samewise data index data/cells --label objects --image image
  samewise data verify data/pictures                 read all shards and compare them with their index
  samewise data convert dataset=image_folder dataset.root=photos --to tar --out shards
  samewise data convert experiment=resnet50_imagenet dataset.root=/data/imagenet --to mds --out shards --shuffle seed=1
  samewise data convert shards --to parquet --out tables --samples 1000       from one format to another

convert copies encoded images, recordings and texts as they are, with their keys and labels; nothing
is encoded again. Each split becomes a folder of shards:
  samewise train experiment=resnet18_digits dataset=shards dataset.root=shards
Shards are written to OUT.partial, which is renamed to OUT when all of them are there. Stopped at any
time and given again, the command writes only those that are missing. The number of processes
changes no byte."""

ARGUMENTS = {
    "action": {
        "choices": ("index", "verify", "convert"),
        "help": "index: find the samples of new and changed shards; verify: read all bytes again, "
        "and name the shards that have changed; convert: write the samples of a data set as shards",
    },
    "overrides": {
        "nargs": "+",
        "metavar": "DATA",
        "help": "a folder of shards, as for dataset=shards; for convert also experiment=NAME, "
        "dataset=NAME and dataset.KEY=VALUE, as for train",
    },
    "--label": {
        "default": "label",
        "metavar": "NAME",
        "help": "index, verify: the column or member with the label, the objects or the transcript; "
        "empty: samples have none (default: label)",
    },
    "--image": {
        "default": "",
        "metavar": "NAME",
        "help": "index, verify: the column or member with the image, if the label is objects "
        "(dataset=shard_boxes)",
    },
    "--to": {
        "choices": ("tar", "parquet", "mds"),
        "default": "tar",
        "help": "convert: the format; tar is WebDataset's (default), mds MosaicML streaming's",
    },
    "--out": {
        "type": Path,
        "default": Path("shards"),
        "metavar": "FOLDER",
        "help": "convert: the folder to write, which does not exist yet (default: shards)",
    },
    "--samples": {"type": int, "metavar": "N", "help": "convert: samples of a shard"},
    "--mib": {
        "type": int,
        "default": 64,
        "metavar": "M",
        "help": "convert: MiB of a shard, about, by the mean size of a sample (default: 64)",
    },
    "--shuffle": {
        "action": "store_true",
        "help": "convert: in a random order, which seed=N decides; without it, in the data set's",
    },
    "--processes": {
        "type": int,
        "default": os.cpu_count(),
        "metavar": "N",
        "help": "convert: how many processes write (default: one for each core)",
    },
    **PROJECT,
}
EXCLUSIVE = ("--samples", "--mib")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.records.console import show_progress
    from samewise.runner.shards.index import open_index, split_folders, verify

    if args.action == "convert":
        return _convert(args)
    roots, differing = [os.path.expanduser(x).rstrip("/") for x in args.overrides], list[Problem]()
    for folder in [x for root in roots for x in (split_folders(root).values() or [root])]:
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


def _convert(args: argparse.Namespace) -> int:
    from samewise.runner.conversion.shards import convert, open_splits
    from samewise.runner.records.console import show_progress

    numbers = [(f"--{x}", getattr(args, x)) for x in ("samples", "mib", "processes")]
    require_at_least({name: number for name, number in numbers if number is not None})
    # A folder is one of shards, and data have any number of classes, unless an override says another
    roots = ["" if "=" in x or x[0] == "~" else f"dataset.root='{x}'" for x in args.overrides]
    chosen = ["dataset=shards"] * (any(roots) and "dataset=" not in " ".join(args.overrides))
    settings = [root or x for root, x in zip(roots, args.overrides, strict=True)]
    args.overrides = ["dataset.num_classes=null", *chosen, *settings]
    composed = compose_arguments(args, strict=False)
    splits = open_splits(composed)
    shards = convert(
        splits,
        args.out,
        args.to,
        samples=args.samples,
        mib=args.mib,
        seed=composed.cfg.seed if args.shuffle else None,
        processes=args.processes,
        show=show_progress,
    )
    for name, dataset in splits.items():
        sizes = [path.stat().st_size for path in shards if path.parent.name == name]
        print(
            f"{args.out / name}: {number_of(len(dataset), 'sample')} in "
            f"{number_of(len(sizes), 'shard')}, {sum(sizes):,} bytes"
        )
    return 0
