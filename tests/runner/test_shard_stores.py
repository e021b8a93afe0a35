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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from samewise_datasets_shard_files import rows_of, write
from samewise_s3_server import Store, serve

from samewise.datasets.digits import Digits
from samewise.datasets.shards import ShardImages
from samewise.runner.errors import ConfigError, DataError
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
    for fault, words in (
        ("other", "bytes 0 to 4,096 are others than when it was indexed"),
        ("short", "the store gives 2,048 of 4,096 bytes"),
        ("500", "internal error"),
    ):
        forget(tmp_path)
        failing = len(store.requests) + 2
        store.fault = lambda number, method, key, fault=fault, failing=failing: fault if number < failing else ""
        assert torch.equal(data[0]["image"], sample)
        forget(tmp_path)
        store.fault = lambda number, method, key, fault=fault: fault
        with pytest.raises(DataError, match=rf"^{ROOT}/train/0000\.tar: cannot be read, after 6 tries: .*{words}"):
            data[0]


def test_a_store_that_does_not_answer_is_given_up(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(ROOT)
    forget(tmp_path)
    monkeypatch.setattr(stores, "LIMIT_S", 0.2)
    store.fault = lambda number, method, key: "never"
    with pytest.raises(DataError, match=r"0000\.tar: cannot be read, after 6 tries: gives no answer in 0 s"):
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
    assert len(open_index(f"{ROOT}/valid", "label").samples) == 30
    assert "the index is not written to s3://bucket/tar/valid/.samewise/label: Access Denied" in capfd.readouterr().err
    with pytest.raises(DataError, match="s3://bucket/none: cannot be read, or is damaged: No such file"):
        images("s3://bucket/none")
    with pytest.raises(ConfigError, match="none://bucket: Protocol not known: none"):
        images("none://bucket")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"Install s3fs to access S3; hint: pip install 'samewise\[s3\]'"):
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
