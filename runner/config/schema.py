"""The runner's own settings, typed: Hydra checks them when it composes.

`check` checks components (models, data sets, optimizers).

Each field's docstring is its meaning in `show --meanings` and the reference. Imports neither torch
nor mlflow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

SPLITS = ("train", "valid", "test")
"""The splits of a data set; the last is optional."""

SOURCES = ("initialise.weights", "distil.weights", "resume_from")
"""The settings that name files of weights, by whose content an experiment is known."""


def splits_in(dataset: Mapping[str, Any]) -> list[str]:
    """Return the splits of a config's `dataset`: usual ones, then those such as `valid_NAME`.

    Of the latter only components count, since `valid_folder` is a setting of some data sets.
    """
    further = [
        name
        for name in dataset
        if name.startswith(tuple(f"{split}_" for split in SPLITS))
        and isinstance(value := dataset.get(name), Mapping)
        and "_target_" in value
    ]
    return [*(name for name in SPLITS if dataset.get(name) is not None), *further]


class Device(StrEnum):
    """The device to compute on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Mode(StrEnum):
    """Better direction of a metric."""

    min = "min"
    max = "max"


class MemoryFormat(StrEnum):
    """The memory layout of images and convolution weights."""

    contiguous = "contiguous"
    channels_last = "channels_last"


class CompileMode(StrEnum):
    """Mode of torch.compile."""

    off = "off"
    default = "default"
    max = "max"


@dataclass
class Compile:
    """Settings of torch.compile for the training step. Evaluations run the uncompiled model."""

    mode: CompileMode = CompileMode.off
    """off, default, or max: search for the fastest kernels. Compiling changes the bits, so it is
    part of the experiment."""
    cuda_graphs: bool = False
    """Record a compiled forward and backward pass as CUDA graphs and replay them; on CUDA only,
    with one micro-batch per step."""
    max_graphs: int = 8
    """How many graphs may be compiled, one for each shape of the model's input; one more is an
    error."""


@dataclass
class Loader:
    """Settings of loading. Only `shuffle`, `drop_last`, `limit` and `order` can change a result."""

    num_workers: int = 0
    """Processes that load samples; 0: load them in the main process. Any number gives the same
    bits."""
    prefetch_factor: int = 2
    """Micro-batches that each worker prepares in advance."""
    pin_memory: bool = True
    """Use page-locked memory for batches; on CUDA only."""
    shuffle: bool = True
    """Draw a new permutation for each epoch, keyed by (seed, epoch)."""
    drop_last: bool = True
    """In training, leave out the last batch of an epoch if it is smaller than the others."""
    limit: int | None = None
    """Train on only the first N batches of each epoch's order; null: on all."""
    order: Any = None
    """A component that determines the order of an epoch (repeated augmentation, grouping by aspect
    ratio), or a choice of `order=`; null: `shuffle` decides, by a permutation or, for more than ten
    million samples, by `order=bijection`."""


@dataclass
class Evaluate:
    """When and how the validation splits, `valid` and `valid_NAME`, are evaluated."""

    every_epochs: int | float | None = 1
    """Evaluate every N epochs, and always at the end; null: only at the end. A fraction, such as
    0.25, is rounded to whole steps."""
    every_steps: int | None = None
    """Evaluate every N steps, instead of by epochs."""
    batch_size: int = 64
    """Samples per evaluation batch."""
    limit: int | None = None
    """Evaluate only the first N batches of the validation split; null: all of it."""
    monitor: Any = "valid/loss"
    """The metric that decides which checkpoint is best, and that plateau schedules and early
    stopping follow. Of a list, the first; the others go to `also`."""
    mode: Mode | None = None
    """Whether lower or higher is better; null: by the metric's name (lower for a loss, higher for
    an accuracy)."""
    also: dict[str, Mode] = field(default_factory=dict)
    """More metrics, each with min or max: the best checkpoint by each is kept too. Changes no
    result; added on resuming, it counts earlier evaluations."""
    pictures: bool = True
    """Draw plots and pictures of the last evaluation. Changes no result."""


