"""Trains a run in pieces of one step, each resumed from disk by the code that a user's command runs, and records everything reachable at every step.

Tests import this as `samewise_runner_resuming`.
"""

import collections
import copy
import dataclasses
import enum
import functools
import json
import os
import random
import shutil
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samewise_runner_jobs as jobs
import torch
import xxhash
from samewise_runner_resuming_space import CONFIGS, TINY
from torch import Tensor

from samewise.runner.config.compose import Composed, compose, dump, parse
from samewise.runner.config.project import Project
from samewise.runner.errors import Interrupted
from samewise.runner.records import checkpoint, environment
from samewise.runner.records.folder import RunFolder
from samewise.runner.training import loop
from samewise.runner.training.build import build
from samewise.runner.training.recorder import Recorder
from samewise.runner.training.run import Run

NEVER = {
    ("Run", "composed"): "what it is made from",
    ("Run", "environment"): "what it is made in",
    ("Run", "guards"): "watch the first steps of each start, and change no number",
    ("Recorder", "require_folder"): "whether the run's folder is still there",
    ("Recorder", "tracker"): "the journal, which is compared as a file",
    ("Recorder", "saved_s"): "a clock",
    ("Progress", "earlier_s"): "a clock",
    ("Progress", "_started"): "a clock",
    ("Trace", "_file"): "a file",
    ("Trace", "_lines"): "what is soon written into the file",
    ("Trace", "_write_at"): "a clock",
    ("Order", "_held"): "the indices of the epoch asked for last, which are a function of it",
    ("KeyedDataset", "must_repeat"): "false once the first samples were made again; what is made does not depend on it",
    ("Trace", "_last"): "the newest line, for who asks after a step that has one",
    ("Optimizer", "defaults"): "read while parameter groups are made; torch adds what older checkpoints lack",
    ("Checkpoints", "_written"): "writes beside training",
    ("Processes", "doing"): "words for a message",
    ("DistributedDataParallel", "_has_rebuilt_buckets"): "DDP arranges its buckets anew after the first step, which is why it promises R0",
    ("Pipeline", "_schedules"): "schedules by the shapes that they are for, each made when the first such batch comes",
    **{
        ("ZeroRedundancyOptimizer", f"_{name}_cache"): "made at its first use"
        for name in ("param_to_index", "index_to_param", "param_to_rank", "partition_parameters")
    },
    ("ZeroRedundancyOptimizer", "state"): "torch leaves there what it has loaded; its `optim` has the state",
    ("ZeroRedundancyOptimizer", "_all_state_dicts"): "gathered for the last checkpoint",
    ("Peers", "stop_heard"): "how these tests stop a run",
    ("Peers", "stop_agreed"): "how these tests stop a run",
    ("TimeLimit", "_start"): "a clock",
    ("Throughput", "_start"): "a clock",
    ("ProgressBar", "_start"): "a clock",
    ("ProgressBar", "_last_draw"): "a clock",
    ("ProgressBar", "_wait_s"): "a clock",
    ("Throughput", "_steps"): "steps since the clock was read",
    ("Throughput", "_samples"): "of these steps",
    ("GradScaler", "_init_scale"): "read only while there is no _scale, whose value state_dict() gives",
    ("GradScaler", "_init_growth_tracker"): "read only while there is no _growth_tracker, whose value state_dict() gives",
}
"""What is not compared, with the reason."""
AFTER_A_STEP = {
    ("TorchSchedule", "_running"): "torch's scheduler, run on from the beginning to the time that it is asked for",
    ("Sequential", "_active"): "set by each step, and saved where a part listens to evaluations",
    ("Optimizer", "_need_device_dtype_check_for_fused"): "the check is made before the first step",
    ("RetinaNet", "_weights_are_known"): "the check is made in the first step",
    ("Bucket", "_free"): "memory to write into",
    ("Bucket", "_in_use"): "memory to write into",
    ("DistributedDataParallel", "_lazy_init_ran"): "what DDP leaves to its first step",
    ("StageModule", "strides"): "those of a step's inputs, which come with them",
    ("StageModule", "calls"): "a step's inputs",
    ("Replicas", "_waiting"): "set before each step's last backward pass",
    ("TreeExchange", "_received"): "memory to write into",
    ("GradScaler", "_scale"): "made at the first step from _init_scale; state_dict() gives its value",
    ("GradScaler", "_growth_tracker"): "made at the first step from _init_growth_tracker; state_dict() gives its value",
}
"""What a resumed run may lack before its first step, and has after it."""
AFTER_AN_EVALUATION = {("Recorder", "scores"): "for the pictures at the end, for which they are made again", ("Split", "loader"): "made at its first use"}
"""What a resumed run may lack before its first evaluation, and has after it."""
SKIPPED = {"begins": {**NEVER, **AFTER_A_STEP, **AFTER_AN_EVALUATION}, "stepped": {**NEVER, **AFTER_AN_EVALUATION}, "evaluated": NEVER}


