"""What is loaded depends on the key alone, not on who loads it."""

from __future__ import annotations

import importlib
import multiprocessing
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from samewise.recipes.classification import Classification
from samewise.runner.config import schema
from samewise.runner.data import streams
from samewise.runner.data.dataset import WithTransform
from samewise.runner.data.device import map_tensors
from samewise.runner.data.keyed import Key, KeyedDataset
from samewise.runner.data.loading import Loader
from samewise.runner.errors import ConfigError, DataError, Problem
from samewise.runner.records.digest import value_digest
from samewise.runner.training.step_errors import killed_worker


class Noisy:
    """Draws from all three generators for each sample, as careless data sets do."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 63:
            raise DataError(Problem("sample 63", "is broken"))
        return {"value": torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item(), torch.get_num_threads()], dtype=torch.float64)}


def batches(num_workers: int, *, keys=None, seed: int = 0) -> list[int]:
    wanted = keys or [Key(epoch, start, tuple(range(start, start + 8))) for epoch in range(2) for start in range(0, 48, 8)]
    loader = Loader(KeyedDataset(Noisy(), default_collate, seed=seed, stream="sample"), lambda: iter(wanted), schema.Loader(num_workers=num_workers))
    return [value_digest(batch) for batch in loader]


def test_any_number_of_workers_gives_the_same_batches():
    alone = batches(0)
    assert len(set(alone)) == 12
    assert batches(1) == alone
    assert batches(3) == alone


class OneFile:
    """Numbers in a file that is kept open; each is read a byte at a time, with pauses in which another reader of the same position would move it."""

    def __init__(self, path):
        self.file = path.open("rb", buffering=0)

    def __len__(self):
        return 200

    def __getitem__(self, index):
        self.file.seek(8 * index)
        read = b""
        for _ in range(8):
            read += self.file.read(1)
            time.sleep(0)
        return {"x": torch.tensor(int.from_bytes(read, "little"))}


def test_each_worker_has_its_own_position_in_a_file_that_the_data_set_keeps_open(tmp_path):
    (tmp_path / "numbers").write_bytes(b"".join((index * 0x0101010101).to_bytes(8, "little") for index in range(200)))
    keyed = KeyedDataset(OneFile(tmp_path / "numbers"), default_collate, seed=0, stream="sample")
    for workers in (0, 3):
        keys = [Key(0, start, tuple(range(start, start + 5))) for start in range(0, 200, 5)]
        batches = Loader(keyed, lambda keys=keys: iter(keys), schema.Loader(num_workers=workers))
        assert [number for batch in batches for number in batch["x"].tolist()] == [index * 0x0101010101 for index in range(200)]


@pytest.mark.parametrize("image", [torch.zeros(3, 8, 12, dtype=torch.uint8), Image.new("RGB", (12, 8))])
def test_a_transform_of_samples_that_would_leave_a_mask_behind_is_refused(image):
    mask, flips = torch.zeros(8, 12), [v2.RandomHorizontalFlip(1.0)]
    with pytest.raises(ConfigError, match="RandomHorizontalFlip would move the image but not mask, of the same size"):
        WithTransform([{"image": image, "mask": mask, "label": 1}], flips)[0]
    assert WithTransform([{"image": image, "mask": torch.zeros(4, 6), "label": 1}], flips)[0]["label"] == 1
    assert WithTransform([{"image": image, "mask": mask, "label": 1}], [v2.ToImage()])[0]["mask"] is mask
    mask[:, 0] = 1
    moved = WithTransform([{"image": tv_tensors.Image(torch.zeros(3, 8, 12)), "mask": tv_tensors.Mask(mask)}], flips)[0]
    assert torch.equal(moved["mask"], mask.flip(1))


def test_a_worker_finishes_its_batches_after_sigterm():
    """The main process stops by itself when its step is done, and needs the worker's batches for that."""
    wanted = [Key(0, start, (start,)) for start in range(20)]
    others = multiprocessing.active_children()
    loader = iter(Loader(KeyedDataset(Noisy(), default_collate, seed=0, stream="sample"), lambda: iter(wanted), schema.Loader(num_workers=1)))
    found = [value_digest(next(loader))]
    (worker,) = (child for child in multiprocessing.active_children() if child not in others)
    worker.terminate()
    found += [value_digest(batch) for batch in loader]
    assert found == batches(0, keys=wanted)
    worker.join(20)
    assert worker.exitcode == 0


