"""The trace: one line of chained digests per step, used to compare two runs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any, BinaryIO

from torch import Tensor, nn

from samewise.runner.errors import Problem, TrainingError
from samewise.runner.records.digest import XXH3, begin, begin_value, combine, value_digest
from samewise.runner.records.files import (
    fsync_folder,
    parse_json,
    read_lines,
    set_aside,
)
from samewise.runner.records.trace_reader import algorithm_of, parse_line

# In the order in which a step computes them: the first that differs says where two steps parted
STAGES = {
    "batch": "the data: a different batch was loaded",
    "input": "the transforms: the same batch became a different input",
    "loss": "the forward pass: the same input gave a different loss",
    "gradients": "the backward pass: the same loss gave different "
    "gradients (or the forward pass, if "
    "the loss is the same by rounding)",
    "weights": "the optimizer: the same gradients gave different weights",
}


def parameters_in(head: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters in a trace's head.

    Includes those by which a hook renames parameters in the model's state_dict.
    """
    return [*head.get("gradients", ()), *head.get("renamed", ())]


def describe_stage(
    stage: str, layer: str, head: Mapping[str, Any], settings: Collection[str] = ()
) -> str:
    """Explain what the first difference of a step means.

    Args:
        stage: The first stage that differs, a key of `STAGES`.
        layer: The first layer that differs in it.
        head: The trace's head.
        settings: The settings that differ.
    """
    if stage == "weights" and layer and layer not in parameters_in(head):
        return "the forward pass: it gave the same loss and gradients, but other values in a buffer"
    if stage == "batch" and not {"replicas", "accumulate"}.isdisjoint(settings):
        return (
            "the data: the batch is divided into other micro-batches, each of which has a "
            "digest, or another batch was loaded"
        )
    return STAGES[stage] + (
        "; or they were clipped otherwise"
        if stage == "gradients" and "clip_norm" in settings
        else ""
    )


ANYWHERE = ("batch", "loss")
"""Stages whose digests are the same by every algorithm."""

# Seconds between writes if lines come faster: a system call for each line would take a tenth of a
# small network's step
_EVERY_S = 0.1


