"""The counts recorded in counts.json, and how other counts differ from them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torchvision

from pretended_cuda.counts import KINDS, Counts

FILE: Final = Path(__file__).parents[1] / "counts.json"
COMMAND: Final = "python tests/pretend/write_counts.py"
RECIPES: Final[Mapping[str, tuple[str, ...]]] = {
    "classification": ("experiment=resnet18_digits",),
    "audio_classification": ("experiment=audio_classification_spoken_digits",),
    "detection": ("experiment=retinanet_coco", "batch_size=2", "replicas=1", "evaluate.batch_size=2"),
    "segmentation": ("experiment=fcn_digit_masks",),
    "speech_recognition": ("experiment=wav2letter_spoken_digits",),
    "separation": ("experiment=conv_tasnet_spoken_digits",),
    "vocoder": ("experiment=wavernn_spoken_digits", "dataset.valid_samples=100"),
    "text_classification": ("experiment=transformer_unicode_categories",),
    "language_modelling": ("experiment=gpt_unicode_names", "recipe.objective=masked"),
    "adversarial": ("experiment=gan_digits", "replicas=2"),
    "regression": ("experiment=linear_diabetes",),
    "autoencoder": ("experiment=autoencoder_digits",),
}
"""An experiment of each recipe but `instance_segmentation`: in deterministic mode torchvision compiles its RoI align, which no pretended device can run."""
Written = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Of one recipe: by section (step, evaluation_batch), kind and function. What a kind comes to is the sum over functions."""


def versions() -> dict[str, str]:
    """Those that decide which operators a function becomes."""
    return {"torch": torch.__version__.partition("+")[0], "torchvision": torchvision.__version__.partition("+")[0]}


def read(file: Path = FILE) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def write(found: Mapping[str, Mapping[str, Counts]], file: Path = FILE) -> None:
    """Write the counts of some recipes; the others remain unchanged."""
    recipes = {**read(file).get("recipes", {}), **{name: plain(counts) for name, counts in found.items()}}
    file.write_text(json.dumps({"versions": versions(), "recipes": {name: recipes[name] for name in RECIPES if name in recipes}}, indent=1) + "\n")


def plain(found: Mapping[str, Counts]) -> Written:
    """What of a recipe's counts is written: not the bytes of an evaluation, which may depend on what a model answers."""
    return {section: {kind: counts.functions(kind) for kind in KINDS if section == "step" or not kind.startswith("bytes")} for section, counts in found.items()}


def differences(written: Written, found: Mapping[str, Counts]) -> list[str]:
    """In words: which sums differ, from what to what, and in which functions and lines."""
    told = list[str]()
    for section, kinds in plain(found).items():
        for kind, functions in kinds.items():
            before = written.get(section, {}).get(kind, {})
            if sum(before.values()) != sum(functions.values()):
                told.append(f"{section}: {kind} {sum(before.values())} -> {sum(functions.values())}   ({KINDS[kind]})")
                told += [f"    {line}" for line in _changed(before, functions, found[section], kind)]
    return told


def _changed(before: Mapping[str, int], after: Mapping[str, int], counts: Counts, kind: str) -> Iterable[str]:
    for function in sorted({*before, *after}):
        if before.get(function, 0) != after.get(function, 0):
            lines = ", ".join(f"{amount} at {place}" for place, amount in counts.lines(kind, function).items())
            yield f"{function}: {before.get(function, 0)} -> {after.get(function, 0)}" + (f": {lines}" if lines else "")
