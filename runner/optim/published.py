"""Weights published by torchvision and torchaudio, by name, from torch's hub cache.

They are downloaded to it where necessary. Checksums are compared before a file is read.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.hub import download_url_to_file

from samewise.runner.errors import ConfigError, Problem, did_you_mean, first_line, nearest
from samewise.runner.records.files import require_downloaded, sha256

PATH: Final = "initialise.weights"
SOURCES: Final = ("torchvision:", "torchaudio:")
AUDIO: Final = "https://download.pytorch.org/torchaudio/"


def load_published(name: str, *, made_by: str = "", sha256: str | None = None) -> dict[str, Tensor]:
    """Load published weights by name, in the layout of the library's own model.

    Args:
        name: `torchvision:IMAGENET1K_V2` for the config's model,
            `torchvision:ResNet50_Weights.IMAGENET1K_V2` for any, or `torchaudio:BUNDLE`.
        made_by: The model's `_target_`.
        sha256: The file's SHA-256, or its beginning. torchvision publishes its own.

    Raises:
        ConfigError: The weights do not exist, cannot be downloaded, or differ from the file in the
            cache.
    """
    file, url, checksum, make = (
        _load_torchvision(name, made_by)
        if name.startswith("torchvision:")
        else _load_torchaudio(name, sha256)
    )
    fetch(url, file, checksum or sha256 or "")
    require_checksum(file, checksum or sha256, name)
    # torchvision's checksum is the beginning of a SHA-256; the config's may say more
    require_checksum(file, sha256, name)
    # The library's model is discarded; it must not draw from the experiment's generator.
    with torch.random.fork_rng(devices=[]):
        return dict(make().state_dict())


def fetch(url: str, file: Path, checksum: str) -> None:
    """Download a file unless it exists.

    It appears complete or not at all, also where several processes download it.

    Raises:
        ConfigError: The download fails, or the checksum does not match.
    """
    if file.is_file():
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        download_url_to_file(url, str(file), checksum, progress=False)
    # No network, a full disk, or a wrong checksum.
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            Problem(
                PATH,
                f"cannot be downloaded: {first_line(error)}",
                url,
                f"network access, or the file at {file}",
                f"download {url} on a machine with network access, and copy the file to {file}",
            )
        ) from None


def require_checksum(file: Path, expected: str | None, name: str) -> None:
    """Raise a ConfigError if a file's SHA-256 does not begin as expected, or none is known."""
    digest = sha256(file)
    if expected is None and name.startswith("torchaudio:"):
        require_downloaded(file)
        raise ConfigError(
            Problem(
                "initialise.sha256",
                "is missing: torchaudio publishes no checksums of its weights",
                None,
                "the SHA-256 of the file",
                f"initialise.sha256={digest} accepts the file that was downloaded ({file})",
            )
        )
    ConfigError.raise_if(
        expected is not None and (len(expected) < 8 or not digest.startswith(expected.lower())),
        PATH,
        f"the file in torch's cache does not match its checksum: {file}",
        digest,
        expected or "",
        "delete it, and it will be downloaded again",
    )


# File, address, checksum, and the library's function that makes the model.
Source = tuple[Path, str, str | None, Callable[[], nn.Module]]


def _load_torchvision(name: str, made_by: str) -> Source:
    from torchvision import models

    weights_of_model = {model: models.get_model_weights(model) for model in models.list_models()}
    weights_by_name = {
        f"{weights.__name__}.{x.name}": (model, x)
        for model, weights in weights_of_model.items()
        for x in weights
    }
    weights_name = name.removeprefix("torchvision:")
    own_model = made_by.rpartition(".")[2] if made_by.startswith("torchvision.models.") else ""
    # A name without a class stands for the config's model
    if own_model in weights_of_model and "." not in weights_name:
        weights_name = f"{weights_of_model[own_model].__name__}.{weights_name}"
    choices: Iterable[str] = (
        [x for x in weights_by_name if x.startswith(f"{weights_of_model[own_model].__name__}.")]
        if own_model in weights_of_model
        else weights_by_name
    )
    ConfigError.raise_if(
        weights_name not in weights_by_name,
        PATH,
        "torchvision publishes no such weights",
        name,
        ", ".join(f"torchvision:{x}" for x in choices)
        if own_model in weights_of_model
        else "torchvision:MODEL_Weights.NAME, as torchvision.models lists them",
        nearest(weights_name, _model_weights(weights_name, weights_by_name))
        or did_you_mean(weights_name, choices),
    )
    model, weights = weights_by_name[weights_name]
    file = weights.url.rpartition("/")[2]
    # torchvision's file names end in the beginning of the file's SHA-256
    checksum = re.search(r"-([0-9a-f]{8,})\.", file)
    return (
        _hub("checkpoints", file),
        weights.url,
        checksum[1] if checksum else None,
        lambda: models.get_model(model, weights=weights, progress=False),
    )


def _model_weights(name: str, names: Iterable[str]) -> list[str]:
    """Return the weights of a model (`resnet18`), in any spelling that torchvision accepts."""
    plain = name.replace("_", "").replace("-", "").lower()
    return [x for x in names if x.partition("_Weights.")[0].replace("_", "").lower() == plain]


def _load_torchaudio(name: str, sha256: str | None) -> Source:
    from torchaudio import pipelines

    bundles = {
        key: value
        for key, value in vars(pipelines).items()
        if key.isupper() and (hasattr(value, "_params") or hasattr(value, "_model_path"))
    }
    bundle_name = name.removeprefix("torchaudio:")
    ConfigError.raise_if(
        bundle_name not in bundles,
        PATH,
        "torchaudio publishes no such weights",
        name,
        "torchaudio:BUNDLE, as torchaudio.pipelines lists them",
        nearest(bundle_name, bundles),
    )
    bundle: Any = bundles[bundle_name]
    # torchaudio has no public way to a bundle's file
    if hasattr(bundle, "_model_path"):
        return (
            _hub("torchaudio", bundle._model_path),
            AUDIO + bundle._model_path,
            sha256,
            bundle.get_model,
        )
    url = bundle._path if "://" in bundle._path else f"{AUDIO}models/{bundle._path}"
    return _hub("checkpoints", url.rpartition("/")[2]), url, sha256, bundle.get_model


def _hub(*parts: str) -> Path:
    return Path(torch.hub.get_dir(), *parts)
