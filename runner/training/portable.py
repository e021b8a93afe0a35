"""What the CPU computes alike on every CPU under `reproducibility=portable`: operators in place of torch's own that do not, and what has been tested.

Square roots: torch takes them from MKL, which begins with the processor's approximation of 1/sqrt(x) (`rsqrtps`): AMD's is not Intel's, whatever MKL_CBWR
says, and one root in six is not the nearest number. NumPy's instruction (`sqrtps`) rounds correctly everywhere, as IEEE 754 asks.

Sampling of images (`grid_sample`): torch's vectorised kernel gathers pixels by an instruction on which the emulator crashes by which other CPUs are tested
(qemu-user 7.2). Its scalar kernel is compiled for every x86-64 CPU alike. It takes three times as long, a millisecond for 64 images of 32 by 32 pixels.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samewise.runner.config.fingerprint import targets

VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
"""What restricts torch, oneDNN and MKL to the instructions of every x86-64-v3 CPU."""

TESTED = frozenset(
    {
        *("samewise.recipes.classification.Classification", "samewise.recipes.models.resnet.resnet18_small", "samewise.recipes.models.resnet.resnet_cifar"),
        "torchvision.models.resnet50",
        *("samewise.recipes.detection.Detection", "samewise.recipes.models.retinanet.retinanet"),
        *("samewise.recipes.speech_recognition.SpeechRecognition", "samewise.recipes.models.wav2letter.Wav2Letter"),
        *("samewise.recipes.vocoder.Vocoder", "torchaudio.models.WaveRNN", "samewise.recipes.separation.Separation", "torchaudio.models.ConvTasNet"),
        *("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW", "samewise.runner.precision.Precision"),
        *(f"samewise.datasets.transforms.{name}" for name in ("affine.RandomAffine", "numeric.Normalize", "numeric.ToFloat")),
        *(f"samewise.datasets.transforms.geometry.{name}" for name in ("CenterCrop", "RandomCrop", "RandomHorizontalFlip")),
        *("samewise.datasets.transforms.detection.RandomHorizontalFlipWithBoxes", "samewise.datasets.transforms.photometric.RandomPhotometricDistort"),
        *(f"torchvision.transforms.v2.{name}" for name in ("CenterCrop", "RandomHorizontalFlip", "RandomResizedCrop", "Resize")),
        *(f"torchvision.transforms.v2.{name}" for name in ("RandomIoUCrop", "RandomZoomOut", "SanitizeBoundingBoxes")),
        *(f"samewise.datasets.transforms.speech_augment.{name}" for name in ("Noise", "SpecAugment", "SpeedPerturbation")),
        *("samewise.datasets.transforms.speech_features.LogMel", "samewise.datasets.transforms.vocoder_mel.VocoderMel"),
    }
)
"""What computes in the experiments that are trained on other CPUs (`tests/runner/test_portable.py`)."""

COMPUTING = ("model", "recipe", "optimizer", "transforms", "precision")
"""The sections of a config whose components torch computes."""

_registered: list[Any] = []


def untested(whole: Mapping[str, Any]) -> list[str]:
    """What a plain config names that computes, and of which nobody has seen whether other CPUs give the same bits."""
    settings = {"compile.mode": (whole["compile"]["mode"], "off"), "precision.dtype": (whole["precision"]["dtype"], "float32")}
    found = [name for name in targets({section: whole.get(section) for section in COMPUTING}) if name not in TESTED]
    return found + [f"{path}={value}" for path, (value, tested) in settings.items() if str(value) != tested]


def is_portable(whole: Mapping[str, Any], device: torch.device) -> bool:
    """Whether another x86-64-v3 CPU gives the same bits: as far as torch computes, not what a data set decodes.

    Args:
        whole: The plain config. `determinism.apply` has set its switches.
        device: Where it computes.
    """
    variables = whole["reproducibility"]["variables"]
    restricted = all(str(variables.get(name)) == value for name, value in VARIABLES.items())
    here = device.type == "cpu" and platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return restricted and here and not untested(whole)


def use_portable_operators(*, wanted: bool) -> None:
    """Have torch compute by these operators from now on, in this process, or by its own again.

    `x ** 0.5` goes to MKL all the same, and a sampled image's gradient to torch's own kernel. Norms, batch norm and the fused optimizers have correct roots of
    their own.
    """
    if wanted == bool(_registered):
        return
    if not wanted:
        _registered.pop()._destroy()
        return
    library = torch.library.Library("aten", "IMPL")
    operators = {"sqrt": _sqrt, "sqrt_": _sqrt_in_place, "sqrt.out": _sqrt_out, "grid_sampler_2d": torch.ops.aten._grid_sampler_2d_cpu_fallback}
    for name, function in operators.items():
        library.impl(name, function, "CPU", allow_override=True)
    _registered.append(library)


def _sqrt(value: Tensor) -> Tensor:
    """Of any shape and dtype, as torch's: integers give the default dtype."""
    dtype = value.dtype if value.is_floating_point() or value.is_complex() else torch.get_default_dtype()
    computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    found = torch.empty_like(value, dtype=computed, requires_grad=False)
    with np.errstate(invalid="ignore"):  # NaN, as torch gives
        np.sqrt(value.detach().to(computed).resolve_conj().resolve_neg().numpy(), out=found.numpy())
    return found.to(dtype)


def _sqrt_in_place(value: Tensor) -> Tensor:
    return value.copy_(_sqrt(value))


def _sqrt_out(value: Tensor, *, out: Tensor) -> Tensor:
    return out.resize_(value.shape).copy_(_sqrt(value))
