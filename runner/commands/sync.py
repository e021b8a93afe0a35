"""Send to MLflow, or another tracking backend, what has not been sent."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from samewise.runner.commands import RUN_ROOT, TRUST
from samewise.runner.errors import ConfigError, DamagedFile, SamewiseError, number_of
from samewise.runner.records import locks, shapes
from samewise.runner.records.files import read_mapping
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import RUN
from samewise.runner.records.json_text import to_json
from samewise.runner.records.trust import is_trusted, require
from samewise.runner.tracking import progress
from samewise.runner.tracking.address import check_uri, describe_failure, sqlite_file
from samewise.runner.tracking.backends import (
    TITLES,
    RunGone,
    backends_of,
    last_trouble,
    problems,
)
from samewise.runner.tracking.sender import open_backend, prepare_environment

EXAMPLES = """examples:
  samewise sync                                    every run below runs/
  samewise sync 3f2a                               one run, given by the start of its fingerprint
  samewise sync --run-root /mnt/cluster/runs       runs in another folder
  samewise sync --uri http://tracking:5000         to another store, from the beginning
  samewise sync --to tensorboard                   write event files of every run, whatever backend it used
  samewise sync 3f2a --log-model                   also log its model, for `mlflow models serve`
  samewise sync 3f2a --register digits             also register the model, as the next version of `digits`

What a backend already has is not sent again. Runs that are still training send their own metrics.
Exit codes: 0 everything has been sent; 1 something could not be sent; 2 the run or the store was not found."""


@dataclass(frozen=True)
class SyncResult:
    """Outcome of sending a run to a backend.

    `state` is sent, in_progress, ending, disabled or failed.
    """

    run: str
    state: str
    backend: str = "mlflow"
    metrics: int = 0
    files: int = 0
    mlflow_run_id: str | None = None
    error: str | None = None
    status: str = ""
    model: str | None = None
    registered: dict[str, str] | None = None

    def __str__(self) -> str:
        if self.state == "sent":
            place = (
                f"the MLflow run {self.mlflow_run_id}"
                if self.backend == "mlflow"
                else TITLES[self.backend]
            )
            model = f"; its model is models:/{self.model}" if self.model else ""
            registered = "".join(
                f", registered as models:/{name}/{version}"
                for name, version in (self.registered or {}).items()
            )
            ended = f"; its status was changed from {self.status}" if self.status else ""
            return (
                f"{self.run}: sent {number_of(self.metrics, 'metric')} and "
                f"{number_of(self.files, 'file')} to {place}{ended}{model}{registered}"
            )
        messages = {
            "in_progress": f"in progress; its own process sends it{self.error or ''}",
            "ending": "training has ended, and its own process is still "
            f"sending{self.error or ''}; run the command again when that has finished",
            "disabled": "tracking.enabled is false",
        }
        return f"{self.run}: {messages.get(self.state, f'could not be sent: {self.error}')}"


ARGUMENTS = {
    "runs": {"nargs": "*", "metavar": "RUN", "help": f"{RUN} (default: every run)"},
    **RUN_ROOT,
    "--uri": {"help": "a store other than the run's own"},
    "--to": {
        "action": "append",
        "choices": list(TITLES),
        "help": "a backend other than the run's own (may be repeated)",
    },
    "--log-model": {
        "action": "store_true",
        "help": "also log the best checkpoint as an MLflow model, for `mlflow models serve`",
    },
    "--register": {
        "metavar": "NAME",
        "help": "also register the model under this name, as its next version; for one RUN",
    },
    "--json": {"action": "store_true", "help": "print one JSON object per run"},
    **TRUST,
}


def run(args: argparse.Namespace) -> int:
    """Send each run's missing records in turn, and report the results."""
    from samewise.runner.config import saved

    if args.uri is not None:
        check_uri(args.uri, path="--uri")
        ConfigError.raise_if(
            "mlflow" not in (args.to or ["mlflow"]),
            "--uri",
            f"is the address of an MLflow store, and --to names only {' and '.join(args.to or ())}",
            args.uri,
            hint="--to mlflow",
        )
    ConfigError.raise_all(problems(args.to or [], path="--to"))
    folders = [saved.find(name, run_root=args.run_root) for name in args.runs] or list(
        saved.below(args.run_root)
    )
    ConfigError.raise_if(
        not folders,
        "--run-root",
        "no runs were found",
        str(args.run_root),
        "a folder with runs",
        "samewise train experiment=resnet18_digits",
    )
    ConfigError.raise_if(
        args.register and len(folders) > 1,
        "--register",
        "is for one run's model",
        args.register,
        "one RUN",
        "samewise sync 3f2a --register NAME",
    )
    # mlflow reads the variables when it is imported
    prepare_environment()
    failed = False
    for folder in folders:
        for outcome in _send(folder, args):
            failed |= outcome.state in ("failed", "ending")
            print(to_json(asdict(outcome)) if args.json else outcome)
    return int(failed)


def send_now(folder: RunFolder) -> list[str]:
    """Send a run to its own backends, and return why it could not be sent, in sentences."""
    own = {"to": None, "uri": None, "runs": [], "log_model": False, "register": None}
    # mlflow reads the variables when it is imported
    prepare_environment()
    try:
        outcomes = list(_send(folder, argparse.Namespace(**own, trust=False)))
    except SamewiseError as error:
        return [str(error.problems[0])]
    return [str(outcome) for outcome in outcomes if outcome.state in ("failed", "ending")]


