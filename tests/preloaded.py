"""Imported once, by the process of which `forked.py` makes forks: what each would otherwise import, compose and read by itself.

It starts no thread and asks for no device, since a fork would have neither. tests/ is on sys.path only until this file is found.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:] = [place for place in sys.path if place != str(HERE)]
os.environ["PYTHONPATH"] = os.pathsep.join(place for place in os.environ["PYTHONPATH"].split(os.pathsep) if place != str(HERE))
gc.disable()

RECIPES = (
    *("classification", "detection", "segmentation", "speech_recognition", "separation", "vocoder", "audio_classification", "adversarial", "regression"),
    *("autoencoder", "language_modelling", "text_classification"),
)
for name in (
    *("filelock", "matplotlib.figure", "psutil", "rich.console", "rich.progress", "torch.distributed.fsdp", "torchvision.transforms.v2"),
    *(f"samewise.recipes.{recipe}" for recipe in RECIPES),
    *(f"samewise.recipes.models.{model}" for model in ("resnet", "retinanet", "wav2letter", "wavernn")),
    *("samewise.datasets.generated", "samewise.datasets.transforms.images", "samewise.datasets.digits"),
    *(f"samewise.runner.callbacks.{callback}" for callback in ("ema", "learning_rate", "progress", "throughput")),
    *(f"samewise.runner.strategies.{strategy}" for strategy in ("single", "elastic")),
    *("samewise.runner.cli", "samewise.runner.commands.train", "samewise.runner.config.check.components", "samewise.runner.config.saved"),
    *("samewise.runner.training.launch", "samewise.runner.training.loop", "samewise.runner.training.prepare", "samewise.runner.tracking.best"),
):
    importlib.import_module(name)

from samewise.runner.config.compose import compose  # noqa: E402
from samewise.runner.config.project import Project  # noqa: E402
from samewise.runner.records import own_code  # noqa: E402

_ = compose(["experiment=resnet18_digits", "debug=tiny"], project=Project(HERE.parent)).fingerprint
own_code.record(
    name for name in sys.modules if name.startswith(("samewise.recipes.", "samewise.datasets.", "samewise.runner.callbacks.", "samewise.runner.strategies."))
)

gc.enable()
gc.freeze()