class Killed(BaseException):
    """Ends a run immediately: what it has not saved is lost."""


Paths = dict[str, Any]
Moment = tuple[str, int]
Note = Callable[[Moment, Paths], None]


@contextmanager
def watched(note: Note, *, before_step: Callable[[Run], None] = lambda run: None, skipped: Mapping[tuple[str, str], str] = {}) -> Iterator[None]:
    """Within it `note` receives everything reachable before each step (including the step's inputs), after it, and after each evaluation."""
    train_step, evaluate, record = loop.train_step, loop.evaluate, Recorder.record
    current = list[Run]()

    def all_of(run: Run, moment: str, **further: Any) -> None:
        if moment != "begins" and run.strategy.micro_batches:  # every forward pass begins by seeding them, including those that a process runs for others
            further["generators"] = _generators()
        everything = {"model": run.model, "strategy": run.strategy, "run": run, "switches": _switches(), **further}
        if "samewise-check-" not in str(run.folder.path):  # otherwise it is the trial step of a check
            note((moment, run.step), reachable(everything, skipped={**SKIPPED[moment], **skipped}))

    def noted_step(run: Run, micro_batches: Any, *meanwhile: Callable[[], None]) -> Any:
        current[:] = [run]
        all_of(run, "begins", given=micro_batches)
        before_step(run)
        return train_step(run, micro_batches, *meanwhile)

    def noted_record(recorder: Recorder, outcome: Any) -> None:
        record(recorder, outcome)
        all_of(current[0], "stepped", outcome=outcome)

    def noted_evaluate(run: Run) -> None:
        evaluate(run)
        all_of(run, "evaluated")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", noted_step)
        patch.setattr(loop, "evaluate", noted_evaluate)
        patch.setattr(Recorder, "record", noted_record)
        yield


def _generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.default_generator.get_state(), "cuda": cuda}


def _switches() -> dict[str, Any]:
    backends = torch.backends
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "mkldnn": backends.mkldnn.enabled,
        "cudnn": [backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32],
        "grad": torch.is_grad_enabled(),
    }


@dataclass
class Seen:
    """What was reachable in a run at each moment, and what the run left on disk."""

    moments: dict[Moment, Paths] = field(default_factory=dict)
    left: Paths = field(default_factory=dict)
    pieces: int = 0


def composed(*overrides: str) -> Composed:
    """A config with all references resolved, like the file that a run keeps: otherwise each of many builds would resolve them again."""
    return parse(dump(compose(overrides, project=Project(Path.cwd(), configs=(CONFIGS,)))))


def at_once(run: Run) -> None:
    """Does not stop the run."""


def stopped(run: Run) -> None:
    """Asks the run to stop, as a scheduler's signal does: it finishes the next step, and saves."""
    run.strategy.peers.ask_stop("SIGTERM")


