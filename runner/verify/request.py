"""A request to verify a run, and the config for it. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from samewise.runner.config import saved
from samewise.runner.errors import ConfigError

if TYPE_CHECKING:
    from samewise.runner.config.compose import Composed
    from samewise.runner.records.folder import RunFolder

# A second training is compared as it runs, and keeps nothing
QUIET = (
    "tracking.enabled=false",
    "checkpoint.keep_best=0",
    "checkpoint.every_epochs=null",
    "checkpoint.every_steps=null",
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to verify a run.

    Args:
        run: The run as the user named it.
        run_root: The folder in which runs are looked up.
        overrides: Values to change in the run's config.
        steps: Number of steps to compare, with `audit` of each part; None: all.
        audit: Number of parts to train, each from one kept checkpoint to the next; None: all steps.
        coarse: Stop at the first step that differs, and do not repeat it.
        anyway: Train even if the environments differ in what can change bits.

    Raises:
        ConfigError: `steps` or `audit` is below 1.
    """

    run: str
    run_root: Path
    overrides: Sequence[str] = ()
    steps: int | None = None
    audit: int | None = None
    coarse: bool = False
    anyway: bool = False

    def __post_init__(self) -> None:
        for option, number in (("--steps", self.steps), ("--audit", self.audit)):
            ConfigError.raise_if(
                number is not None and number < 1, option, "is too small", number, "at least 1"
            )

    def config_of(self, folder: RunFolder, *, trust: bool) -> Composed:
        """Read the run's config with the overrides, and without tracking and checkpoints."""
        for key, _, value in (override.lstrip("+~").partition("=") for override in self.overrides):
            ConfigError.raise_if(
                key.partition(".")[0] == "trace",
                key,
                "cannot be overridden here: both trainings are compared by the trace "
                "as it was recorded",
                value,
                hint="leave it out; --steps N compares fewer steps",
            )
        return saved.trusted_config_of(
            folder,
            [*self.overrides, *QUIET],
            trust=trust,
            received=self.run if Path(self.run).is_file() else "",
        )

    def is_local(self, folder: RunFolder) -> bool:
        """Whether a run is in its own folder, not in a copy from a bundle or a store."""
        return any(folder.path.is_relative_to(root) for root in (self.run, self.run_root))
