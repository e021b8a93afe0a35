"""Records what cannot be controlled: versions, hardware, variables, git.

What can change bits is listed separately.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

import samewise
from samewise.runner.records import own_code
from samewise.runner.secrets import SECRET_FILES, redact, remove_private_keys

NUMERIC = ("torch", "torchvision", "torchaudio", "numpy", "pillow", "soundfile")
"""The packages whose version can change a result."""
PACKAGES = (*NUMERIC, "hydra-core", "omegaconf", "mlflow", "torchmetrics", "scikit-learn")
_OF_KERNELS = (
    *(
        "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE",
        "DISABLE_ADDMM_CUDA_LT",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_BLAS_PREFER_CUBLASLT",
    ),
    *(
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MAX_NCHANNELS",
        "TORCH_CUDNN_V8_API_DISABLED",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    ),
)
"""By which libraries on CUDA choose their kernels, and so the order in which they add."""
VARIABLES = (
    *(
        "ATEN_CPU_CAPABILITY",
        "CUDA_VISIBLE_DEVICES",
        "MKL_CBWR",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "ONEDNN_MAX_CPU_ISA",
    ),
    *_OF_KERNELS,
)
"""Those recorded where they are set."""


def record(
    *,
    device: torch.device,
    reproducibility: Any,
    data: Mapping[str, Any],
    optimizers: Mapping[str, Any],
    used: Iterable[str] = (),
    libraries: Iterable[str] = (),
    compiled: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """This process's environment, as plain values.

    Args:
        device: Where the run computes.
        reproducibility: The config's settings.
        data: By split: name, size, fingerprint.
        optimizers: By phase: class, implementation of its arithmetic, groups.
        used: The classes, functions and modules of samewise that the config, or the user's own
            code, names.
        libraries: The top-level names of the installed packages that the user's own code imports.
        compiled: What decides the bits of compiled code, by name.
    """
    versions = {"samewise": samewise.__version__, **{name: _version(name) for name in PACKAGES}}
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cpu": {
            **_cpu(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
        },
        "threads": torch.get_num_threads(),
        "device": _device(device),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "git": git_state(Path.cwd()),
        "data": data,
        "optimizers": optimizers,
        **own_code.record(used),
        "libraries": _libraries(libraries),
    }
    portable = reproducibility.level == "portable"
    found["decides"] = {
        **{f"versions.{name}": versions[name] for name in NUMERIC},
        "device": found["device"],
        **({} if portable else {f"cpu.{name}": value for name, value in _cpu().items()}),
        "cpu.capability": found["cpu"]["capability"],
        **{f"optimizers.{phase}": facts["implementation"] for phase, facts in optimizers.items()},
        **{f"data.{split}": facts["fingerprint"] for split, facts in data.items()},
        **(compiled or {}),
    }
    return found


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The differences between two records that can change bits, as sentences."""
    one, two = first.get("decides", {}), second.get("decides", {})
    # Runs of 0.1 did not record the processor's generation
    unknown = {"cpu.generation"} - (one.keys() & two.keys())
    said = [
        f"{name} was {one.get(name)!r} and is {two.get(name)!r}"
        for name in sorted({*one, *two} - unknown)
        if one.get(name) != two.get(name)
    ]
    here, there = first.get("libraries", {}), second.get("libraries", {})
    said += [
        f"version of {name} was {here[name]!r} and is {there[name]!r}"
        for name in here
        if name in there and here[name] != there[name]
    ]
    return said + own_code.differences(first, second)


_MAY_DECIDE = (
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
)


def expectation(
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    differing: Sequence[str],
    *,
    same_code: bool = True,
) -> str:
    """A sentence on whether the bits can be expected to agree between the recorded environment and
    this one; `same_code`: whether the user's code is equal.
    """
    if differing:
        return f"the bits may differ: {'; '.join(differing)}"
    one, two = first.get("variables", {}), second.get("variables", {})
    said = [
        f"{name} was {one.get(name)!r} and is {two.get(name)!r}"
        for name in _MAY_DECIDE
        if one.get(name) != two.get(name)
    ]
    said += (
        [f"threads were {first['threads']} and are {second['threads']}"]
        if first.get("threads", second["threads"]) != second["threads"]
        else []
    )
    said += [] if same_code else ["the code differs"]
    if said:
        return f"the bits may differ: {'; '.join(said)}"
    if first.get("level") == "none":
        return "the bits may differ: the run does not promise to repeat (level none)"
    return "the same bits are expected: the environments agree in everything known to affect them"


