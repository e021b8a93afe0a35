"""Shards in an object store that fails now and then: read as those on a disk, within a bounded cache, and never for ever."""

import io
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from s3fs import S3FileSystem
from samewise_datasets_shard_files import rows_of, write
from samewise_forked import Forked
from samewise_runner_launched import wait_for_step
from samewise_s3_server import Store, serve
from samewise_tiny import DIGITS
from torch.utils.data import default_collate

from samewise.datasets.digits import Digits
from samewise.datasets.shards import ShardImages
from samewise.runner.config import schema
from samewise.runner.data.keyed import Key, KeyedDataset, training_keys
from samewise.runner.data.loading import Loader
from samewise.runner.data.order import ByReplica
from samewise.runner.data.plan import Plan
from samewise.runner.errors import ConfigError, DataError, TrainingError
from samewise.runner.shards import cache, stores
from samewise.runner.shards.index import open_index

ROOT = "s3://bucket/tar"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits as PNG, in shards of 20."""
    root = tmp_path_factory.mktemp("digits")
    for split, count in (("train", 130), ("valid", 30)):
        data, samples = Digits(split=split), list[tuple[str, str, bytes]]()
        for place in range(count):
            stored = io.BytesIO()
            Image.fromarray(data[place]["image"][0].numpy().astype(np.uint8)).save(stored, "PNG")
            samples.append((f"{place:04}.png", str(data[place]["label"]), stored.getvalue()))
        for kind in ("tar", "parquet"):
            write(root / kind / split, rows_of(samples, kind), kind, size=20)
    return root


@pytest.fixture
def store(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store whose bucket has the digits; its blocks are small, and failures are followed by tries at once."""
    shutil.copytree(written, tmp_path / "s3" / "bucket")
    monkeypatch.setenv("SAMEWISE_SHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(cache, "BLOCK", 4096)
    monkeypatch.setattr(cache, "_CHECKED", set())
    monkeypatch.setattr(stores, "time", SimpleNamespace(sleep=lambda seconds: None))
    with serve(tmp_path / "s3", monkeypatch) as served:
        yield served


def images(root: object, split: str = "train") -> ShardImages:
    return ShardImages(root=str(root), split=split, shares={}, mode="gray")  # type: ignore[arg-type]


def forget(tmp_path: Path) -> None:
    """Be another machine, which has read nothing yet."""
    shutil.rmtree(tmp_path / "cache")
    cache._CHECKED.clear()


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_samples_from_a_faulty_store_are_those_on_the_disk_and_the_second_machine_does_not_index(
    written: Path, store: Store, tmp_path: Path, kind: str
) -> None:
    store.fail_one_in_ten()
    disk, order = images(written / kind), list(range(130))
    random.Random(0).shuffle(order)
    for machine in range(2):
        remote, before = images(f"s3://bucket/{kind}"), len(store.gets(kind))
        assert remote.fingerprint() == disk.fingerprint()
        assert not machine or before == len(store.gets(kind))
        for place in order:
            assert torch.equal(remote[place]["image"], disk[place]["image"])
            assert remote[place]["label"] == disk[place]["label"]
        forget(tmp_path)
    faults = {store.fault(number, "", "") for number in range(len(store.requests))}
    assert {"500", "closed", "half", "slow"} <= faults


def test_a_block_with_other_bytes_is_fetched_again_and_in_the_end_refused(store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = images(ROOT)
    sample = data[0]["image"]
    for block in (tmp_path / "cache" / "blocks").iterdir():
        block.write_bytes(block.read_bytes()[:-1] + b"?")
    cache._CHECKED.clear()
    assert torch.equal(data[0]["image"], sample)
    for fault, words, kind in (
        ("other", "bytes 0 to 4,096 are others than when it was indexed", DataError),
        ("short", "the store gives 2,048 of 4,096 bytes", DataError),
        ("500", "internal error; hint: when the store answers, run the same command again to resume", TrainingError),
    ):
        forget(tmp_path)
        failing = len(store.requests) + 2
        store.fault = lambda number, method, key, fault=fault, failing=failing: fault if number < failing else ""
        assert torch.equal(data[0]["image"], sample)
        forget(tmp_path)
        store.fault = lambda number, method, key, fault=fault: fault
        keyed = KeyedDataset(data, default_collate, seed=0, stream="sample")
        for workers in (0, 1):
            with pytest.raises(kind, match=rf"^{ROOT}/train/0000\.tar: cannot be read, after 6 tries: .*{words}"):
                [*Loader(keyed, lambda: iter([Key(0, 0, (0,))]), schema.Loader(num_workers=workers))]


def test_a_store_that_does_not_answer_is_given_up(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(ROOT)
    forget(tmp_path)
    monkeypatch.setattr(stores, "LIMIT_S", 0.2)
    store.fault = lambda number, method, key: "never"
    with pytest.raises(TrainingError, match=r"0000\.tar: cannot be read, after 6 tries: gives no answer in 0 s"):
        data[0]


@pytest.mark.slow
def test_a_changed_shard_is_noticed_by_its_size_and_etag(store: Store, samewise: Callable[..., Any]) -> None:
    folder, root = store.folder / "bucket" / "tar" / "train", f"{ROOT}/train"
    open_index(root, "label")
    shard = folder / "0020.tar"
    shard.write_bytes(shard.read_bytes().replace(b"IDAT", b"iDAT", 1))
    with pytest.raises(DataError, match=r"s3://bucket/tar/train/0020\.tar: has other content than when it was indexed"):
        open_index(root, "label")
    (folder / "0000.tar").unlink()
    errors = samewise("data", "verify", root, code=2).stderr
    assert f"{root}/0020.tar: has other content than" in errors
    assert f"{root}/0000.tar: is missing, but was there" in errors
    assert "samples in 6 shards" in samewise("data", "index", root, code=0).stdout
    samewise("data", "verify", root, code=0)


def test_what_cannot_be_written_or_found_is_said(store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    store.is_writable = False
    index = open_index(f"{ROOT}/valid", "label")
    assert len(index.samples) == 30
    assert "the index is not written to s3://bucket/tar/valid/.samewise/label: Access Denied" in capfd.readouterr().err
    assert index.place == open_index(f"{ROOT}/valid", "label", accepts_changes=True).place == str(index.path)
    store.is_writable = True
    for writes in (2, 0):
        before = len(store.requests)
        assert open_index(f"{ROOT}/valid", "label", accepts_changes=True).place == f"{ROOT}/valid/.samewise/label.index"
        assert [x[0] for x in store.requests[before:]].count("PUT") == writes
    with pytest.raises(DataError, match=r"^s3://bucket/none: cannot be read: there is no such bucket, folder or file$"):
        images("s3://bucket/none")
    monkeypatch.setenv("AWS_PROFILE", "none")
    S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match=r"^s3://bucket/tar: cannot be read: The config profile \(none\) could not be found$"):
        images(ROOT)
    with pytest.raises(ConfigError, match="none://bucket: Protocol not known: none"):
        images("none://bucket")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"Install s3fs to access S3; hint: pip install '\.\[s3\]'"):
        images("s3a://bucket")


def read_at_random(data: ShardImages, seed: int) -> None:
    draw = random.Random(seed)
    while True:
        assert len(data.content(draw.randrange(130))[0])


@pytest.mark.slow
def test_processes_that_are_killed_keep_the_cache_within_its_bound(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "limit", lambda: 12 * cache.BLOCK)
    data, blocks, most = images(ROOT), tmp_path / "cache" / "blocks", 0
    fork = multiprocessing.get_context("fork")
    readers = [fork.Process(target=read_at_random, args=(data, seed)) for seed in range(3)]
    for reader in readers:
        reader.start()
    end = time.monotonic() + 60
    for seed in range(3, 7):
        before = len(store.requests)
        while len(store.requests) < before + 15:
            assert time.monotonic() < end
            most = max(most, len(os.listdir(blocks)))
        victim = readers.pop(0)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        readers.append(fork.Process(target=read_at_random, args=(data, seed)))
        readers[-1].start()
    for reader in readers:
        assert reader.is_alive()
        reader.kill()
        reader.join()
    assert 6 < most <= 12
    assert all(block.stat().st_size <= cache.BLOCK for block in blocks.iterdir())
    assert len(data[7]["image"])


def small_blocks(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache" / "blocks").glob("*")}


@pytest.mark.parametrize(("kind", "workers"), [("tar", 0), ("parquet", 2)])
def test_what_comes_next_is_read_before_it_is_needed(store: Store, tmp_path: Path, kind: str, workers: int) -> None:
    data = ShardImages(root=f"s3://bucket/{kind}", split="train", shares={}, mode="gray", window=100)
    keyed = KeyedDataset(data, default_collate, seed=0, stream="sample")
    forget(tmp_path)
    assert sum(len(data.content(place)[0]) for place in range(130))
    needed = small_blocks(tmp_path)
    forget(tmp_path)
    keys = [Key(epoch, start, tuple(range(start, start + 10))) for epoch in range(3) for start in range(0, 130, 10)]
    batches = iter(Loader(keyed, lambda: iter(keys), schema.Loader(num_workers=workers)))
    first, end = next(batches), time.monotonic() + 30
    assert torch.equal(first["image"][3], data[3]["image"])
    while small_blocks(tmp_path) != needed:
        assert time.monotonic() < end
        time.sleep(0.01)
    before = len(store.gets())
    assert sum(len(batch["image"]) for batch in batches) == 380
    assert len(store.gets()) == before
    # Less where the threads have not yet seen that the last batches' bytes are there
    assert 0 < keyed.read_ahead <= keyed.distance == 14


def test_reading_ahead_tries_once_and_keeps_nobody_waiting(store: Store, tmp_path: Path) -> None:
    data = images(ROOT)
    forget(tmp_path)
    store.fault = lambda number, method, key: "500"
    before, end = len(store.gets()), time.monotonic() + 30
    data.prefetch([0])
    while len(store.gets()) == before:
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(TrainingError, match="after 6 tries"):
        data[0]
    assert len(store.gets()) == before + 1 + 6


def test_a_rank_of_two_reads_about_half_of_the_bytes(store: Store, tmp_path: Path) -> None:
    data = ShardImages(root=ROOT, split="train", shares={}, mode="gray", window=1)
    order, plan = ByReplica(data, seed=0, batch_size=20, replicas=2), Plan(samples=130, batch_size=20, micro_batches=2, drop_last=True)
    forget(tmp_path)
    before = store.served
    assert sum(len(data.content(place)[0]) for place in range(130))
    every = store.served - before
    for rank in range(2):
        forget(tmp_path)
        before = store.served
        keyed = KeyedDataset(data, default_collate, seed=0, stream="sample")
        assert len([*Loader(keyed, partial(training_keys, order, plan, first_step=0, steps=6, micro_batches=[rank]))]) == 6
        assert 0.4 < (store.served - before) / every < 0.65


@pytest.mark.slow
def test_a_training_from_a_faulty_store_killed_twice_has_the_trace_of_one_from_the_disk(
    store: Store, written: Path, tmp_path: Path, samewise: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "BLOCK", 1 << 22)
    shape = ["dataset.channels=1", "dataset.mode=gray", "dataset.mean=[0.5]", "dataset.std=[0.5]", "dataset.window=3"]
    common = ["train", *DIGITS, "model.width=8", "transforms=images", "dataset=shards", *shape, "batch_size=24", "max_steps=18", "checkpoint.every_steps=2"]
    remote, disk = tmp_path / "remote", tmp_path / "disk"
    samewise(*common, f"dataset.root={written / 'tar'}", f"run_root={disk}", code=0)
    store.fail_one_in_ten()
    for workers, step in ((2, 4), (1, 9)):
        process = Forked(*common, f"dataset.root={ROOT}", f"run_root={remote}", f"loader.num_workers={workers}", said=tmp_path / f"said-{workers}")
        wait_for_step(process, remote, step)
        process.kill()
    samewise(*common, f"dataset.root={ROOT}", f"run_root={remote}", "loader.num_workers=0", code=0)
    traces = [next(root.glob("*/*/trace.jsonl")).read_bytes().partition(b"\n")[2] for root in (remote, disk)]
    assert traces[0] == traces[1]
