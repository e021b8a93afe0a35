"""Results of the functions of `samewise`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Trained:
    """A finished run.

    Args:
        folder: Its own.
        steps: Optimizer steps.
        metrics: Of the last evaluation.
        best: Of the best evaluation, with its `step`.
        monitor: The metric that determines the best step.
        weights_sha256: Of the last weights.
        level: The promise: R0 to R3, or none.
        is_new: Whether it was trained just now, rather than found finished.
    """

    folder: Path
    steps: int
    metrics: dict[str, float]
    best: dict[str, float]
    monitor: str
    weights_sha256: str
    level: str
    is_new: bool


@dataclass(frozen=True)
class Verification:
    """The comparison of a run's record with a second training.

    Args:
        run: The run's folder; a temporary one for a bundle, or a run in an MLflow store.
        same: Whether the bits are the same, and nothing else in the record differs.
        comparable: Whether the environments can give the same bits; otherwise nothing was trained.
        compared: Number of steps whose lines in the trace were compared.
        parts: The first difference: `step`, `stage`, `layer`, `reason`; None if there is none.
        messages: The whole result, as sentences.
        first: The first value that differs within the first step that does: `kind`, `name`.
        audit: The parts that an audit drew: for each the step before its first, and its last; those
            after the first that differs were not trained. None without an audit.
    """

    run: Path
    same: bool = False
    comparable: bool = True
    compared: int = 0
    parts: Mapping[str, Any] | None = None
    messages: Sequence[str] = ()
    first: Mapping[str, str] | None = None
    audit: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True)
class Differences:
    """The differences of two runs. Pairs have the first run's value first.

    Args:
        same: Whether all that can be compared has the same bits.
        config: Path and two values of each setting that differs.
        environment: Differences of the environments that can change bits, as sentences.
        code: Differences of the user's code, as sentences.
        lines: The lines of code that differ, by file.
        metrics: Two values of each metric of the last evaluation; None if a run lacks it.
        evaluated: The steps of the last evaluations.
        logged: Two values of each logged metric that differs, by name and first step.
        same_metrics: Whether the metrics agree as far as both runs have them.
        steps: Number of steps that both traces have.
        digests: How each trace's tensors were digested.
        compared: The stages of a step that were compared.
        tensors: Names of tensors that only one of the runs has.
        weights: Whether the last weights agree: `step`, `same`, `traced`; None if that is unknown.
        missing: What a trace lacks, as sentences.
        parts: The first difference of the traces: `step`, `stage`, `layer`, `reason`, `since`.
        messages: What the traces show, as sentences.
    """

    same: bool
    config: Sequence[tuple[str, Any, Any]]
    environment: Sequence[str]
    code: Sequence[str]
    lines: Mapping[str, str]
    metrics: Mapping[str, tuple[float | None, float | None]]
    evaluated: tuple[int, int]
    logged: Mapping[str, tuple[float, float]]
    same_metrics: bool
    steps: int
    digests: Sequence[str]
    compared: Sequence[str]
    tensors: Sequence[Sequence[str]]
    weights: Mapping[str, Any] | None
    missing: Sequence[str]
    parts: Mapping[str, Any] | None
    messages: Sequence[str] = ()


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a run's checkpoint on one of its splits.

    Args:
        run: The run's folder.
        step: The checkpoint's.
        split: train, valid or test.
        samples: Number of samples that were evaluated.
        metrics: By name, with the split.
        evaluated: What was evaluated, in words, if `evaluate.limit` leaves something out.
        pictures: The folder for pictures, which exists if the recipe draws any.
        changed: Path, recorded value and value here of each setting that overrides change.
        classes: Names of the labels, numbered as in the run.
    """

    run: Path
    step: int
    split: str
    samples: int
    metrics: dict[str, float]
    evaluated: str
    pictures: Path
    changed: Sequence[tuple[str, Any, Any]] = ()
    classes: Sequence[str] = field(default=(), repr=False)


@dataclass(frozen=True)
class Difference:
    """The largest difference over all outputs.

    Args:
        output: The name of the output that is furthest off.
        relative: The largest absolute error of its numbers over the largest of them.
        ulps: The largest number of representable values between two results; 0 for integers.
    """

    output: str
    relative: float
    ulps: int

    def __str__(self) -> str:
        return (
            f"{self.output} differs by {self.relative:.2g} of its largest number "
            f"({self.ulps:,} ulps)"
        )


@dataclass(frozen=True)
class Runtime:
    """A runtime's results compared with the model's own.

    Args:
        format: pt2, aoti, onnx or safetensors; or vectors, if they were altered.
        description: For the user.
        same: Whether they are the same bits.
        sound: Whether they are within what was stated; None: it was not run, as something is not
            installed.
        difference: The largest difference; None if there is none, or nothing to compare.
        seconds: To load the file and call it once.
    """

    format: str
    description: str
    same: bool = False
    sound: bool | None = False
    difference: Difference | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class ExportedPart:
    """A model as it was exported, or the part of it that one function of tensors computes.

    Args:
        folder: With the weights, the files of the formats, and export.json.
        module: The name of the part; empty for the model as its recipe calls it.
        formats: How the results of each format compare with the model's.
    """

    folder: Path
    module: str
    formats: Sequence[Runtime]


@dataclass(frozen=True)
class Exported:
    """A run's model, written for other runtimes.

    Args:
        folder: The folder of the export.
        experiment: The run's experiment.
        run: The name of its folder.
        step: The checkpoint's.
        average: The callback whose weights were exported; None for the trained ones.
        parts: One part in the folder itself, or several, each in a folder below it.
    """

    folder: Path
    experiment: str
    run: str
    step: int
    average: str | None
    parts: Sequence[ExportedPart]