RECORDS_DIFF = "SAMEWISE_GIT_DIFF"
"""0: the record of the environment leaves out the diff of uncommitted work."""

_LEFT_OUT = [
    f":(top,exclude,icase,glob)**/{name}{below}" for name in SECRET_FILES for below in ("", "/**")
]


_GIT = (
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "core.quotePath=false",
)
_OF_GIT = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_TERMINAL_PROMPT": "0",
}
"""With the arguments, why git runs nothing: no monitor, no hook after it has written its index, no
connection for an object that is missing."""


def git_state(folder: Path) -> dict[str, Any]:
    """The commit of the checkout around `folder`, and the diff of uncommitted work.

    Empty if there is none.

    A checkout may have been received, with a .git/config that names commands: none of them is run,
    and no folder but its own is looked at.
    """
    found, filters = _git(folder, "rev-parse", "--show-toplevel", "HEAD"), _filter_options(folder)
    top, _, commit = (found or "").removesuffix("\n").rpartition("\n")
    if not top or filters is None or not os.path.lexists(Path(top, ".git")):
        return {}
    changed = (
        _git(
            folder,
            *filters,
            "diff",
            "--no-ext-diff",
            "--ignore-submodules=dirty",
            "--name-only",
            "HEAD",
        )
        or ""
    )
    state = {
        "commit": commit,
        "branch": (_git(folder, "branch", "--show-current") or "").strip(),
        "dirty": bool(changed),
    }
    if os.environ.get(RECORDS_DIFF) == "0":
        return state
    told = (
        "diff",
        "--no-ext-diff",
        "--no-textconv",
        "--ignore-submodules=dirty",
        "HEAD",
        "--",
        ":(top)",
        *_LEFT_OUT,
    )
    diff = (changed and _git(folder, *filters, *told)) or ""
    return {**state, "diff": remove_private_keys(redact(diff))[:1_000_000]}


def _filter_options(folder: Path) -> list[str] | None:
    """Options that stop git from running filters, which are commands in its configuration.

    None if one cannot be disabled.
    """
    names = (
        _git(
            folder,
            "config",
            "--null",
            "--name-only",
            "--get-regexp",
            r"^filter\..*\.(clean|process|required)$",
        )
        or ""
    ).split("\0")[:-1]
    off = [
        part
        for name in names
        for part in ("-c", f"{name}={'false' if name.endswith('.required') else ''}")
    ]
    return None if any("=" in name for name in names) else off


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *_GIT, *arguments],
            cwd=folder,
            env={**os.environ, **_OF_GIT},
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"kind": device.type}
    facts = torch.cuda.get_device_properties(device)
    # The distributions that provide it, if pip has installed it
    cublas = (
        f"nvidia-cublas-cu{(torch.version.cuda or '').split('.')[0]}",
        "nvidia-cublas",
    )
    return {
        "kind": "cuda",
        "name": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cublas": next((version for version in map(_version, cublas) if version), None),
        "nccl": ".".join(map(str, nccl.version()))
        if dist.is_available() and dist.is_nccl_available()
        else None,
        "triton": _version("triton"),
        "multiprocessors": facts.multi_processor_count,
        "variables": {name: os.environ[name] for name in _OF_KERNELS if name in os.environ},
    }


def _cpu() -> dict[str, str]:
    """Return the processor's model name and, on x86, its generation."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return {"model": platform.processor()}
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    named = {"model": facts.get("model name", platform.processor())}
    # Virtual machines call every generation "AMD EPYC", but MKL chooses its kernels by these numbers
    if "cpu family" in facts and "model" in facts:
        named["generation"] = f"family {facts['cpu family']}, model {facts['model']}"
    return named


def _libraries(names: Iterable[str]) -> dict[str, str | None]:
    """The version of each distribution that provides a package of one of these names."""
    left = [name for name in names if name not in NUMERIC and name != "samewise"]
    found = {name: _version(name) for name in left}
    if any(version is None for version in found.values()):
        # Reads the file lists of all installed packages: slow, and seldom needed
        owners = metadata.packages_distributions()
        for name in [name for name, version in found.items() if version is None]:
            found.pop(name)
            found |= {owner: _version(owner) for owner in owners.get(name, ())}
    return found


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
