"""The experiments that test `reproducibility=portable`, trained in one process; the digests of their traces are printed.

python portable_runs.py FOLDER NAME...
"""

import hashlib
import sys
from pathlib import Path

EXPERIMENTS = {
    "resnet": ["experiment=resnet18_digits", "model.width=4"],
    "resnet50": ["experiment=resnet_cifar10", "dataset=generated_classification", "model=resnet50", "batch_size=4", "max_steps=2"],
    "resnet_cifar": ["experiment=resnet_cifar10", "dataset=generated_classification", "batch_size=8"],
    "imagenet": [
        *("experiment=resnet50_imagenet", "dataset=generated_classification", "model=resnet18_small", "model.width=4", "batch_size=2", "replicas=1"),
        "max_steps=2",
    ],
    "retinanet": ["experiment=retinanet_coco", "transforms=detection_ssd", "batch_size=2", "replicas=1", "model.channels=16", "max_steps=2"],
    "wav2letter": ["experiment=wav2letter_spoken_digits", "model.width=32"],
    "wavernn": ["experiment=wavernn_spoken_digits", "max_steps=3"],
    "conv_tasnet": ["experiment=conv_tasnet_spoken_digits"],
}
COMMON = ["reproducibility=portable", "debug=tiny", "max_steps=5", "tracking=none", "callbacks=none", "evaluate.pictures=false", "loader.num_workers=0"]


def main(folder: Path, names: list[str]) -> None:
    """Train them, and print the digest of each trace."""
    from samewise.runner.cli import main as samewise

    for name in names:
        name, *given = name.split(",")
        root = folder / name
        assert samewise(["train", *COMMON, *EXPERIMENTS[name], *given, f"run_root={root}"]) == 0
        (trace,) = root.glob("*/*/trace.jsonl")
        print("DIGEST", name, *given, hashlib.sha256(trace.read_bytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
