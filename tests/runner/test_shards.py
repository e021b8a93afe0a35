"""A training from shards has the trace of one from files, also when it is killed and finished elsewhere."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from samewise_forked import Forked
from samewise_runner_launched import wait_for_step
from samewise_tiny import DIGITS

from samewise.datasets.digits import Digits

SHAPE = ["dataset.channels=1", "dataset.mode=gray", "dataset.image_size=8", "dataset.mean=[0.5]", "dataset.std=[0.5]"]
TRAIN = ["train", *DIGITS, "model.width=8", "transforms=images", "batch_size=24", "checkpoint.every_steps=2", *SHAPE]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as PNG in folders by class, and in the same order in shards of 20: tar, and Parquet with groups of 7."""
    root = tmp_path_factory.mktemp("digits")
    for split, count in (("train", 130), ("valid", 30)):
        data = Digits(split=split)
        samples = sorted((str(data[place]["label"]), f"{place:04}", data[place]["image"]) for place in range(count))
        for start in range(0, count, 20):
            rows = list[dict[str, Any]]()
            for label, name, image in samples[start : start + 20]:
                stored = io.BytesIO()
                Image.fromarray(image[0].numpy().astype(np.uint8)).save(stored, "PNG")
                place = root / "files" / split / label / f"{name}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(stored.getvalue())
                rows.append({"image": {"bytes": stored.getvalue(), "path": None}, "label": int(label), "__key__": f"{label}/{name}"})
            for kind in ("tar", "parquet"):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.Table.from_pylist(rows), root / "parquet" / split / f"{start:04}.parquet", row_group_size=7)
            with tarfile.open(root / "tar" / split / f"{start:04}.tar", "w") as archive:
                for row in rows:
                    for ending, content in (("png", row["image"]["bytes"]), ("cls", str(row["label"]).encode())):
                        header = tarfile.TarInfo(f"{row['__key__']}.{ending}")
                        header.size = len(content)
                        archive.addfile(header, io.BytesIO(content))
    return root


def trace(run_root: Path) -> bytes:
    (path,) = run_root.glob("*/*/trace.jsonl")
    return path.read_bytes().partition(b"\n")[2]


def test_the_trace_from_shards_is_that_from_files(digits: Path, tmp_path: Path, samewise: Callable[..., Any]) -> None:
    """With order=bijection, which needs only the number of samples, since the shards have them in the order of the files."""
    for kind in ("files", "tar", "parquet"):
        dataset = "image_folder" if kind == "files" else "shards"
        done = samewise(*TRAIN, f"dataset={dataset}", f"dataset.root={digits / kind}", "order=bijection", "max_steps=7", f"run_root={tmp_path / kind}")
        assert done.returncode == 0, done.stderr
    assert trace(tmp_path / "tar") == trace(tmp_path / "parquet") == trace(tmp_path / "files")


@pytest.mark.slow
def test_a_run_killed_on_two_ranks_with_three_workers_is_finished_on_one_without(digits: Path, tmp_path: Path, samewise: Callable[..., Any]) -> None:
    common = [*TRAIN, "dataset=shards", f"dataset.root={digits / 'tar'}", "dataset.window=3", "max_steps=24", "replicas=2", "strategy=elastic"]
    killed = tmp_path / "killed"
    process = Forked(*common, f"run_root={killed}", "strategy.nproc=2", "loader.num_workers=3", said=tmp_path / "said")
    wait_for_step(process, killed, 5)
    process.kill()
    (begun,) = killed.glob("*/*/trace.jsonl")
    assert begun.read_bytes().count(b"\n") < 24
    for root in (killed, tmp_path / "whole"):
        assert samewise(*common, f"run_root={root}", "loader.num_workers=0").returncode == 0
    assert trace(killed) == trace(tmp_path / "whole")
