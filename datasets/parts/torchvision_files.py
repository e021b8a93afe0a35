"""Loads torchvision's data sets, and explains missing files."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.error import URLError

from filelock import FileLock
from torch import Tensor

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


def load_part(
    kind: Callable[..., Made], split: str, *, root: str, expected: str, download: bool
) -> Made:
    """Return the part of a torchvision data set that contains a split; otherwise as `load`.

    "test" has its own part; "train" and "valid" share the other.
    """
    return load(
        partial(kind, train=split != "test"), root=root, expected=expected, download=download
    )


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
