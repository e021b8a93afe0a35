"""Open the MLflow UI over this project's store, on this machine only."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from samewise.runner.commands import add_trust
from samewise.runner.errors import ConfigError, Problem, SamewiseError, TrainingError
from samewise.runner.records import trust as signatures
from samewise.runner.records.files import read_text, write_atomically
from samewise.runner.tracking.address import check_uri, require_there, sqlite_file, without_password

EXAMPLES = """examples:
  samewise ui                                    the store in runs/mlflow.db
  samewise ui --port 5001 --open                 on this port, and open the browser
  samewise ui --run-root /mnt/cluster/runs
  samewise ui --uri postgresql+psycopg2://me@db/mlflow

Over SSH: ssh -L 5000:127.0.0.1:5000 MACHINE, then open the address on this machine. Ctrl-C stops the UI."""

_HOST = "127.0.0.1"
_USUAL_PORT = 5000
_START_S = 90.0


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--port", type=int, help=f"default: {_USUAL_PORT}, or a free port if that is taken")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--run-root", type=Path, default=Path("runs"), help="the folder whose mlflow.db is shown (default: runs)")
    where.add_argument("--uri", help="another store: sqlite:///FILE, or a database")
    parser.add_argument("--open", action="store_true", help="open the browser")
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from samewise.runner.tracking import front_page

    path = "--uri" if args.uri else "--run-root"
    uri = check_uri(args.uri or f"sqlite:///{args.run_root / 'mlflow.db'}", path=path)
    require_there(uri, path=path)
    if uri.startswith(("http://", "https://")):
        print(f"MLflow UI: {uri}")
        if args.open:
            webbrowser.open(uri)
        return 0
    _require_places(uri, trust=args.trust)
    port = _port(args.port)
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the server)
    server = subprocess.Popen(
        _command(uri, port), env={**_environment(), "MLFLOW_BACKEND_STORE_URI": uri}, start_new_session=True, stdout=subprocess.DEVNULL, stderr=said
    )
    try:
        address = f"http://{_HOST}:{port}"
        print("starting MLflow, which takes a few seconds", file=sys.stderr, flush=True)
        _wait_for(server, address, said)
        page = front_page.prepare(address)
        print(f"MLflow UI: {page}   (press Ctrl-C to stop)", flush=True)
        if args.open:
            webbrowser.open(page)
        _until_asked(server)
    except KeyboardInterrupt:
        print()
    finally:
        _stop(server)
    return 0


def _require_places(uri: str, *, trust: bool) -> None:
    """Refuse a store that has MLflow show what lies outside of its own folder: in one that was received, a stranger has chosen the places.

    The store changes with every run, so what is signed, and asked for once, is a list of these places beside it.
    """
    file = sqlite_file(uri)
    if file is None:
        return
    home = file.absolute().parent.resolve()
    try:
        with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as store:
            experiments, runs = (
                {_outside(str(row[0]), home) for row in store.execute(query) if row[0]}
                for query in ("SELECT artifact_location FROM experiments", "SELECT artifact_uri FROM runs")
            )
            with contextlib.suppress(sqlite3.Error):  # a store of an MLflow before 3 has no models in runs
                runs |= {_outside(str(row[0]), home) for row in store.execute("SELECT artifact_location FROM logged_models") if row[0]}
    except sqlite3.Error:  # MLflow says what is wrong with it
        return
    others = {place for place in runs if ".." in place or not any(root and place.startswith(f"{root}/") for root in experiments)}
    outside = sorted(map(without_password, (experiments | others) - {""}))
    listed = file.absolute().with_name(f".{file.name}.places")
    text = "".join(f"{one}\n" for one in outside)
    if not outside or (signatures.is_signed(listed) and read_text(listed) == text):
        return
    if trust:
        with contextlib.suppress(TrainingError):  # a folder that cannot be written: it is trusted this time
            write_atomically(listed, text)
            signatures.sign(listed)
        return
    rest = f" and {len(outside) - 3} more" if len(outside) > 3 else ""
    words = f"the store has MLflow show files outside of its folder, to whoever on this machine opens the page: {', '.join(outside[:3])}{rest}"
    raise ConfigError(Problem(str(file), words, hint="if these places are yours, or you trust whoever made the store, add --trust; it is remembered for them"))


def _outside(named: str, home: Path) -> str:
    """A place that is not in the folder `home`, nor where the server of this command keeps files; "" for any other."""
    try:
        parts = urlsplit(named)
    except ValueError:
        return named
    if parts.scheme not in ("", "file"):
        return "" if parts.scheme == "mlflow-artifacts" else named
    local = Path(unquote(parts.path)).resolve()
    return "" if local.is_relative_to(home) else str(local)


def _port(asked: int | None) -> int:
    if asked is not None and not 0 < asked < 65536:
        raise ConfigError(Problem("--port", "is not a valid port number", asked, "1 to 65535"))
    for port in (asked,) if asked is not None else (_USUAL_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise ConfigError(Problem("--port", "the port is taken", asked, "a free port", "leave out --port to use any free port"))


def _command(uri: str, port: int) -> list[str]:
    """The server's, without the store's address: anyone on the machine may list commands, and it may hold a password."""
    file = sqlite_file(uri)
    artifacts = ["--artifacts-destination", str(file.parent / "mlartifacts")] if file is not None else []
    return [sys.executable, "-P", "-m", "mlflow", "server", *artifacts, "--host", _HOST, "--port", str(port), "--workers", "1"]


def _environment() -> dict[str, str]:
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "ERROR", "UVICORN_LOG_LEVEL": "error"}
    return {**os.environ, **quiet}


def _wait_for(server: subprocess.Popen[bytes], address: str, said: IO[str]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    said.seek(0)
    sys.stderr.write(said.read())
    raise SamewiseError(
        Problem("samewise ui", "the MLflow server did not start; see its messages above", hint="try another --port, or `mlflow server` by hand")
    )


def _until_asked(server: subprocess.Popen[bytes]) -> None:
    """Wait for Ctrl-C, SIGTERM, or the server's own end."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        server.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and its worker."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(5.0)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
