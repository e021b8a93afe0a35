"""Index or verify shards of samples, convert data to shards, or show data on a page."""

import argparse
import os
from pathlib import Path
from typing import Any

from samewise.runner.commands import PROJECT, compose_arguments
from samewise.runner.errors import ConfigError, DataError, Problem, number_of, require_at_least
from samewise.runner.records.json_text import to_json

EXAMPLES = """examples:
  samewise data index data/pictures                  the shards in data/pictures, or in train, valid and test below it
  samewise data index data/pictures --label species  the label is in a column, or a field of .json, called species
  samewise data index data/cells --label objects --image image
  samewise data verify data/pictures                 read all shards and compare them with their index
  samewise data convert dataset=image_folder dataset.root=photos --to tar --out shards
  samewise data convert experiment=resnet50_imagenet dataset.root=/data/imagenet --to mds --out shards --shuffle seed=1
  samewise data convert shards --to parquet --out tables --samples 1000       from one format to another
  samewise data inspect shards                       how many of which label, how large, and some to look at
  samewise data inspect dataset=coco dataset.root=/data/coco --out coco.html

convert copies encoded images, recordings and texts as they are, with their keys and labels; nothing
is encoded again. Each split becomes a folder of shards:
  samewise train experiment=resnet18_digits dataset=shards dataset.root=shards
Shards are written to OUT.partial, which is renamed to OUT when all of them are there. Stopped at any
time and given again, the command writes only those that are missing. The number of processes
changes no byte."""

ARGUMENTS = {
    "action": {
        "choices": ("index", "verify", "convert", "inspect"),
        "help": "index: find the samples of new and changed shards; verify: read all bytes again, "
        "and name the shards that have changed; convert: write the samples of a data set as shards; "
        "inspect: count labels and sizes, and write a page with some samples",
    },
    "overrides": {
        "nargs": "+",
        "metavar": "DATA",
        "help": "a folder of shards, as for dataset=shards; for convert and inspect also experiment=NAME, "
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
        "metavar": "PLACE",
        "help": "convert: the folder to write, which does not exist yet (default: shards); inspect: "
        "the page (default: data.html)",
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
    "--json": {"action": "store_true", "help": "inspect: print labels and sizes as JSON"},
    **PROJECT,
}
EXCLUSIVE = ("--samples", "--mib")


def run(args: argparse.Namespace) -> int:
    from samewise.runner.records.console import show_progress
    from samewise.runner.shards.index import open_index, split_folders, verify

    if args.action in ("convert", "inspect"):
        ConfigError.raise_if(
            "://" in (args.out or ""),
            "--out",
            "is not a place on this disk",
            args.out,
            hint="write here, then copy it, for example with `aws s3 sync` or `rclone copy`",
        )
        return _convert(args) if args.action == "convert" else _inspect(args)
    roots, differing = [os.path.expanduser(x).rstrip("/") for x in args.overrides], list[Problem]()
    for folder in [x for root in roots for x in (split_folders(root).values() or [root])]:
        if args.action == "verify":
            index, problems = verify(folder, args.label, show_progress, image=args.image)
            differing += problems
        else:
            index = open_index(
                folder, args.label, image=args.image, accepts_changes=True, show=show_progress
            )
        print(
            f"{folder}: {number_of(len(index.samples), 'sample')} in {number_of(len(index.shards), 'shard')}, "
            f"{sum(shard.size for shard in index.shards):,} bytes, {number_of(len(index.labels), 'label')}; {index.place}"
        )
    DataError.raise_all(differing)
    return 0


def _convert(args: argparse.Namespace) -> int:
    from samewise.runner.conversion.shards import convert, require_plan
    from samewise.runner.records.console import show_progress
    from samewise.runner.shards.index import plan_of

    require_at_least(
        {
            f"--{name}": number
            for name in ("samples", "mib", "processes")
            if (number := getattr(args, name)) is not None
        }
    )
    out = Path(args.out or "shards")
    require_plan(out, {"format": args.to})
    splits, seed = _open(args)
    shards = convert(
        splits,
        out,
        args.to,
        samples=args.samples,
        mib=args.mib,
        seed=seed if args.shuffle else None,
        processes=args.processes,
        show=show_progress,
    )
    for name, dataset in splits.items():
        sizes = [path.stat().st_size for path in shards if path.parent.name == name]
        print(
            f"{out / name}: {number_of(len(dataset), 'sample')} in "
            f"{number_of(len(sizes), 'shard')}, {sum(sizes):,} bytes"
        )
    print(f"train on them with dataset={plan_of(str(out))['dataset']} dataset.root={out}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from samewise.runner.conversion.page import describe, page
    from samewise.runner.records.files import write_atomically

    title, out = " ".join(args.overrides), Path(args.out or "data.html")
    splits, _ = _open(args)
    facts = {name: describe(dataset) for name, dataset in splits.items()}
    write_atomically(out, page(title, splits, facts))
    lines = (
        f"{name}: {number_of(fact['samples'], 'sample')}"
        f"{', ' + number_of(len(fact['labels']), 'label') if fact['labels'] else ''}; "
        f"{sum(fact['bytes']) / len(fact['bytes']):,.0f} bytes a sample, at most {max(fact['bytes']):,}"
        for name, fact in facts.items()
    )
    print(to_json(facts, indent=2) if args.json else "\n".join([*lines, f"page     {out}"]))
    return 0


def _open(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Return the data sets of the arguments by split, and the seed."""
    from samewise.runner.conversion.shards import open_splits
    from samewise.runner.shards.index import plan_of

    # A folder is one of shards, and data have any number of classes, unless an override says another
    folders = [x for x in args.overrides if "=" not in x and x[0] != "~"]
    chosen = [
        f"dataset={plan_of(x).get('dataset', 'shards')}"
        for x in folders[:1]
        if "dataset=" not in " ".join(args.overrides)
    ]
    settings = [f"dataset.root='{x}'" if x in folders else x for x in args.overrides]
    args.overrides = ["dataset.num_classes=null", *chosen, *settings]
    composed = compose_arguments(args, strict=False)
    return open_splits(composed), int(composed.cfg.seed)
