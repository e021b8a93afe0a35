"""Lists the settings of `reproducibility=portable`, and the components tested with it."""

import platform
from collections.abc import Mapping
from typing import Any

import torch

from samewise.runner.config.fingerprint import targets

VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
"""Variables that restrict torch, oneDNN and MKL to the instructions of every x86-64-v3 CPU."""

TESTED = frozenset(
    {
        *(
            "samewise.recipes.classification.Classification",
            "samewise.recipes.models.resnet.resnet18_small",
            "samewise.recipes.models.resnet.resnet_cifar",
        ),
        "torchvision.models.resnet50",
        *("samewise.recipes.detection.Detection", "samewise.recipes.models.retinanet.retinanet"),
        *(
            "samewise.recipes.speech_recognition.SpeechRecognition",
            "samewise.recipes.models.wav2letter.Wav2Letter",
        ),
        *(
            "samewise.recipes.vocoder.Vocoder",
            "torchaudio.models.WaveRNN",
            "samewise.recipes.separation.Separation",
            "torchaudio.models.ConvTasNet",
        ),
        *(
            "torch.optim.SGD",
            "torch.optim.Adam",
            "torch.optim.AdamW",
            "samewise.runner.precision.Precision",
        ),
        *(
            f"samewise.datasets.transforms.{name}"
            for name in ("affine.RandomAffine", "numeric.Normalize", "numeric.ToFloat")
        ),
        *(
            f"samewise.datasets.transforms.geometry.{name}"
            for name in ("CenterCrop", "RandomCrop", "RandomHorizontalFlip")
        ),
        *(
            "samewise.datasets.transforms.detection.RandomHorizontalFlipWithBoxes",
            "samewise.datasets.transforms.photometric.RandomPhotometricDistort",
        ),
        *(
            f"torchvision.transforms.v2.{name}"
            for name in ("CenterCrop", "RandomHorizontalFlip", "RandomResizedCrop", "Resize")
        ),
        *(
            f"torchvision.transforms.v2.{name}"
            for name in ("RandomIoUCrop", "RandomZoomOut", "SanitizeBoundingBoxes")
        ),
        *(
            f"samewise.datasets.transforms.speech_augment.{name}"
            for name in ("Noise", "SpecAugment", "SpeedPerturbation")
        ),
        *(
            "samewise.datasets.transforms.speech_features.LogMel",
            "samewise.datasets.transforms.vocoder_mel.VocoderMel",
        ),
    }
)
"""The components of the experiments that `tests/runner/test_portable.py` trains on other CPUs."""

COMPUTING = ("model", "recipe", "optimizer", "transforms", "precision")
"""The sections of a config whose components torch computes."""


def untested_components(whole: Mapping[str, Any]) -> list[str]:
    """Return a plain config's components that compute, and were not tested on other CPUs."""
    settings = {
        "compile.mode": (whole["compile"]["mode"], "off"),
        "precision.dtype": (whole["precision"]["dtype"], "float32"),
    }
    components = [
        name
        for name in targets({section: whole.get(section) for section in COMPUTING})
        if name not in TESTED
    ]
    return components + [
        f"{path}={value}" for path, (value, tested) in settings.items() if str(value) != tested
    ]


def is_portable(whole: Mapping[str, Any], device: torch.device) -> bool:
    """Whether torch gives the same bits on other x86-64-v3 CPUs; decoding data may still differ.

    Call it after `determinism.apply`.
    """
    variables = whole["reproducibility"]["variables"]
    restricted = all(str(variables.get(name)) == value for name, value in VARIABLES.items())
    here = (
        device.type == "cpu"
        and platform.machine() == "x86_64"
        # The variable counts only if it was set before torch was imported
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    )
    return restricted and here and not untested_components(whole)
