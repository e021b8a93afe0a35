"""Opens a run by any of its names: its folder, or a copy from a bundle or an MLflow store.

Copies are in temporary folders. Imports mlflow only for a store.
"""

import re
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from samewise.runner.bundles import archive
from samewise.runner.config import saved
from samewise.runner.errors import ConfigError, Problem, SamewiseError
from samewise.runner.records import shapes, trust
from samewise.runner.records.files import LARGEST, read_json
from samewise.runner.records.folder import SHARDS, RunFolder
from samewise.runner.tracking.address import check_uri, remove_password, require_there
from samewise.runner.tracking.sender import quiet_mlflow

RUN = (
    "a run's folder or name, the start of its fingerprint, its MLflow run id or address "
    "(runs:/ID), or a bundle"
)
_ID = re.compile(r"[0-9a-f]{32}")
# The address of a run's page in the MLflow UI, which names the server too
_PAGE = re.compile(r"(https?://[^#]+?)/?#/experiments/\d+/runs/([0-9a-f]{32})(?:[/?].*)?")
_PARTS = ("config.yaml", "environment.json", "sources.json", "summary.json", "trace.jsonl")
# Folders of this machine, and files that the server itself hands out
_NEAR = ("", "file", "mlflow-artifacts")


class Stored(NamedTuple):
    """A run in an MLflow store."""

    run_id: str
    uri: str | None
    """The store's address; None: the store of the run root."""


@contextmanager
def open_received(
    name: str, *, run_root: Path, uri: str | None = None, trust: bool = False
) -> Generator[RunFolder]:
    """Open the run called `name`.

    The folder of a run from a bundle or a store is temporary, and a stranger's: `records.trust`
    decides what may be done with its config.

    Args:
        name: A folder, the start of a fingerprint, an MLflow run id, `runs:/ID`, the address of its
            page in the MLflow UI, or a bundle's file.
        run_root: Where to look for runs, and for the MLflow store if `uri` is None.
        uri: The store to take the run from, even if its folder is here.
        trust: Whether the user trusts its source.

    Raises:
        ConfigError: There is no such run, or the store does not answer.
    """
    stored = _parse_address(name, uri)
    if stored is None and Path(name).is_file():
        with tempfile.TemporaryDirectory(prefix="samewise-bundle-") as temporary:
            archive.unpack(Path(name), Path(temporary))
            yield RunFolder(Path(temporary, archive.RUN))
        return
    if stored is None or stored.uri is None:
        store = run_root / "mlflow.db"
        try:
            folder = saved.find(stored.run_id if stored else name, run_root=run_root)
        except ConfigError:
            # The run's folder may be gone while MLflow still has the run
            if stored is None or not store.is_file():
                raise
            stored = stored._replace(uri=f"sqlite:///{store}")
        else:
            yield folder
            return
    with tempfile.TemporaryDirectory(prefix="samewise-run-") as temporary:
        yield fetch(stored.run_id, str(stored.uri), Path(temporary, stored.run_id), trust=trust)


def _parse_address(name: str, uri: str | None) -> Stored | None:
    if page := _PAGE.fullmatch(name):
        return Stored(page[2], uri or page[1])
    run_id = name.removeprefix("runs:/").strip("/")
    if _ID.fullmatch(run_id):
        return Stored(run_id, uri)
    ConfigError.raise_if(
        uri or name.startswith("runs:/"),
        "RUN",
        "is not an MLflow run id",
        name,
        "32 hexadecimal digits",
        "`samewise runs --uri URI` lists a store's runs",
    )
    return None


def fetch(run_id: str, uri: str, into: Path, *, trust: bool = False) -> RunFolder:
    """Download a run from an MLflow store, laid out as a run's folder.

    Args:
        run_id: Id of the MLflow run.
        uri: The store's address, which the user has named: MLflow's tokens are sent there.
        into: The folder to make.
        trust: Whether to allow artifacts that the store keeps in a third place.

    Raises:
        ConfigError: The store does not answer, has no such run, or lacks a part of it.
    """
    checked = check_uri(uri, path="--uri")
    require_there(checked, path="--uri")
    store = remove_password(uri)
    with quiet_mlflow():
        from samewise.runner.tracking.store import open_reader

        with open_reader(
            checked,
            lambda reason: Problem(
                "RUN", f"cannot be read from {store}: {reason}", run_id, "a run of that store"
            ),
        ) as client:
            _require_near(str(client.get_run(run_id).info.artifact_uri), checked, trust=trust)
            return _download(client, run_id, into, store)


def _require_near(artifacts: str, uri: str, *, trust: bool) -> None:
    """Raise an error for artifacts in a cloud or on another host."""
    # A store from someone else could send this user's credentials anywhere
    parts, server = urlsplit(artifacts), urlsplit(uri)
    is_near = parts.scheme in _NEAR and (parts.hostname, parts.port) in (
        (None, None),
        (server.hostname, server.port),
    )
    ConfigError.raise_if(
        not is_near and not trust,
        "RUN",
        "the store keeps the run's files in another place",
        remove_password(artifacts),
        hint="if you trust whoever made the store, add --trust: MLflow then connects there, "
        "with credentials of yours that it finds",
    )


def _download(client: Any, run_id: str, into: Path, store: str) -> RunFolder:
    from samewise.runner.tracking.sending import SIGNATURE

    into.mkdir(parents=True)
    folder = RunFolder(into)
    stored = {str(x.path): x.file_size or 0 for x in client.list_artifacts(run_id)}
    ConfigError.raise_if(
        "config.yaml" not in stored,
        "RUN",
        f"{store} does not have its config.yaml",
        run_id,
        "a run that samewise trained",
    )
    sizes = {name: size for name, size in stored.items() if name in (*_PARTS, SIGNATURE)}
    ConfigError.raise_all(
        Problem(f"{run_id}: {name}", f"is larger than any that samewise writes: {size} bytes")
        for name, size in sizes.items()
        # The trace is read by lines, the other files whole
        if size > LARGEST and name != folder.trace.name
    )
    for place in ("checkpoint", f"checkpoint/{SHARDS}"):
        if place in stored:
            artifacts = client.list_artifacts(run_id, place)
            stored |= {str(x.path): 0 for x in artifacts}
            sizes |= {
                f"{place}/{Path(str(x.path)).name}": x.file_size or 0
                for x in artifacts
                if not x.is_dir
            }
    for name in sizes:
        # By way of an empty folder, since MLflow copies `checkpoint/x` of a store's folder to `x`
        with tempfile.TemporaryDirectory(prefix=".download-", dir=into) as empty:
            download = Path(client.download_artifacts(run_id, name, empty))
            into.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            download.rename(into / name)
    if (signature := into / SIGNATURE).is_file():
        signature.rename(folder.config.with_name(trust.SIGNATURE))
    folder.checkpoints.mkdir()
    if (checkpoint := into / "checkpoint").is_dir():
        _move_into_place(checkpoint, folder)
    return folder


def _move_into_place(checkpoint: Path, folder: RunFolder) -> None:
    try:
        step = int((read_json(checkpoint / "manifest.json", shapes.MANIFEST) or {})["step"])
    except (SamewiseError, KeyError):
        # Loading the checkpoint reports the problem
        step = 0
    checkpoint.rename(folder.checkpoints / f"step-{step:08d}")
