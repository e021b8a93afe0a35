"""Records what samewise cannot control: versions, hardware, variables, git.

The record lists separately what can change bits.
"""

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
"""Packages whose version can change a result."""
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
"""Variables by which CUDA's libraries choose kernels, and so the order of additions."""
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
"""Environment variables that are recorded if they are set."""


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
    """Return this process's environment, as plain values.

    Args:
        device: Where the run computes.
        reproducibility: The config's settings.
        data: By split: name, size, fingerprint.
        optimizers: By phase: class, implementation of its arithmetic, groups.
        used: Classes, functions and modules of samewise that the config, or the user's own code,
            names.
        libraries: Top-level names of the installed packages that the user's own code imports.
        compiled: What decides the bits of compiled code, by name.
    """
    versions = {"samewise": samewise.__version__, **{name: _version(name) for name in PACKAGES}}
    contents: dict[str, Any] = {
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
    contents["decides"] = {
        **{f"versions.{name}": versions[name] for name in NUMERIC},
        "device": contents["device"],
        # Portable bits do not depend on the processor's model
        **({} if portable else {f"cpu.{name}": value for name, value in _cpu().items()}),
        "cpu.capability": contents["cpu"]["capability"],
        **{f"optimizers.{phase}": facts["implementation"] for phase, facts in optimizers.items()},
        **{f"data.{split}": facts["fingerprint"] for split, facts in data.items()},
        **(compiled or {}),
    }
    return contents


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two records that can change bits, a sentence each."""
    decided, decides = _decides(first), _decides(second)
    # Runs of 0.1 did not record the processor's generation
    unknown = {"cpu.generation"} - (decided.keys() & decides.keys())
    sentences = [
        f"{name} was {_value_of(name, first)} and is {_value_of(name, second)}"
        for name in sorted({*decided, *decides} - unknown)
        if decided.get(name) != decides.get(name)
    ]
    libraries, present = first.get("libraries", {}), second.get("libraries", {})
    sentences += [
        f"version of {name} was {libraries[name]!r} and is {present[name]!r}"
        for name in libraries
        if name in present and libraries[name] != present[name]
    ]
    return sentences + own_code.differences(first, second)


def _decides(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides bits; a split without samples decides none."""
    return {
        name: value
        for name, value in record.get("decides", {}).items()
        if record.get("data", {}).get(name.removeprefix("data."), {}).get("size") != 0
    }


def _value_of(name: str, record: Mapping[str, Any]) -> str:
    """Describe what decides bits; data by their name and size, with the digest behind them."""
    value = repr(record.get("decides", {}).get(name))
    data = record.get("data", {}).get(name.removeprefix("data."), {})
    return f"{data['name']}, {data['size']} samples ({value})" if "name" in data else value


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
    """Say whether the recorded environment and this one can be expected to give the same bits.

    Args:
        first: The recorded environment.
        second: This one.
        differing: The `differences` between the two.
        same_code: Whether the user's code is equal.
    """
    if differing:
        return f"the bits may differ: {'; '.join(differing)}"
    variables, present = first.get("variables", {}), second.get("variables", {})
    sentences = [
        f"{name} was {variables.get(name)!r} and is {present.get(name)!r}"
        for name in _MAY_DECIDE
        if variables.get(name) != present.get(name)
    ]
    sentences += (
        [f"threads were {first['threads']} and are {second['threads']}"]
        if first.get("threads", second["threads"]) != second["threads"]
        else []
    )
    sentences += [] if same_code else ["the code differs"]
    if sentences:
        return f"the bits may differ: {'; '.join(sentences)}"
    if first.get("level") == "none":
        return "the bits may differ: the run does not promise to repeat (level none)"
    return "the same bits are expected: the environments agree in everything known to affect them"


RECORDS_DIFF = "SAMEWISE_GIT_DIFF"
"""Environment variable: 0 leaves the diff of uncommitted work out of the record."""

# Pathspecs of git that exclude files of secrets anywhere in the checkout
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
# With these options and variables, git runs no monitor, no hook after it writes its index, and
# opens no connection for an object that is missing
_OF_GIT = {
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_TERMINAL_PROMPT": "0",
}


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit of the checkout around `folder`, and the diff of uncommitted work.

    Empty outside a checkout.
    """
    # The checkout may be a stranger's, whose .git/config names commands: none of them is run, and
    # no folder but its own is read
    filters = _filter_options(folder)
    output = _git(folder, "rev-parse", "--show-toplevel", "HEAD")
    top, _, commit = (output or "").removesuffix("\n").rpartition("\n")
    if not top or filters is None or not os.path.lexists(Path(top, ".git")):
        return {}
    changed = (
        _git(
            folder,
            *filters,
            "diff",
            "--no-ext-diff",
            # Otherwise git runs in each submodule, by the configuration of that one
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
    arguments = (
        "diff",
        "--no-ext-diff",
        # The checkout's attributes choose converters, which are commands
        "--no-textconv",
        "--ignore-submodules=dirty",
        "HEAD",
        "--",
        ":(top)",
        *_LEFT_OUT,
    )
    diff = (changed and _git(folder, *filters, *arguments)) or ""
    return {**state, "diff": remove_private_keys(redact(diff))[:1_000_000]}


def _filter_options(folder: Path) -> list[str] | None:
    """Return the options that stop git from running the filters that its configuration names.

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
    options = [
        part
        for name in names
        for part in ("-c", f"{name}={'false' if name.endswith('.required') else ''}")
    ]
    # `git -c` ends the name at the first =, so that such a filter cannot be turned off
    return None if any("=" in name for name in names) else options


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
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
    return process.stdout if process.returncode == 0 else None


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"kind": device.type}
    facts = torch.cuda.get_device_properties(device)
    # Distributions of cuBLAS, if pip has installed it
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
        # The first processor stands for all
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return {"model": platform.processor()}
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    cpu = {"model": facts.get("model name", platform.processor())}
    # Virtual machines call every generation "AMD EPYC", but MKL chooses its kernels by these
    # numbers
    if "cpu family" in facts and "model" in facts:
        cpu["generation"] = f"family {facts['cpu family']}, model {facts['model']}"
    return cpu


def _libraries(names: Iterable[str]) -> dict[str, str | None]:
    """Return the version of each distribution that provides one of these packages."""
    packages = [name for name in names if name not in NUMERIC and name != "samewise"]
    versions = {name: _version(name) for name in packages}
    if any(version is None for version in versions.values()):
        # Reads the file lists of all installed packages: slow, and seldom needed
        owners = metadata.packages_distributions()
        for name in [name for name, version in versions.items() if version is None]:
            versions.pop(name)
            versions |= {owner: _version(owner) for owner in owners.get(name, ())}
    return versions


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