def trained(
    config: Composed, folder: Path, *, before_step: Callable[[Run], None] = at_once, prepare: Callable[[Run], None] = at_once, most: int | None = None
) -> Seen:
    """Train to the end, in pieces if something stops the run, each built again and restored from disk.

    Args:
        config: What to train, from `composed`.
        folder: Where to keep the run.
        before_step: Called before each step; may stop the run, or raise `Killed`.
        prepare: Called with each run that is built.
        most: The largest number of pieces.
    """
    seen = Seen()

    def note(moment: Moment, paths: Paths) -> None:
        seen.moments[moment] = paths

    with watched(note, before_step=before_step), pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "git_state", functools.cache(environment.git_state))
        while seen.pieces != most:
            seen.pieces += 1
            run = build(config, Project(Path.cwd()), RunFolder(folder))
            prepare(run)
            patch.setattr(type(run.recipe.scores(run.splits["valid"].dataset)), "save_pictures", _save_scores)
            try:
                loop.fit(run)
            except (Interrupted, Killed):
                continue
            seen.left = left(folder)
            break
    return seen


def _save_scores(scores: Any, folder: Path) -> None:
    """Write everything that pictures could show: drawing them takes longer than the run."""
    (folder / "scores.txt").write_text("\n".join(f"{path}: {value}" for path, value in reachable(scores).items()))


def left(folder: Path) -> Paths:
    """What a run has left on disk, without clocks: trace, journal, summary, checkpoints by name, the last one's content, and artifacts."""
    summary = json.loads((folder / "summary.json").read_text())
    journal = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["step"], {key: value for key, value in line["metrics"].items() if not key.startswith("speed/")}) for line in journal if "metrics" in line]
    checkpoints = folder / "checkpoints"
    state = checkpoint.load(checkpoints / "latest")
    clocks = ("timings", "checkpoints_sha256")  # a checkpoint holds seconds
    return reachable(
        {
            "trace": [path.read_bytes() for path in folder.glob("trace.jsonl")],
            "journal": [point for point in logged if point[1]],
            "summary": {key: value for key, value in summary.items() if key not in clocks},
            "checkpoints": sorted((path.name, path.resolve().name) for path in checkpoints.iterdir()),
            "last": {key: value for key, value in state.items() if key != "seconds"},
            "artifacts": {str(path.relative_to(folder)): path.read_bytes() for path in sorted((folder / "artifacts").rglob("*")) if path.is_file()},
        }
    )


def watch_rank(file: str) -> None:
    """In a rank's process: write everything reachable at each moment to the rank's own file."""
    handle = open(f"{file}-{os.environ['RANK']}.jsonl", "w")  # noqa: SIM115 (for as long as the process lives)

    def note(moment: Moment, paths: Paths) -> None:
        handle.write(json.dumps([moment, {path: repr(value) for path, value in paths.items()}]) + "\n")
        handle.flush()

    _FOR_GOOD.enter_context(watched(note))


_FOR_GOOD = ExitStack()


def on_ranks(run_root: Path, ranks: int, *overrides: str) -> list[Seen]:
    """Train to the end on this many processes; returns what each of them saw."""
    helpers = Path(__file__).parents[1] / "helpers.py"
    before = f"import runpy; runpy.run_path({str(helpers)!r}); import samewise_runner_resuming; samewise_runner_resuming.watch_rank({str(run_root / 'seen')!r})"
    job = jobs.Job(run_root, ranks, f"--config-dir={CONFIGS}", *overrides, experiment=TINY, before=before)
    codes = job.wait()
    assert codes == [0] * ranks, f"{codes} {job.errors} {job.output}"
    lines = [[json.loads(line) for line in (run_root / f"seen-{rank}.jsonl").read_text().splitlines()] for rank in range(ranks)]
    return [Seen({(name, step): paths for (name, step), paths in seen}) for seen in lines]


def cut(folder: Path, target: Path, *, after: int) -> Path:
    """A copy of a run as if it had been killed when the checkpoint of that step was its newest complete one."""
    shutil.copytree(folder, target, symlinks=True)
    for one in checkpoint.list_checkpoints(target / "checkpoints"):
        if one.step > after:
            shutil.rmtree(one.path)
    (target / "summary.json").unlink()
    shutil.rmtree(target / "artifacts")
    return target


