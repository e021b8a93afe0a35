"""What an index of a billion samples takes, and images a second from shards, relative to the same images in files.

    python tests/benchmarks/bench_shards.py FOLDER [PACKAGES]

FOLDER has train/CLASS/*.jpg, for example CIFAR-10. In PACKAGES lie webdataset and mosaicml-streaming, if they shall be measured: pip install --target PACKAGES
--no-deps webdataset braceexpand mosaicml-streaming zstd brotli python-snappy cramjam catalogue.

The billion samples are in 100,000 shards; of the index only the places are written. The images are decoded in this process, without transforms, in the order
of a training from shards, and stacked by 50; files, shards and the other package by turns. The other packages read the same shards, mix as is usual there, and
leave decoding to samewise's decoder. The ratio is the median over the turns, the range holds eight of ten.
"""

import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from pyarrow import parquet

from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.parts.decode import decode_file
from samewise.datasets.shards import ShardImages
from samewise.runner.data.order import Windowed, shuffled
from samewise.runner.shards.index import SAMPLE, ShardIndex

sys.path.append(str(Path(__file__).parents[1] / "datasets"))
from shard_files import mds, tar

SHARDS, SAMPLES, TURNS, IMAGES = 100_000, 10_000, 15, 2000


def billion(folder: Path) -> None:
    path = folder / "label.shards"
    path.write_text("".join(json.dumps([f"{number:06}.tar", 1, 1, "0" * 32, [SAMPLES], []]) + "\n" for number in range(SHARDS)))
    with open(path.with_suffix(".samples"), "wb") as file:
        file.truncate(SHARDS * SAMPLES * SAMPLE.itemsize)
    process, before, start = psutil.Process(), psutil.Process().memory_info().rss, time.perf_counter()
    index = ShardIndex(path, str(folder))
    described = {"shard_sizes": np.diff(index.unit_ends, prepend=0), "__len__": lambda self: len(index.samples)}
    order = Windowed(type("Billion", (SimpleNamespace,), described)(), seed=0)
    print(f"opened in {time.perf_counter() - start:.2f} s")
    seconds = list[float]()
    for epoch in range(100):
        start = time.perf_counter()
        first = random.randrange(SHARDS * SAMPLES - 256)
        for number in order.at(epoch, np.arange(first, first + 256)):
            index.shard_path(number), index.samples[number]
        seconds.append(time.perf_counter() - start)
    print(f"a batch of 256 at any position of any epoch: {1e3 * statistics.median(seconds):.0f} ms, at most {1e3 * max(seconds):.0f} ms")
    print(f"memory {(process.memory_info().rss - before) / 1e6:.0f} MB")


def write(samples: list[tuple[str, str, bytes]], folder: Path) -> None:
    """Write shards of 2,500 as tar, Parquet and MDS."""
    for start in range(0, len(samples), 2500):
        chunk = samples[start : start + 2500]
        names, labels, contents = zip(*chunk, strict=True)
        table = pa.table({"image": contents, "label": labels, "__key__": names})
        parquet.write_table(table, folder / "parquet" / f"{start:06}.parquet", row_group_size=500)
        tar(folder / "tar" / f"{start:06}.tar", [{"__key__": name.rpartition(".")[0], "jpg": raw, "cls": label} for name, label, raw in chunk])
        mds(folder / "mds" / f"{start:06}.mds", [{"image": raw, "label": label} for _, label, raw in chunk])
    shards = [{"samples": min(2500, len(samples) - start), "raw_data": {"basename": f"{start:06}.mds", "hashes": {}}} for start in range(0, len(samples), 2500)]
    for shard in shards:
        shard["raw_data"]["bytes"] = (folder / "mds" / shard["raw_data"]["basename"]).stat().st_size
        shard |= {"column_names": ["image", "label"], "column_encodings": ["bytes", "str"], "column_sizes": [None, None], "compression": None, "format": "mds"}
        shard |= {"hashes": [], "size_limit": None, "version": 2, "zip_data": None}
    (folder / "mds" / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


def samples_of(package: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the decoded samples of another package, mixed as it is usual, epoch after epoch; by the decoder of samewise, in this process."""
    if package == "webdataset":
        import webdataset

        urls = [str(x) for x in sorted((folder / "tar").glob("*.tar"))]
        data: Any = webdataset.WebDataset(urls, shardshuffle=100, seed=0).shuffle(1000).to_tuple("jpg", "cls")
    else:
        import streaming

        data = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=64)
    while True:
        for sample in data:
            raw, label = sample if isinstance(sample, tuple) else (sample["image"], sample["label"])
            yield {"image": decode_file(raw, "image"), "label": int(label)}


def indexed(data: ImageFolder | ShardImages, order: list[int]) -> Iterator[dict[str, Any]]:
    for place in order:
        yield data[place]


def images(source: str, folder: Path, packages: str) -> None:
    files = ImageFolder(root=source, folder="train")
    samples = [(str(files.path(place).relative_to(source)), str(int(files.labels[place])), files.path(place).read_bytes()) for place in range(len(files))]
    for kind in ("tar", "parquet", "mds"):
        (folder / kind).mkdir()
    write(samples, folder)
    sys.path.append(packages)
    for kind, package in (("tar", "webdataset"), ("parquet", ""), ("mds", "streaming")):
        start = time.perf_counter()
        shards = ShardImages(root=str(folder / kind), split="train", shares={})
        print(f"{kind}: indexed {len(shards) / (time.perf_counter() - start):,.0f} samples a second")
        order = shuffled(shards, seed=0).indices(0).tolist()
        compare({kind: indexed(shards, order), "files": indexed(files, order)})
        if package and importlib.util.find_spec(package):
            # Apart, since it has threads, which go on in the turns of the others
            compare({kind: indexed(shards, order), package: samples_of(package, folder)})


def compare(readers: dict[str, Iterator[dict[str, Any]]]) -> None:
    """Print how many times as many images a second the first of two readers gives."""
    seconds = {name: list[float]() for name in readers}
    for _ in range(TURNS + 1):
        for name, reader in readers.items():
            start = time.perf_counter()
            for _ in range(IMAGES // 50):
                torch.stack([sample["image"] for sample in islice(reader, 50)])
            seconds[name].append(time.perf_counter() - start)
    # The first turn warms up
    (kind, own), (name, others) = ((name, turns[1:]) for name, turns in seconds.items())
    ratios = sorted(theirs / ours for ours, theirs in zip(own, others, strict=True))
    speed = IMAGES / statistics.median(own)
    print(f"{kind}: {speed:,.0f} images a second, {statistics.median(ratios):.2f} ({ratios[1]:.2f} to {ratios[-2]:.2f}) times those of {name}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        billion(Path(place))
        images(sys.argv[1], Path(place), "".join(sys.argv[2:]))