def with_a_worker() -> tuple[Loader, Iterator[Any], Any]:
    others = multiprocessing.active_children()
    keys = [Key(0, start, (start,)) for start in range(20)]
    loader = Loader(KeyedDataset(Noisy(), default_collate, seed=0, stream="sample"), lambda: iter(keys), schema.Loader(num_workers=1), persistent=True)
    batches = iter(loader)
    next(batches)
    (worker,) = (child for child in multiprocessing.active_children() if child not in others)
    return loader, batches, worker


def kill_and_continue(worker: Any, batches: Iterator[Any]) -> None:
    worker.kill()  # torch's handler may raise its error at once
    list(batches)


def test_a_killed_worker_is_named_with_the_likely_cause() -> None:
    _, batches, worker = with_a_worker()
    with pytest.raises(RuntimeError) as caught:
        kill_and_continue(worker, batches)
    problem = killed_worker(caught.value)
    assert problem is not None
    assert problem.path == "loader.num_workers"
    assert problem.message.startswith(f"worker process {worker.pid} ")
    assert problem.message.endswith("the kernel, or a user, ended it")
    assert killed_worker(RuntimeError("the model has a DataLoader worker")) is None


def test_a_worker_killed_while_it_sends_a_batch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, batches, worker = with_a_worker()
    assert loader._workers is not None
    monkeypatch.setattr(loader._workers._iterator, "_try_get_data", lambda: (_ for _ in ()).throw(ConnectionResetError()))
    with pytest.raises(RuntimeError) as caught:
        kill_and_continue(worker, batches)
    assert killed_worker(caught.value) is not None


def test_shutting_down_does_not_wait_for_a_lock_of_a_killed_worker() -> None:
    loader, batches, worker = with_a_worker()
    assert loader._workers is not None
    with pytest.raises(RuntimeError):
        kill_and_continue(worker, batches)
    loader._workers._iterator._workers_done_event._cond.acquire(block=False)
    loader._workers._iterator._shutdown_workers()


def test_the_main_process_loads_with_one_thread_like_a_worker():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert batches(0) == batches(1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_sample_does_not_depend_on_what_was_loaded_before():
    keys = [Key(0, 8, tuple(range(8, 16)))]
    assert batches(0, keys=keys) == batches(0)[1:2]


def test_another_seed_or_epoch_gives_other_randomness():
    assert not set(batches(0)[:6]) & set(batches(0)[6:])
    assert not set(batches(0)) & set(batches(0, seed=1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_a_sample_arrives_as_it_was_raised(num_workers):
    with pytest.raises(DataError) as caught:
        batches(num_workers, keys=[Key(0, 56, tuple(range(56, 64)))])
    assert str(caught.value) == "sample 63: is broken"


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ([2, 2, None, 2], "fails at sample 12: "),
        ([2, 2, 3, 2], "fails at sample 12 beside sample 10: "),
        ([3, 2, 2, 2], "fails over samples 10, 11, 12, 13: "),
        ([2, 2, "no", 2], "fails at sample 12: TypeError: default_collate: batch must contain tensors"),
        (["no", 2, 2, 2], "fails at sample 10: TypeError: default_collate: batch must contain tensors"),
        (["no", "no", "no", "no"], "fails over samples 10, 11, 12, 13: "),
    ],
)
def test_an_error_names_its_sample_or_the_samples_that_do_not_fit_together(sizes, named):
    class Sized:
        def __getitem__(self, index):
            return None if sizes[index - 10] == "no" else torch.zeros(sizes[index - 10])

    failure = KeyedDataset(Sized(), default_collate, seed=0, stream="sample")[Key(0, 0, (10, 11, 12, 13))]
    assert named in str(failure.problems[0])


class Labelled:
    """Samples with a file, and possibly a wrong label or size."""

    def __init__(self, *, label: dict[int, int] | None = None, height: dict[int, int] | None = None) -> None:
        self.label, self.height = label or {}, height or {}

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"image": torch.zeros(3, self.height.get(index, 4), 4), "label": self.label.get(index, 1)}

    def path(self, index: int) -> Path:
        return Path("cats") / f"{index}.png"