def first_difference(whole: Seen, pieces: Seen, *, without: Sequence[str] = ()) -> str | None:
    """The first moment and path at which they differ, in the order of training; None if they agree from the beginning of the pieces to their end.

    Args:
        whole: What was seen of a run that was not stopped.
        pieces: What was seen of the same run when it was.
        without: Beginnings of paths that are not compared.
    """
    expected, found = list(whole.moments), list(pieces.moments)
    start = expected.index(found[0]) if found else 0
    if expected[start : start + len(found)] != found:
        return f"moments: {expected} and {found}"
    for moment, paths in pieces.moments.items():
        one, other = ({path: value for path, value in some.items() if not path.startswith(tuple(without))} for some in (whole.moments[moment], paths))
        if apart := difference(one, other):
            return f"{moment[0]} at step {moment[1]}: {apart}"
    apart = difference(whole.left, pieces.left) if pieces.left else None
    return f"left on disk: {apart}" if apart else None


PLAIN = (type(None), bool, int, str, bytes, complex, range, slice, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, type(Ellipsis))
ITERATORS = (type(iter(())), type(iter([])), type(iter(range(0))))
"""Iterators that can be copied, so that reading them does not consume them."""
OPAQUE = {
    "Lock": "guards, holds nothing",
    "RLock": "guards, holds nothing",
    "Thread": "writes a checkpoint beside training",
    "lock": "guards, holds nothing",
    "DictConfig": "the config: what a run is made from",
    "ListConfig": "the config: what a run is made from",
    "Console": "a terminal",
    "RemovableHandle": "takes a hook away",
    "weakref": "leads to what is reached by another way",
    "ReferenceType": "leads to what is reached by another way",
    "ProcessGroup": "a connection",
    "Reducer": "DDP's, in C++: what it holds shows in the next step's bits",
    "Logger": "DDP's statistics",
    "Store": "a connection",
    "FSDPState": "fully sharded data parallelism's, in which weights are gathered: the shards are the model's parameters",
    "FSDPParam": "the same",
    "FSDPParamGroup": "the same",
    "View": "shows the run, which is reached by itself",
    "PyRRef": "lives in another process, which sees it itself",
}
"""Classes that are not inspected, by name, with the reason."""


def reachable(root: Any, *, skipped: Mapping[tuple[str, str], str] = {}) -> Paths:
    """The value at each path from `root`.

    Args:
        root: The object to start from.
        skipped: (class, attribute) to the reason why it is not followed; the class may be a base of the object's.
    """
    return _Walk(skipped).all(root)


def difference(one: Paths, other: Paths) -> str | None:
    """The first path at which they differ, with both values; None if they agree."""
    for path in [*one, *(path for path in other if path not in one)]:
        first, second = one.get(path, "nothing"), other.get(path, "nothing")
        if first != second:
            return f"{path}: {first} and {second}"
    return None


def of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's kind, dtype, shape, strides and device, whether it takes gradients, and a digest of its bytes."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # a copy, because fully sharded data parallelism resizes storages, which torch refuses while NumPy shares them
    missing = local.is_meta or not local.numel() or not local.untyped_storage().nbytes()  # the last case: freed until it is gathered again
    data = b"" if missing else local.detach().cpu().flatten().clone().view(torch.uint8).numpy()
    kind = type(tensor).__name__, str(tensor.dtype), list(tensor.shape), list(local.stride()), str(tensor.device), tensor.requires_grad
    return (*kind, xxhash.xxh3_64_hexdigest(data))


