"""What an index of a billion samples takes, and images a second from shards, relative to the same images in files.

    python tests/benchmarks/bench_shards.py FOLDER     FOLDER has train/CLASS/*.jpg, for example CIFAR-10

The billion samples are in 100,000 shards; of the index only the places are written. The images are decoded in this process, without transforms, in the order
of a training from shards; files and shards by turns. The ratio is the median over the turns, the range holds eight of ten.
"""

import io
import json
import random
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
from pyarrow import parquet

from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.shards import ShardImages
from samewise.runner.data.order import Windowed, shuffled
from samewise.runner.shards.index import SAMPLE, ShardIndex

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


def images(source: str, folder: Path) -> None:
    files = ImageFolder(root=source, folder="train")
    samples = [(str(files.path(place).relative_to(source)), str(int(files.labels[place])), files.path(place).read_bytes()) for place in range(len(files))]
    for kind in ("tar", "parquet"):
        (folder / kind).mkdir()
    for start in range(0, len(samples), 2500):
        chunk = samples[start : start + 2500]
        names, labels, contents = zip(*chunk, strict=True)
        parquet.write_table(pa.table({"image": contents, "label": labels, "__key__": names}), folder / "parquet" / f"{start:06}.parquet", row_group_size=500)
        with tarfile.open(folder / "tar" / f"{start:06}.tar", "w") as archive:
            for name, label, content in chunk:
                for member, raw in ((name, content), (f"{name.rpartition('.')[0]}.cls", label.encode())):
                    header = tarfile.TarInfo(member)
                    header.size = len(raw)
                    archive.addfile(header, io.BytesIO(raw))
    for kind in ("tar", "parquet"):
        start = time.perf_counter()
        shards = ShardImages(root=str(folder / kind), split="train", shares={})
        print(f"{kind}: indexed {len(shards) / (time.perf_counter() - start):,.0f} samples a second")
        order, seconds = shuffled(shards, seed=0).indices(0).tolist(), {kind: list[float](), "files": list[float]()}
        for turn in range(TURNS):
            for name, data in ((kind, shards), ("files", files)):
                start = time.perf_counter()
                for place in order[turn * IMAGES : (turn + 1) * IMAGES]:
                    data[place]
                seconds[name].append(time.perf_counter() - start)
        ratios = sorted(mine / theirs for mine, theirs in zip(seconds["files"], seconds[kind], strict=True))
        speed = IMAGES / statistics.median(seconds[kind])
        print(f"{kind}: {speed:,.0f} images a second, {statistics.median(ratios):.2f} ({ratios[1]:.2f} to {ratios[-2]:.2f}) times those of files")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        billion(Path(place))
        images(sys.argv[1], Path(place))