class Together(Labelled):
    """Gives whole batches, which are not collated."""

    def batch(self, indices: tuple[int, ...]) -> dict[str, object]:
        return default_collate([self[index] for index in indices])


@pytest.mark.parametrize("kind", [Labelled, Together])
@pytest.mark.parametrize("transforms", [(), (torch.nn.Identity(),)])
@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"label": {12: 9}}, r"dataset\.train: sample 12 \(cats/12\.png\): the label is out of range: there are 9 classes(.|\n)*value: +9\n"),
        ({"height": {13: 5}}, r"transforms: sample 13 \(cats/13\.png\) beside sample 10 \(cats/10\.png\): the images of a batch differ in size"),
    ],
)
def test_an_error_in_a_batch_names_its_sample_and_file(data, told, transforms, kind):
    if kind is Together and "height" in data:
        pytest.skip("it would have to be of one size")
    dataset, recipe = WithTransform.of(kind(**data), transforms), Classification(num_classes=9)
    keyed = KeyedDataset(dataset, recipe.collate, seed=0, stream="sample", name="dataset.train", require=recipe.require)
    (problem,) = keyed[Key(0, 0, (10, 11, 12, 13))].problems
    assert re.search(told, str(problem)), problem


MANY_CAUSES = (
    """Could not load libtorchcodec. Likely causes:
          1. FFmpeg is not properly installed in your environment.
        The following exceptions were raised as we tried to load libtorchcodec:

[start of libtorchcodec loading traceback]
"""
    + 'FFmpeg version 8:\nTraceback (most recent call last):\n  File "x.py", line 3, in load\n' * 60
)


def test_a_long_library_error_is_cut_to_one_line_with_the_users_line():
    class Spoken:
        def __getitem__(self, index):
            if index:
                return importlib.import_module("json").loads("{")
            raise RuntimeError(MANY_CAUSES)

    dataset = KeyedDataset(Spoken(), default_collate, seed=0, stream="sample")
    said = str(dataset[Key(0, 0, (0,))].problems[0])
    assert "RuntimeError: Could not load libtorchcodec. Likely causes: 1. FFmpeg is not properly installed in your environment.; hint: raised at " in said
    assert "libtorchcodec loading" not in said
    said = str(dataset[Key(0, 0, (1,))].problems[0])
    assert f"raised at {__file__}:" in said
    assert 'in __getitem__: return importlib.import_module("json").loads("{")' in said


def test_creating_a_loader_draws_nothing_from_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    wanted = [Key(0, 0, (0, 1))]
    state = torch.default_generator.get_state()
    iter(Loader(KeyedDataset(Noisy(), default_collate, seed=0, stream="sample"), lambda: iter(wanted), schema.Loader(num_workers=1)))
    assert torch.equal(torch.default_generator.get_state(), state)
    assert torch.rand(()) == expected


