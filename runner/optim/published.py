"""Weights published by torchvision and torchaudio, by name: from torch's hub cache, or downloaded
to it; checksums are compared before a file is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.hub import download_url_to_file

from samewise.runner.errors import ConfigError, Problem, first_line, nearest
from samewise.runner.records.files import sha256

PATH: Final = "initialise.weights"
SOURCES: Final = ("torchvision:", "torchaudio:")
AUDIO: Final = "https://download.pytorch.org/torchaudio/"


def load_published(name: str, *, made_by: str = "", sha256: str | None = None) -> dict[str, Tensor]:
    """Load the weights of that name, in the layout of the library's own model.

    ConfigError if the weights do not exist, cannot be downloaded, or differ from the file in the
    cache.

    Args:
        name: `torchvision:IMAGENET1K_V2`, of the model that the config makes;
            `torchvision:ResNet50_Weights.IMAGENET1K_V2`, of any; `torchaudio:BUNDLE`.
        made_by: The model's `_target_`.
        sha256: What the file's must be, or begin with. torchvision publishes its own.
    """
    file, url, checksum, make = (
        _load_torchvision(name, made_by)
        if name.startswith("torchvision:")
        else _load_torchaudio(name, sha256)
    )
    fetch(url, file, checksum or sha256 or "")
    require_checksum(file, checksum or sha256, name)
    require_checksum(file, sha256, name)
    with torch.random.fork_rng(
        devices=[]
    ):  # the library's model is discarded: its random numbers do not come from ours
        return dict(make().state_dict())


def fetch(url: str, file: Path, checksum: str) -> None:
    """Download a file unless it exists.

    ConfigError if that fails or the checksum does not match. It appears whole or not at all,
    whoever else fetches it.
    """
    if file.is_file():
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        download_url_to_file(url, str(file), checksum, progress=False)
    except (OSError, RuntimeError) as error:  # no network, full disk, wrong checksum
        hint = f"download {url} on a machine with network access, and copy the file to {file}"
        raise ConfigError(
            Problem(
                PATH,
                f"cannot be downloaded: {first_line(error)}",
                url,
                f"network access, or the file at {file}",
                hint,
            )
        ) from None


def require_checksum(file: Path, expected: str | None, name: str) -> None:
    """Raise a ConfigError if a file's SHA-256 does not begin as expected, or no checksum is known."""
    digest = sha256(file)
    if expected is None and name.startswith("torchaudio:"):
        hint = f"initialise.sha256={digest} accepts the file that was downloaded ({file})"
        raise ConfigError(
            Problem(
                "initialise.sha256",
                "is missing: torchaudio publishes no checksums of its weights",
                None,
                "the SHA-256 of the file",
                hint,
            )
        )
    if expected is not None and (len(expected) < 8 or not digest.startswith(expected.lower())):
        words = f"the file in torch's cache does not match its checksum: {file}"
        raise ConfigError(
            Problem(PATH, words, digest, expected, "delete it, and it will be downloaded again")
        )


Found = tuple[Path, str, str | None, Callable[[], nn.Module]]


def _load_torchvision(name: str, made_by: str) -> Found:
    from torchvision import models

    listed = {model: models.get_model_weights(model) for model in models.list_models()}
    every = {
        f"{weights.__name__}.{one.name}": (model, one)
        for model, weights in listed.items()
        for one in weights
    }
    wanted = name.removeprefix("torchvision:")
    own = made_by.rpartition(".")[2] if made_by.startswith("torchvision.models.") else ""
    if own in listed and "." not in wanted:
        wanted = f"{listed[own].__name__}.{wanted}"
    if wanted not in every:
        choices: Iterable[str] = (
            [one for one in every if one.startswith(f"{listed[own].__name__}.")]
            if own in listed
            else every
        )
        expected = (
            ", ".join(f"torchvision:{one}" for one in choices)
            if own in listed
            else "torchvision:MODEL_Weights.NAME, as torchvision.models lists them"
        )
        raise ConfigError(
            Problem(
                PATH,
                "torchvision publishes no such weights",
                name,
                expected,
                nearest(wanted, _model_weights(wanted, every) or choices),
            )
        )
    model, weights = every[wanted]
    file = weights.url.rpartition("/")[2]
    checksum = re.search(r"-([0-9a-f]{8,})\.", file)
    return (
        _hub("checkpoints", file),
        weights.url,
        checksum[1] if checksum else None,
        lambda: models.get_model(model, weights=weights, progress=False),
    )


def _model_weights(name: str, every: Iterable[str]) -> list[str]:
    """The weights of the model named `resnet18`, in any spelling that torchvision accepts."""
    plain = name.replace("_", "").replace("-", "").lower()
    return [one for one in every if one.partition("_Weights.")[0].replace("_", "").lower() == plain]


def _load_torchaudio(name: str, sha256: str | None) -> Found:
    from torchaudio import pipelines

    bundles = {
        key: one
        for key, one in vars(pipelines).items()
        if key.isupper() and (hasattr(one, "_params") or hasattr(one, "_model_path"))
    }
    wanted = name.removeprefix("torchaudio:")
    if wanted not in bundles:
        expected = "torchaudio:BUNDLE, as torchaudio.pipelines lists them"
        raise ConfigError(
            Problem(
                PATH,
                "torchaudio publishes no such weights",
                name,
                expected,
                nearest(wanted, bundles),
            )
        )
    bundle: Any = bundles[wanted]
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
