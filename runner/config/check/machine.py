"""Rules for what this machine can do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig

from samewise.runner.errors import Problem


def problems(cfg: DictConfig, *, elsewhere: bool = False) -> list[Problem]:
    """What every rule below finds; `elsewhere`: those that hold for a machine that only hands the run on to others."""
    return [problem for rule in (ANYWHERE if elsewhere else RULES) for problem in rule(cfg)]


def runs_can_be_written(cfg: DictConfig) -> Iterator[Problem]:
    """By trying it: permissions do not show that a file system is read-only."""
    if refusal := try_writing(Path(cfg.run_root).expanduser()):
        yield Problem("run_root", f"cannot write there: {refusal}", str(cfg.run_root), "a writable folder", "run_root=FOLDER")


def try_writing(folder: Path) -> str:
    """Why nothing can be written into a folder, or into the nearest above it that there is; "" where it can."""
    standing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=standing):
            return ""
    except OSError as error:
        return str(error.strerror)


def processes_fit(cfg: DictConfig) -> Iterator[Problem]:
    """Thousands of processes take a machine down before any of them has loaded a sample."""
    cores = os.cpu_count() or 1
    most = max(64, 8 * cores)
    nproc = cfg.strategy.get("nproc") if isinstance(cfg.strategy, DictConfig) else None
    for path, count in (("loader.num_workers", cfg.loader.num_workers), ("strategy.nproc", nproc)):
        if isinstance(count, int) and count > most:
            yield Problem(path, f"is more processes than this machine can carry with {cores} cores", count, f"at most {most}")


def device_is_there(cfg: DictConfig) -> Iterator[Problem]:
    if str(cfg.device) != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        yield Problem("device", f"is not available: {why}", "cuda", "auto or cpu", "run `samewise doctor` for details")


def backend_is_there(cfg: DictConfig) -> Iterator[Problem]:
    strategy = cfg.strategy
    if not isinstance(strategy, DictConfig) or str(strategy.get("backend")) != "nccl":
        return
    import torch

    if not torch.cuda.is_available():
        yield Problem("strategy.backend", "nccl connects CUDA devices, and torch finds none", "nccl", "gloo, or null to choose by device")


ANYWHERE: tuple[Callable[[DictConfig], Iterator[Problem]], ...] = (runs_can_be_written,)
RULES: tuple[Callable[[DictConfig], Iterator[Problem]], ...] = (*ANYWHERE, processes_fit, device_is_there, backend_is_there)