@dataclass
class Distil:
    """A frozen teacher, from whose outputs the model learns too (arXiv 1503.02531)."""

    teacher: Any = None
    """A trained run (`run:RUN`, its best checkpoint; `run:RUN/last`), or a model; null: none."""
    weights: str | None = None
    """The weights of a teacher that is a model, as for `initialise.weights`."""
    temperature: float = 4.0
    """The temperature of both softmaxes; the loss is multiplied by its square."""
    alpha: float = 0.9
    """The share of the teacher's loss; the labels' has the rest."""


@dataclass
class Checkpoint:
    """When checkpoints are written, and which are kept. Does not change the result."""

    every_steps: int | None = None
    """Write a checkpoint every N steps; null: by epochs only."""
    every_epochs: int | None = 1
    """Write a checkpoint every N epochs; null: by steps only."""
    every_minutes: float | None = None
    """Write a checkpoint also when this time has passed since the last one."""
    keep_last: int = 2
    """How many of the newest checkpoints to keep."""
    keep_best: int = 1
    """How many of the best checkpoints by `evaluate.monitor` to keep. With 0, `samewise eval` takes
    the best of those that are there, and says so."""
    keep_every_steps: int | None = None
    """Keep permanently the checkpoints whose step is a multiple of this."""
    background: bool = True
    """Write checkpoints in a thread, from a copy, so that training does not wait. A state of more
    than 1 GiB in the host's memory is not copied: training waits until it is written."""
    sharded: bool = False
    """Each process writes its own shards (strategy=fsdp), into a folder that all of them can
    access."""


@dataclass
class Trace:
    """The record by which two runs are compared."""

    every_steps: int = 1
    """Record every N steps; 0: never (then `verify` has nothing to compare)."""
    layers_every_steps: int = 1
    """Record a digest of each parameter every N steps, to name the first layer that differs; 0:
    never."""


@dataclass
class Tracking:
    """Settings of tracking: where metrics, configs and pictures go. They change no result."""

    enabled: bool = True
    """Log to a tracking store; false: the run's folder is the only record."""
    report_to: list[str] = field(default_factory=lambda: ["mlflow"])
    """Where to log: any of mlflow, tensorboard, wandb (Weights & Biases) and csv."""
    uri: str = "sqlite:///${run_root}/mlflow.db"
    """The MLflow tracking URI."""
    experiment: str = "samewise"
    """The MLflow experiment's name."""
    artifact_location: str | None = None
    """Where a new experiment stores its artifacts; null: the store's default, or a folder beside an
    SQLite file."""
    run_name: str | None = None
    """The MLflow run's name; null: the experiment's name and fingerprint."""
    tags: dict[str, str] = field(default_factory=dict)
    """Additional tags of the run."""
    send_every_s: float = 1.0
    """Seconds between two transmissions."""
    flush_timeout_s: float = 30.0
    """Seconds to wait at the end for a store that does not answer; `samewise sync` sends the rest
    later."""
    log_every_steps: int = 1
    """Log the step's metrics every N steps."""
    log_checkpoint: bool = True
    """Upload the best checkpoint and the trace as artifacts, so that the run can be verified when
    its folder is gone."""
    log_model: bool = False
    """Also log the best checkpoint of a finished run as an MLflow model, for `mlflow models serve`;
    to do this later: `samewise sync RUN --log-model`."""
    register_model: str | None = None
    """Log the model, and register it under this name in MLflow's model registry, as its next
    version."""
    log_system: bool = True
    """Log CPU, memory and GPU use of the training process."""


@dataclass
class Reproducibility:
    """Determinism, and what to do if it is not possible."""

    level: str = "strict"
    """strict, portable or fast: the name of the choice, recorded in the run's tags."""
    deterministic: bool = True
    """Use deterministic algorithms only; an operator without one is an error that names it."""
    benchmark: bool = False
    """Let cuDNN choose algorithms by timing them."""
    threads: int = 1
    """Number of torch threads in the main process. It changes bits, so it is part of the
    fingerprint."""
    fill_uninitialized_memory: bool = False
    """Fill new tensors with NaN under deterministic algorithms: this finds reads of uninitialised
    memory, but takes time."""
    detect_anomaly: bool = False
    """Let torch's autograd name the operator of the forward pass whose gradient is NaN; slow.
    Changes no result."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables to set before torch is imported; only those that choose how numbers are
    computed (MKL_CBWR, OMP_PROC_BIND, ...)."""
    other_environment: str = "refuse"
    """What to do when a run is resumed in an environment that would change its bits: refuse, or
    record (and lower the level)."""


