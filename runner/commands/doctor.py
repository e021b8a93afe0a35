"""Check whether this machine is ready to train, and if not, why."""

import argparse
import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from samewise.runner import torchaudio_import
from samewise.runner.errors import first_line
from samewise.runner.records import tested
from samewise.runner.records.files import nearest_existing, try_writing
from samewise.runner.records.json_text import to_json

EXAMPLES = """examples:
  samewise doctor
  samewise doctor --run-root /data/runs --json

exit codes: 0 ready to train (perhaps with remarks); 1 something must be fixed first
"""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        what: Subject of the check.
        state: `ok`, `remark` or `bad`.
        message: The result of the check.
        advice: What to do.
    """

    what: str
    state: str
    message: str
    advice: str = ""


ARGUMENTS = {
    "--run-root": {
        "type": Path,
        "default": Path("runs"),
        "help": "where runs would be written (default: runs)",
    },
    "--json": {"action": "store_true", "help": "print a JSON list"},
}


def run(args: argparse.Namespace) -> int:
    # Before CUDA is used: cuBLAS is deterministic only with fixed workspaces
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    checks = (
        _packages,
        _device,
        _threads,
        _same_bits,
        _shared_memory,
        partial(_disk, args.run_root),
        _git,
    )
    findings = [finding for check in checks for finding in check()]
    if args.json:
        print(to_json([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print(
                f"{finding.state:<7} {finding.what:<20} {finding.message}"
                + (f"\n{'':28} {finding.advice}" if finding.advice else "")
            )
    return 1 if any(finding.state == "bad" for finding in findings) else 0


def _packages() -> Iterator[Finding]:
    yield Finding("python", "ok", sys.version.split()[0])
    for name, newest in tested.NEWEST.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            is_optional = name == "optuna"
            advice = (
                "Optuna's sweepers need it: pip install '.[sweep]' in samewise's folder"
                if is_optional
                else f"pip install {name}"
            )
            yield Finding(name, "remark" if is_optional else "bad", "not installed", advice)
            continue
        if tested.is_newer(name):
            advice = f"samewise was tested with {name} up to {newest}"
            yield Finding(name, "remark", f"{version}, newer than tested", advice)
        else:
            yield Finding(name, "ok", version)
    try:
        import torch

        # Loads torchvision's operators
        importlib.import_module("torchvision")
        torch.ops.torchvision.nms  # noqa: B018 (raises where the two were built for different releases)
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        yield Finding(
            "torchvision's operators",
            "bad",
            first_line(error),
            "install the torchvision release made for this torch",
        )
    with contextlib.suppress(ImportError):
        importlib.import_module("torchaudio")
    if torchaudio_import.reason:
        yield Finding(
            "torchaudio's library",
            "remark",
            torchaudio_import.reason,
            "forced_align, rnnt_loss and cuda_ctc_decoder are missing; lfilter and overdrive "
            "are slow",
        )


def _device() -> Iterator[Finding]:
    import torch

    yield Finding("cpu", "ok", f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            yield Finding(
                f"cuda:{number}",
                "ok",
                f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
            )
    # The driver makes this file, whatever torch was built for
    elif Path("/dev/nvidiactl").exists():
        yield Finding(
            "cuda",
            "bad",
            "there is an NVIDIA device, but torch cannot use it",
            f"torch was built for CUDA {torch.version.cuda}: update the driver",
        )
    else:
        yield Finding("cuda", "remark", "none: training runs on the CPU")


def _threads() -> Iterator[Finding]:
    dynamic = os.environ.get("OMP_DYNAMIC", "").lower() == "true"
    yield Finding(
        "OMP_DYNAMIC",
        "bad" if dynamic else "ok",
        os.environ.get("OMP_DYNAMIC", "not set"),
        "unset it: torch hangs" if dynamic else "",
    )


def _same_bits() -> Iterator[Finding]:
    """Train a small network twice for five steps from the same seed, and compare."""
    import torch

    from samewise.runner.records.digest import weights_sha256

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(True)

    def trained() -> str:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 36, 4),
        ).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(16, 3, 8, 8).to(device)).square().mean().backward()
            optimizer.step()
        return weights_sha256(model.state_dict())

    first, second = trained(), trained()
    same = first == second
    yield Finding(
        "same bits twice",
        "ok" if same else "bad",
        f"{first[:16]}... on {device}" if same else f"two trainings on {device} differ",
        "" if same else "this machine computes unreliably",
    )


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if folder.exists():
        free = shutil.disk_usage(folder).free
        small = free < 512 * 2**20
        yield Finding(
            "/dev/shm",
            "remark" if small else "ok",
            f"{free / 2**20:.0f} MiB free",
            "loader workers pass batches through it: start the container with --shm-size=2g"
            if small
            else "",
        )


def _disk(run_root: Path) -> Iterator[Finding]:
    refusal = try_writing(run_root)
    yield Finding(
        "run_root",
        "bad" if refusal else "ok",
        f"{run_root}, not writable: {refusal}" if refusal else f"{run_root}, writable",
        "set run_root=FOLDER" if refusal else "",
    )
    free = shutil.disk_usage(nearest_existing(run_root)).free
    yield Finding(
        "disk",
        "ok" if free > 5 * 2**30 else "remark",
        f"{free / 2**30:.1f} GiB free",
        "" if free > 5 * 2**30 else "checkpoints need space",
    )


def _git() -> Iterator[Finding]:
    git = shutil.which("git")
    yield Finding(
        "git",
        "ok" if git else "remark",
        git or "not found",
        "" if git else "runs will not record the commit they ran at",
    )
