"""Rules for what this machine can do."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from samewise.runner.config.check.settings import HIGHEST
from samewise.runner.errors import ConfigError, Problem
from samewise.runner.processes.memory import require_few
from samewise.runner.records.files import try_writing

_MOST_THREADS = 256
"""As many as a large machine has cores: its runs can be verified on a small one."""


def problems(cfg: DictConfig, *, elsewhere: bool = False) -> list[Problem]:
    """The problems that the rules find.

    `elsewhere`: only rules for a machine that submits the run to others.
    """
    return [problem for rule in (ANYWHERE if elsewhere else RULES) for problem in rule(cfg)]


def runs_can_be_written(cfg: DictConfig) -> Iterator[Problem]:
    """Tries to write: permissions do not show that a file system is read-only."""
    if refusal := try_writing(Path(cfg.run_root).expanduser()):
        yield Problem(
            "run_root",
            f"cannot write there: {refusal}",
            str(cfg.run_root),
            "a writable folder",
        )


def require_few_in_all(cfg: DictConfig, nproc: int) -> None:
    """Raise a ConfigError if ranks, threads and loader workers add up to thousands of processes."""
    require_few("strategy.nproc", nproc)
    threads, workers = cfg.reproducibility.threads, cfg.loader.num_workers
    cores, each = os.cpu_count() or 1, threads + workers
    most = max(_MOST_THREADS, 8 * cores)
    ConfigError.raise_if(
        nproc > 1 and nproc * each > most,
        "strategy.nproc",
        f"processes with reproducibility.threads={threads} and loader.num_workers={workers} each "
        f"are {nproc * each} in all, too many for this machine with {cores} cores",
        nproc,
        f"at most {most} in all",
    )


def threads_fit(cfg: DictConfig) -> Iterator[Problem]:
    """More threads than cores can be useful, to get the bits of a larger machine.

    Hundreds more only wait for each other.
    """
    cores = os.cpu_count() or 1
    most = max(_MOST_THREADS, 8 * cores)
    if (
        most < cfg.reproducibility.threads <= HIGHEST["reproducibility.threads"]
    ):  # larger numbers are reported by `settings`
        yield Problem(
            "reproducibility.threads",
            f"is too many threads per process for this machine with {cores} cores",
            cfg.reproducibility.threads,
            f"at most {most}",
        )


def workers_fit(cfg: DictConfig) -> Iterator[Problem]:
    """Compare the loader workers of one rank with this machine's cores.

    Ranks are counted where they start, so that a setup for other machines can be checked.
    """
    try:
        require_few("loader.num_workers", cfg.loader.num_workers)
    except ConfigError as error:
        yield from error.problems


def device_is_there(cfg: DictConfig) -> Iterator[Problem]:
    if str(cfg.device) != "cuda":
        return
    import torch

    if not torch.cuda.device_count():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no CUDA device"
        )
        yield Problem(
            "device",
            f"is not available: {why}",
            "cuda",
            "auto or cpu",
            "run `samewise doctor` for details",
        )


def backend_is_there(cfg: DictConfig) -> Iterator[Problem]:
    strategy = OmegaConf.select(cfg, "strategy")  # None if it is missing
    if not isinstance(strategy, DictConfig) or str(strategy.get("backend")) != "nccl":
        return
    import torch

    if not torch.cuda.device_count():
        yield Problem(
            "strategy.backend",
            "nccl connects CUDA devices, and torch finds none",
            "nccl",
            "gloo, or null to choose by device",
        )


ANYWHERE: tuple[Callable[[DictConfig], Iterator[Problem]], ...] = (runs_can_be_written,)
RULES: tuple[Callable[[DictConfig], Iterator[Problem]], ...] = (
    *ANYWHERE,
    workers_fit,
    threads_fit,
    device_is_there,
    backend_is_there,
)