class _Walk:
    def __init__(self, skipped: Mapping[tuple[str, str], str]) -> None:
        self._skipped = skipped
        self._found: Paths = {}
        self._seen: dict[int, tuple[str, Any]] = {}  # by id; the object is kept alive, so that its id is not reused
        self._storages: dict[int, str] = {}

    def all(self, root: Any) -> Paths:
        waiting = [("", root)]  # in the order of the attributes, and without recursion: a model may be deep
        while waiting:
            path, value = waiting.pop()
            waiting.extend((f"{path}{step}", inner) for step, inner in reversed(list(self._visit(path, value))))
        return self._found

    def _visit(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record the value at a path; yields what it leads to."""
        if isinstance(value, PLAIN):
            self._found[path] = value
        elif isinstance(value, float | np.generic):
            self._found[path] = float(value).hex()  # nan is nan, and -0.0 is not 0.0
        elif isinstance(value, enum.Enum | Path | type | types.ModuleType):
            self._found[path] = type(value).__name__ if isinstance(value, Path) else str(value)
        elif id(value) in self._seen and not isinstance(value, tuple):  # for immutable values it does not matter whether they appear twice
            self._found[path] = f"the same as {self._seen[id(value)][0]}"
        else:
            self._seen[id(value)] = path, value
            yield from self._into(path, value)

    def _into(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Tensor):
            self._tensor(path, value)
            yield from ((f".{name}", inner) for name, inner in vars(value).items() if self._wanted(value, name))
        elif isinstance(value, ITERATORS):
            yield ".rest", list(copy.copy(value))
        elif isinstance(value, torch.Generator | np.random.RandomState):
            yield ".get_state()", value.get_state()
        elif isinstance(value, random.Random):
            yield ".getstate()", value.getstate()
        elif isinstance(value, np.random.Generator):
            yield ".bit_generator.state", value.bit_generator.state
        elif isinstance(value, np.ndarray):
            self._found[path] = str(value.dtype), value.shape, value.strides, xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Mapping) and type(value).__name__ not in OPAQUE:
            self._found[path] = type(value).__name__
            yield from self._items(value)
        elif isinstance(value, set | frozenset):
            self._found[path] = sorted(map(str, value))
        elif isinstance(value, Sequence | collections.deque) and type(value).__name__ not in OPAQUE:
            self._found[path] = type(value).__name__, len(value)
            yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
        elif isinstance(value, functools.partial):
            yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        elif isinstance(value, types.FunctionType):
            self._found[path] = f"{value.__module__}.{value.__qualname__}"
            yield from self._closure(value)
        elif isinstance(value, types.MethodType):
            yield ".__func__", value.__func__
            yield ".__self__", value.__self__
        else:
            self._found[path] = type(value).__qualname__
            yield from self._attributes(path, value)

    def _tensor(self, path: str, tensor: Tensor) -> None:
        self._found[path] = of_tensor(tensor)
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.numel() and (owner := self._storages.setdefault(local.untyped_storage().data_ptr(), path)) != path:
            self._found[f"{path}.storage"] = f"that of {owner}"

    def _items(self, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        """An object used as a key is named by the path where it was first found; ids of hooks, which keep increasing, are replaced by positions."""
        hooks = isinstance(mapping, collections.OrderedDict) and bool(mapping) and all(isinstance(key, int) for key in mapping)
        for number, (key, inner) in enumerate(list(mapping.items())):
            known = self._seen.get(id(key))
            named = number if hooks else f"<{known[0]}>" if known else repr(key) if isinstance(key, str | int | tuple) else f"key {number}"
            yield f"[{named}]", inner

    def _closure(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield f".<{name}>", cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from ((f".{name}", inner) for name in ("__defaults__", "__kwdefaults__", "__dict__") if (inner := getattr(function, name)))

    def _attributes(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        kinds = {kind.__name__ for kind in type(value).__mro__}
        if kinds & OPAQUE.keys():
            return
        if "GradScaler" in kinds:  # its tensors are created at the first step, and none is needed before that
            yield ".state_dict()", value.state_dict()
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        held = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__")}}
        builtin = isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType | types.GetSetDescriptorType)
        if not held and not builtin and not hasattr(value, "__dict__") and not dataclasses.is_dataclass(value):
            raise AssertionError(f"{path} is a {type(value).__qualname__}, which cannot be looked into: name it in OPAQUE, with the reason")
        yield from ((f".{name}", inner) for name, inner in held.items() if name != "__annotations__" and self._wanted(value, name))

    def _wanted(self, owner: Any, name: str) -> bool:
        return not any((kind.__name__, name) in self._skipped for kind in type(owner).__mro__)


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)
