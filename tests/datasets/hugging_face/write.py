"""Writes the files beside this one, by the library `datasets` of Hugging Face itself: python tests/datasets/hugging_face/write.py

images/         by save_to_disk: 40 images of two classes, no splits
splits/         by save_to_disk: the same in `train` and `test`
parquet/        by to_parquet: the same, a file for each split
recordings/     by save_to_disk: 12 recordings of two classes, with a speaker
"""

import io
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

import datasets

HERE = Path(__file__).parent


def image(number: int) -> Image.Image:
    """8 x 8, dark for even numbers and bright for odd ones."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 60, (8, 8, 3)).astype(np.uint8) + np.uint8(150 * (number % 2)))


def tone(number: int) -> bytes:
    """A tenth of a second at 8 kHz, low for even numbers and high for odd ones."""
    file = io.BytesIO()
    soundfile.write(file, 0.5 * np.sin(np.arange(800) * (0.1 if number % 2 == 0 else 0.9) + number), 8000, format="WAV")
    return file.getvalue()


def main() -> None:
    features = datasets.Features({"photo": datasets.Image(), "kind": datasets.ClassLabel(names=["night", "day"])})
    images = datasets.Dataset.from_dict({"photo": [image(number) for number in range(40)], "kind": [number % 2 for number in range(40)]}, features=features)
    images.save_to_disk(HERE / "images")
    train, test = images.select(range(30)), images.select(range(30, 40))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(HERE / "splits")
    (HERE / "parquet").mkdir(exist_ok=True)
    for name, part in (("train", train), ("test", test)):
        part.to_parquet(HERE / "parquet" / f"{name}-00000-of-00001.parquet")
    features = datasets.Features(
        {"audio": datasets.Audio(sampling_rate=8000, decode=False), "label": datasets.Value("string"), "who": datasets.Value("string")}
    )
    rows = [{"audio": {"bytes": tone(number), "path": None}, "label": ["low", "high"][number % 2], "who": "abcdef"[number // 2]} for number in range(12)]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(HERE / "recordings")


if __name__ == "__main__":
    main()
