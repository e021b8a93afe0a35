"""Loads torchvision's data sets, and explains missing files."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.error import URLError

import torch
from filelock import FileLock
from torch import Tensor

from samewise.datasets.parts.in_memory import InMemoryImages, Transform
from samewise.runner.errors import ConfigError, DataError, Problem

Made = TypeVar("Made")


def load(make: Callable[..., Made], *, root: str, expected: str, download: bool) -> Made:
    """Return `make(root=..., download=...)`: a torchvision data set with verified checksums.

    Several processes may call it at once: one downloads, the others wait.

    Args:
        make: Makes the data set; raises RuntimeError if files are missing or altered.
        root: The folder that holds the data set's own folder.
        expected: Description of the files in the root, for messages.
        download: Download missing files.

    Raises:
        DataError: The files are missing, altered, or cannot be downloaded.
    """
    folder = Path(root).expanduser().absolute()
    try:
        if not download:
            return make(root=folder, download=False)
        folder.mkdir(parents=True, exist_ok=True)
        # A soft lock would outlive a process that is killed
        with FileLock(folder / ".download.lock", fallback_to_soft=False):
            return make(root=folder, download=True)
    except (URLError, TimeoutError, ConnectionError) as error:
        raise DataError(
            Problem(
                str(folder),
                f"the data set could not be downloaded: {getattr(error, 'reason', error)}",
                expected=expected,
                hint="download the files by hand and put them there",
            )
        ) from None
    except RuntimeError as error:
        if download:
            raise DataError(
                Problem(
                    str(folder), f"the data set could not be downloaded: {error}", expected=expected
                )
            ) from None
        raise DataError(
            Problem(
                str(folder),
                "the data set's files are missing or altered",
                expected=expected,
                hint="set dataset.root=FOLDER to where they are, or dataset.download=true to "
                "download them",
            )
        ) from None
    except OSError as error:
        raise DataError(
            Problem(
                str(folder),
                f"cannot be used: {error.strerror or error}",
                expected="a folder that can be read and written",
            )
        ) from None


def split_held_out(
    images: Tensor, labels: Tensor, *, split: str, held_out: int
) -> tuple[Tensor, Tensor]:
    """Return a split's samples of its part.

    Args:
        images: The part's images, [N, ...].
        labels: The part's labels, [N].
        split: "test" takes all samples, "valid" the last `held_out`, "train" the rest.
        held_out: Number of samples to validate on.

    Raises:
        ConfigError: `held_out` leaves no sample for a split.
    """
    # A slice that ends at -0 would be empty
    if split == "test" or (held_out == 0 and split == "train"):
        return images, labels
    ConfigError.raise_if(
        not 0 < held_out < len(images),
        "held_out",
        f"leaves no image for the {split} split",
        held_out,
        f"1 to {len(images) - 1}",
        "set dataset.held_out to the number of training images to validate on, or "
        "dataset.valid.split=test",
    )
    chosen = slice(-held_out, None) if split == "valid" else slice(None, -held_out)
    return images[chosen], labels[chosen]


class TorchvisionImages(InMemoryImages):
    """Base of a data set that torchvision keeps in memory: a part for "test", and another.

    Args:
        root: The folder that holds the data set's folder.
        split: "train" or "valid", which share the part for training, or "test".
        held_out: Number of training images, the last ones, that are "valid". 0 leaves all images to
            "train".
        download: Download missing files.
        transform: Applied to each image.

    Raises:
        DataError: The files are missing or altered.
        ConfigError: The split would be empty.
    """

    kind: Any
    names: Sequence[str] = ()

    def __init__(
        self,
        *,
        root: str,
        split: Literal["train", "valid", "test"],
        held_out: int = 5000,
        download: bool = False,
        transform: Transform | None = None,
    ) -> None:
        kind = self.kind
        folder = getattr(kind, "base_folder", f"{kind.__name__}/raw")
        listed = kind.resources if hasattr(kind, "resources") else kind.train_list + kind.test_list
        files = ", ".join(name.removesuffix(".gz") for name, _ in listed)
        data = load(
            partial(kind, train=split != "test"),
            root=root,
            expected=f"a folder {folder} with {files}",
            download=download,
        )
        images, labels = map(torch.as_tensor, (data.data, data.targets))
        # torchvision has colour images as [N, H, W, C], grey ones as [N, H, W]
        images = images[:, None] if images.dim() == 3 else images.permute(0, 3, 1, 2)
        super().__init__(
            *split_held_out(images, labels, split=split, held_out=held_out),
            classes=self.names or data.classes,
            transform=transform,
        )