@dataclass
class Experiment:
    """The root of every config."""

    name: str | None = None
    """The first part of the run folder's path; null: the choice of `experiment=`, or else recipe,
    model and data set."""
    seed: int = 0
    """The seed of all randomness."""
    run_root: str = "runs"
    """The folder that holds the runs and, by default, the MLflow store."""
    device: Device = Device.auto
    """auto, cpu or cuda."""
    max_epochs: int = 10
    """Number of passes over the training split."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, if that comes before `max_epochs`; 0: only evaluate the
    model, without training."""
    batch_size: int = 64
    """Samples per optimizer step, over all replicas and accumulated micro-batches."""
    replicas: int = 1
    """Logical data-parallel workers; the number of processes that run them does not change the
    result."""
    accumulate: int = 1
    """Micro-batches that each replica accumulates per optimizer step."""
    reference_batch_size: int | None = None
    """The batch size for which the learning rates of `optimizer` and `param_groups` are given: they
    are multiplied by (batch_size / reference_batch_size) ** reference_power; null: as they are."""
    reference_power: float | None = None
    """1 (or null): rates in proportion to the batch size, as for SGD; 0.5: to its square root."""
    clip_norm: float | None = None
    """Maximum norm of the gradient; null: no clipping."""
    clip_norms: dict[str, float | None] = field(default_factory=dict)
    """Maximum norm of the gradient by phase of the recipe, in place of `clip_norm`."""
    clip_value: float | None = None
    """Maximum magnitude of each element of the gradient, after `clip_norm`; null: no limit."""
    clip_adaptive: float | None = None
    """Adaptive gradient clipping: the gradient of each of a weight's rows has at most this share of
    the row's norm, such as 0.01; null: no limit."""
    skip_spikes: float | None = None
    """Skip an optimizer step whose loss lies more than this many standard deviations above the mean
    of up to 100 steps before; null: never."""
    memory_format: MemoryFormat = MemoryFormat.contiguous
    """Memory layout of images and convolution weights."""
    activation_checkpointing: list[str] = field(default_factory=list)
    """Modules whose activations are recomputed in the backward pass, by class (`BasicBlock`) or
    name (`layer4.*`). Saves memory, changes no result."""

    resume_from: str | None = None
    """A checkpoint of another run to continue from: its folder (`RUN/checkpoints/step-00000040`),
    `run:RUN` (the best), or `run:RUN/last`."""

    recipe: Any = MISSING
    """The task: a samewise.runner.interfaces.Recipe."""
    model: Any = MISSING
    """The network: a torch.nn.Module."""
    dataset: Any = MISSING
    """Facts about the data, and its splits `train`, `valid` and, optionally, `test`; further
    training and evaluation sets are `train_NAME`, `valid_NAME` and `test_NAME`."""
    transforms: Any = MISSING
    """`train` and `eval`, each with `sample` (CPU, in the worker) and `batch` (on the device)
    lists."""
    optimizer: Any = MISSING
    """A torch.optim.Optimizer with `_partial_: true`, or one per phase."""
    scheduler: Any = MISSING
    """A samewise.runner.optim.schedules.Schedule."""
    param_groups: dict[str, Any] = field(default_factory=dict)
    """Parameter groups by pattern, with the options in which they differ from the optimizer."""
    initialise: Any = None
    """Initial weights: from a file, or by module type."""
    distil: Distil = field(default_factory=Distil)
    precision: Any = MISSING
    """fp32, tf32, bf16 or fp16."""
    strategy: Any = MISSING
    """In how many processes a run trains, and how they share the work."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """Callbacks by name, each a samewise.runner.interfaces.Callback."""

    compile: Compile = field(default_factory=Compile)
    loader: Loader = field(default_factory=Loader)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    trace: Trace = field(default_factory=Trace)
    tracking: Tracking = field(default_factory=Tracking)
    reproducibility: Reproducibility = field(default_factory=Reproducibility)
    launcher: Any = None
    """Where the runs of a sweep are executed: a samewise.runner.launchers.base.Launcher."""
    sweeper: Any = None
    """Which settings a sweep tries: a samewise.runner.sweepers.base.Sweeper."""