class Trace:
    """Writes `trace.jsonl`.

    The first line names the parameters and buffers, and has digests of the initial ones; each other
    line describes a step. A line holds no time and no path, so two runs that are the same have the
    same file.

    Args:
        path: The file.
        model: Its gradients and its state are digested.
        digests_of: Begins to digest tensors by an algorithm, and returns a function that reads the
            digests on the process that writes; all processes call it.
        algorithm: One of `ALGORITHMS`. An existing file keeps its own.
        shards: Number of parts into which each parameter is split to be digested.
        every_steps: Steps between lines; 0: no lines.
        layers_every_steps: Steps between lines with a digest for each parameter; 0: no such lines.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        *,
        digests_of: Callable[[Sequence[Tensor | None], str], Callable[[], list[int]]] = begin,
        algorithm: str = XXH3,
        shards: int = 1,
        every_steps: int = 1,
        layers_every_steps: int = 1,
    ) -> None:
        self._path = path
        self._digests = digests_of
        self.algorithm = algorithm
        self._shards = {"shards": shards} if shards > 1 else {}
        self._every = every_steps
        self._layers_every = layers_every_steps
        self._model = model
        self._parameters = list(model.parameters())
        # With keep_vars these are the parameters themselves, whose later values are digested
        self._state: dict[str, Tensor | None] = model.state_dict(keep_vars=True)
        # Shared weights have a name in each of their places, as in the state_dict
        own = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        # A model may make or name some of its state itself, by get_extra_state or a hook: then
        # its state_dict is taken at each step
        self._is_computed = any(own.get(name) is not tensor for name, tensor in self._state.items())
        # A module replaces a buffer by assigning to it, so its own mapping of them is needed
        module_buffers = [(x, m._buffers) for x, m in model.named_modules(remove_duplicate=False)]  # pyright: ignore[reportPrivateUsage]
        self._buffers = [
            (key, name, buffers)
            for prefix, buffers in module_buffers
            for name in buffers.keys()  # noqa: SIM118
            if (key := f"{prefix}.{name}".lstrip(".")) in self._state
        ]
        trained = {id(parameter) for parameter in self._parameters}
        renamed = [
            name
            for name, tensor in self._state.items()
            if id(tensor) in trained and own.get(name) is not tensor
        ]
        self._names = {
            "gradients": [name for name, _ in model.named_parameters()],
            "weights": list(self._state),
            **({"renamed": renamed} if renamed else {}),
        }
        self._chain = 0
        # Both read digests of the current step: of the gradients of each phase, and of the weights
        self._gradients: list[Callable[[], list[int]]] = []
        self._weights: Callable[[], list[int]] = list
        # Writes the line of the newest step, once its digests can be read
        self._pending: Callable[[], None] | None = None
        self._file: BinaryIO | None = None
        self._lines = list[bytes]()
        self._write_at = 0.0
        self._last = b"{}"

    def digest_initial(self) -> Callable[[], list[int]] | None:
        """Begin to digest the initial weights, for `open`; all processes call it."""
        return self._digest_state() if self._every else None

    def open(self, step: int, chain: int, initial: Callable[[], list[int]] | None = None) -> None:
        """Continue after `step`, and remove later lines, whose steps will be computed again.

        Args:
            step: The last step whose line stays.
            chain: The digest of all lines up to it.
            initial: Reads the digests of the initial weights, for the head of a new file.
        """
        self._chain = chain
        if not self._every:
            if self._path.exists() and not _drop_after(self._path, after=step):
                self._path.unlink(missing_ok=True)
            return
        if _drop_after(self._path, after=step):
            _, head = next(read_lines(self._path))
            self.algorithm = algorithm_of(self._path, parse_json(head))
        else:
            # Format 2 names its algorithm; format 1, which has only xxh3, is that of earlier
            # versions
            form = (
                {"format": 1}
                if self.algorithm == XXH3
                else {"format": 2, "algorithm": self.algorithm}
            )
            start = {"initial": {"step": step, "weights": shorten(initial())}} if initial else {}
            head = {**form, **self._shards, **self._names, **start}
            self._path.write_text(json.dumps(head, separators=(",", ":")) + "\n")
        # Unbuffered, since `_write_lines` writes many lines at once
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        fsync_folder(self._path.parent)

    def digest_gradients(self, step: int) -> None:
        """Begin to digest the gradients of a phase of `step`, before the next phase clears them."""
        if self.records(step):
            self._gradients.append(
                self._digests([parameter.grad for parameter in self._parameters], self.algorithm)
            )

    def digest_weights(self, step: int) -> None:
        """Begin to digest the weights after `step`."""
        if self.records(step):
            self._weights = self._digest_state()

    def _digest_state(self) -> Callable[[], list[int]]:
        if self._is_computed:
            state = self._model.state_dict(keep_vars=True)
            self._state = {name: state.get(name) for name in self._state}
        for key, name, buffers in self._buffers:
            # A model may assign another tensor to a buffer
            if buffers[name] is not self._state[key]:
                self._state[key] = buffers[name]
        return self._digests(list(self._state.values()), self.algorithm)

    def record(self, step: int, *, batch: int, inputs: int, loss: float) -> None:
        """Write the step's line once its digests can be read.

        On a device that is when the next step's line is recorded, or when `chain` or `last` is
        read.

        Args:
            step: The step, from 1.
            batch: Digest of the step's batches as loaded.
            inputs: Digest of the model's inputs.
            loss: The step's loss.
        """
        if not self.records(step):
            return
        self._write()
        gradients, weights = self._gradients, self._weights
        self._gradients, self._weights = [], list
        if self._file:
            self._pending = partial(self._line, step, batch, inputs, loss, gradients, weights)
        # On the CPU the digests are there already
        if self.algorithm == XXH3:
            self._write()

    def _write(self) -> None:
        write_line, self._pending = self._pending, None
        if write_line:
            write_line()

    def _line(
        self,
        step: int,
        batch: int,
        inputs: int,
        loss: float,
        phases: Sequence[Callable[[], list[int]]],
        read_weights: Callable[[], list[int]],
    ) -> None:
        by_phase, weights = [read() for read in phases], read_weights()
        gradients = (
            by_phase[0] if len(by_phase) == 1 else [combine(x) for x in zip(*by_phase, strict=True)]
        )
        total = combine(gradients), combine(weights)
        self._chain = combine([self._chain, batch, inputs, *total])
        has_layers = self._layers_every and step % self._layers_every == 0
        layers = (
            f',"layers":{{"gradients":"{shorten(gradients)}","weights":"{shorten(weights)}"}}'
            if has_layers
            else ""
        )
        # Formatted by hand, in a third of a JSON encoder's time
        head = f'"step":{step},"batch":"{batch:016x}","input":"{inputs:016x}","loss":"{loss.hex()}"'
        digests = f'"gradients":"{total[0]:016x}","weights":"{total[1]:016x}"'
        chain = f'"chain":"{self._chain:016x}"'
        self._last = f"{{{head},{digests},{chain}{layers}}}\n".encode()
        self._lines.append(self._last)
        if time.monotonic() >= self._write_at:
            self._write_lines()

    def _write_lines(self) -> None:
        rest, self._lines = b"".join(self._lines), []
        # A nearly full disk takes a part, and only reports how much
        while rest and self._file:
            rest = rest[self._file.write(rest) :]
        self._write_at = time.monotonic() + _EVERY_S

    def records(self, step: int) -> bool:
        """Whether the step (from 1) gets a line."""
        return bool(self._every) and step % self._every == 0

    def digests(self, step: int, batch: Any, inputs: Any) -> tuple[tuple[int, Any], ...]:
        """Return the digests of a micro-batch of `step`, or nothing if the step gets no line.

        The one pair has the digest of the batch as loaded, and that of the model's input or a
        function that reads it.
        """
        if not self.records(step):
            return ()
        return (
            (
                value_digest(batch),
                value_digest(inputs) if self.algorithm == XXH3 else begin_value(inputs),
            ),
        )

    @property
    def chain(self) -> int:
        """The digest of all lines, which are written to the file first."""
        self._write()
        self._write_lines()
        return self._chain

    def sync(self) -> None:
        """Make the lines up to `chain` durable, before the checkpoint that holds it.

        Raises:
            TrainingError: The disk fails.
        """
        try:
            if self._file:
                os.fsync(self._file)
        except OSError as error:
            raise TrainingError(
                Problem(
                    str(self._path),
                    f"cannot be flushed to disk: {error.strerror}",
                    hint="check the storage, then run the same command again to resume",
                )
            ) from None

    @property
    def last(self) -> dict[str, Any]:
        """The latest line."""
        self._write()
        return parse_json(self._last)

    def close(self) -> None:
        if self._file:
            try:
                self._write()
                self._write_lines()
            except OSError as error:
                # Lines remain only if training ends early: before each checkpoint all are written
                print(
                    f"warning: {self._path}: its last lines cannot be written: {error.strerror}",
                    file=sys.stderr,
                )
            if not self._path.exists() or not os.path.samestat(
                os.fstat(self._file.fileno()), self._path.stat()
            ):
                print(
                    f"warning: {self._path}: was deleted or replaced during training, so "
                    "the run cannot be compared with others",
                    file=sys.stderr,
                )
            self._file.close()
            self._file = None


def _drop_after(path: Path, *, after: int) -> bool:
    """Remove the lines after that of a step up to `after`; return whether any line is left.

    A line before it that cannot be read stays; a file without a readable line is set aside.
    """
    end = at = 0
    unreadable, recent = list[int](), list[int]()
    # A run that begins anew keeps no line of an earlier trace
    for number, text in read_lines(path) if after else ():
        at += len(text)
        line = parse_line(text)
        if line is None:
            recent.append(number)
            continue
        if line.get("step", 0) > after:
            break
        # Only unreadable lines before a line that stays are left in the file
        end, unreadable, recent = at, unreadable + recent, []
    if end:
        os.truncate(path, end)
    for number in unreadable:
        print(
            f"warning: {path}: line {number} cannot be read; it is left as it is", file=sys.stderr
        )
    if at and not end:
        print(
            f"warning: {path}: no line can be read; moved to "
            f"{set_aside(path, 'damaged').name}; a new trace begins after step {after}",
            file=sys.stderr,
        )
    return end > 0


def shorten(numbers: Sequence[int]) -> str:
    """Return 32 bits of each digest in hexadecimal, enough to find the layer that differs."""
    return pack(f">{len(numbers)}I", *(number & 0xFFFFFFFF for number in numbers)).hex()