def _send(folder: RunFolder, args: argparse.Namespace) -> Iterator[SyncResult]:
    """Send one run to the requested backends, or to its own."""
    from samewise.runner.config import compose
    from samewise.runner.config.tree import plain

    name = f"{folder.path.parent.name}/{folder.path.name}"
    try:
        settings: dict[str, Any] = plain(compose.load(folder.config).cfg.tracking)
        requested = args.to or (["mlflow"] if args.uri else [])
        # Unless the user asks for this run and this backend by name
        if not settings["enabled"] and not (args.runs and requested):
            yield SyncResult(name, "disabled")
            return
        backends = requested or backends_of(settings)
        if args.log_model or args.register:
            ConfigError.raise_if(
                "mlflow" not in backends,
                "--register" if args.register else "--log-model",
                "needs MLflow, but the run is not sent there",
                hint="add --to mlflow",
            )
            settings |= {
                "log_model": True,
                "register_model": args.register or settings["register_model"],
            }
        for backend in backends:
            yield _copy(folder, backend, settings, args)
    except DamagedFile as error:
        # Without names, the other runs are still sent
        if args.runs:
            raise
        yield SyncResult(name, "failed", error=str(error.problems[0]).partition("\n")[0])


def _copy(
    folder: RunFolder, backend: str, settings: dict[str, Any], args: argparse.Namespace
) -> SyncResult:
    name = f"{folder.path.parent.name}/{folder.path.name}"
    try:
        if backend == "mlflow":
            settings = {**settings, "uri": address(folder, settings, args.uri)}
            _require_your_address(
                folder, settings, is_requested=args.uri is not None, trust=args.trust
            )
        # Without --to, the run's config has chosen the backend
        elif backend == "wandb" and not args.to:
            require(
                folder.config,
                trust=args.trust,
                uses="sends what is recorded to your account at Weights & Biases, as its "
                "config.yaml says",
            )
        # The run's own sender writes the same progress
        with locks.hold(folder.sending):
            return _synchronise(folder, backend, settings, name)
    except locks.LockHeld:
        return SyncResult(
            name,
            "in_progress" if locks.holder(folder.lock) is not None else "ending",
            backend,
            error=last_trouble(folder.path) or None,
        )
    except SamewiseError:
        raise
    except Exception as error:
        # Any error of the store or the network; the next `sync` continues from there
        return SyncResult(
            name, "failed", backend, error=describe_failure(f"{type(error).__name__}: {error}")
        )


def _synchronise(
    folder: RunFolder, backend: str, settings: Mapping[str, Any], name: str
) -> SyncResult:
    copy = open_backend(backend, folder, settings)
    is_alive = locks.holder(folder.lock) is not None
    try:
        result = copy.synchronise(alive=is_alive)
    except RunGone as gone:
        print(f"{name}: {gone}")
        # The second pass makes a new MLflow run in place of the deleted one
        result = copy.synchronise(alive=is_alive)
    if backend != "mlflow":
        return SyncResult(name, "sent", backend, result.metrics, result.files)
    tracking = read_mapping(folder.tracking, shapes.TRACKING)
    model, registered = tracking.get("model"), tracking.get("registered")
    if settings["log_model"] and not model and tracking.get("ended") != "FINISHED":
        print(f"{name}: has not finished, so its model is not logged", file=sys.stderr)
    return SyncResult(
        name,
        "sent",
        backend,
        result.metrics,
        result.files,
        tracking.get("run_id"),
        status=result.status,
        model=model,
        registered=registered or None,
    )


def address(folder: RunFolder, settings: Mapping[str, Any], uri: str | None) -> str:
    """Return the store's absolute URI.

    Args:
        folder: The run's folder.
        settings: The run's settings under `tracking`.
        uri: Address to use instead of the run's own; None for that.

    Raises:
        ConfigError: The folder of an SQLite store does not exist.
    """
    sent_progress = progress.load(folder)
    store = check_uri(
        uri
        or _resolve_relative_store(
            str(settings["uri"]), [sent_progress.store, *sent_progress.others]
        ),
        path="--uri" if uri else "tracking.uri",
    )
    file = sqlite_file(store)
    ConfigError.raise_if(
        file is not None and not file.parent.is_dir(),
        str(folder.path),
        "its store's folder no longer exists",
        str(file),
        hint=f"give the store's address: --uri sqlite:///{_run_root(folder)}/mlflow.db",
    )
    return store


def _require_your_address(
    folder: RunFolder, settings: dict[str, Any], *, is_requested: bool, trust: bool
) -> None:
    """Require that a folder which names a remote address is the user's own or trusted."""
    file, is_remote = sqlite_file(settings["uri"]), "://" in str(settings["artifact_location"])
    is_inside = file is not None and file.resolve().is_relative_to(_run_root(folder).resolve())
    # The user's tokens are sent to the address
    if is_requested and is_remote and not is_trusted(folder.config, trust=trust):
        settings["artifact_location"] = None
    elif not is_requested and (is_remote or not is_inside):
        require(
            folder.config,
            trust=trust,
            uses="sends what is recorded, with your tokens, to the address that its config.yaml "
            "names. Give another with --uri",
        )


def _resolve_relative_store(uri: str, stores: list[str]) -> str:
    """Return the store that the trainer meant by a relative SQLite path.

    The URI itself if unknown.
    """
    # The trainer may have run in another folder
    file = sqlite_file(uri)
    if file is None or file.is_absolute():
        return uri
    return next(
        (
            store
            for store in stores
            if (store_file := sqlite_file(store)) is not None and store_file.match(str(file))
        ),
        uri,
    )


def _run_root(folder: RunFolder) -> Path:
    return folder.path.parent.parent
