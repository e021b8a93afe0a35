"""Lists the newest releases that `make test` or `make test-newest` ran with."""

from importlib import metadata

from packaging.version import Version

NEWEST = {
    "torch": "2.15",
    "torchvision": "0.29",
    "torchaudio": "2.11",
    "hydra-core": "1.4",
    "omegaconf": "2.4",
    "mlflow": "3.18",
    "optuna": "5.0",
}


def is_newer(package: str) -> bool:
    """Whether the installed release of a package in NEWEST is newer than the one there."""
    return Version(metadata.version(package)).release[:2] > Version(NEWEST[package]).release