class OwnGenerator:
    """Samples that depend on more than their index and the seeded generators, each in its own way."""

    def __init__(self, kind: str) -> None:
        self.kind, self.rng, self.kept, self.last, self.made = kind, np.random.default_rng(0), dict[int, float](), 0.0, list[int]()

    def __getitem__(self, index: int) -> dict[str, float]:
        self.made.append(index)
        return {"index": index, "value": getattr(self, self.kind)(index)}

    def own(self, index: int) -> float:
        return self.rng.random()

    def unseeded(self, index: int) -> float:
        return np.random.default_rng().random() if index == 13 else 0.0

    def cached(self, index: int) -> float:
        return self.kept[index] if index in self.kept else self.kept.setdefault(index, torch.rand(()).item())

    def neighbour(self, index: int) -> float:
        before, self.last = self.last, float(index)
        return before if index == 13 else 0.0

    def once(self, index: int) -> float:
        if len(self.made) == 13:
            raise OSError("the network is gone")
        return 0.0

    def slow(self, index: int) -> float:
        return 0.0

    def default(self, index: int) -> float:
        return torch.rand((), generator=torch.random.default_generator).item()

    def sound(self, index: int) -> float:
        if not self.kept:
            self.kept[-1] = random.random()  # prepared once, and without effect
        return torch.rand(()).item() + index


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("own", "sample 10, value differs"),
        ("unseeded", "sample 13, value differs"),
        ("cached", "sample 11, in the random numbers that it draws, differs"),
        ("neighbour", "sample 13, value differs"),
        ("once", "fails at sample 13: OSError: the network is gone"),
        ("slow", None),
        ("default", None),
        ("sound", None),
    ],
)
def test_the_first_samples_are_made_again_and_must_be_the_same(kind, named, monkeypatch):
    monkeypatch.setattr("samewise.runner.data.keyed._REPEATING_S", 0.0 if kind == "slow" else 1000.0)
    dataset = OwnGenerator(kind)
    keyed = KeyedDataset(dataset, default_collate, seed=0, stream="sample", name="dataset.train")
    keyed.must_repeat = True
    batch = keyed[Key(0, 0, tuple(range(10, 30)))]
    assert [named in problem.message for problem in batch.problems] == [True] if named else isinstance(batch, dict), batch
    made, those = {"slow": 2, "once": 13}.get(kind, 16), range(10, 11 if kind == "slow" else 18)
    assert dataset.made[:made] == [*those, *reversed(those)][:made]
    dataset.made.clear()
    keyed[Key(0, 20, (40, 41))]
    assert dataset.made == [40, 41] or named


class Batches(Noisy):
    """Makes whole batches, with noise."""

    def batch(self, indices):
        return {"value": torch.tensor(indices) + torch.rand(len(indices)) + random.random() + np.random.rand()}


def test_a_batch_that_a_data_set_makes_itself_is_keyed_by_its_first_sample():
    keyed = KeyedDataset(Batches(), default_collate, seed=3, stream="sample")
    keyed.must_repeat = True
    keys = [Key(1, start, (start + 2, start + 1)) for start in range(0, 20, 2)]
    found = {}
    for workers in (0, 1, 3):
        found[workers] = [value_digest(batch) for batch in Loader(keyed, lambda: iter(keys), schema.Loader(num_workers=workers))]
    assert found[0] == found[1] == found[3]
    assert [value_digest(keyed[key]) for key in reversed(keys)] == found[0][::-1]
    streams.enter(3, "sample", 1, 4, 6)
    assert value_digest(Batches().batch(keys[2].indices)) == found[0][2]


def test_only_a_method_batch_that_takes_indices_makes_batches():
    class Attribute(Noisy):
        batch = 16

    class Other(Noisy):
        def batch(self, size, shuffle):
            return []

    class Failing(Noisy):
        def batch(self, indices):
            return {"value": self.missing[list(indices)]}

    assert len(KeyedDataset(Attribute(), default_collate, seed=0, stream="sample")[Key(0, 0, (1, 2))]["value"]) == 2
    with pytest.raises(ConfigError, match=r"dataset\.train: Other\.batch cannot be called with indices alone: .*'shuffle'; hint: give it another name"):
        KeyedDataset(Other(), default_collate, seed=0, stream="sample", name="dataset.train")
    (problem,) = KeyedDataset(Failing(), default_collate, seed=0, stream="sample")[Key(0, 0, (1, 2))].problems
    assert re.match(r"Failing fails in batch\(indices\), for samples 1, 2: AttributeError: .*'missing'", problem.message)


class Named(NamedTuple):
    x: torch.Tensor
    y: list[torch.Tensor]


def test_the_tensors_of_a_batch_are_found_in_lists_tuples_dicts_and_namedtuples() -> None:
    one = torch.zeros(2)
    found = map_tensors(lambda tensor: tensor + 1, {"a": Named(one, [one]), "b": (one, "text")})
    assert isinstance(found["a"], Named)
    assert [*found["a"].x, *found["a"].y[0], *found["b"][0]] == [1.0] * 6
    assert found["b"][1] == "text"
