"""Open the MLflow UI over this project's store, on this machine only."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import IO

from samewise.runner.errors import ConfigError, Problem, SamewiseError
from samewise.runner.processes.this_process import on_signals
from samewise.runner.tracking.address import check_uri, require_there, sqlite_file

EXAMPLES = """examples:
  samewise ui                                    the store in runs/mlflow.db
  samewise ui --port 5001 --open                 on this port, and open the browser
  samewise ui --run-root /mnt/cluster/runs
  samewise ui --uri postgresql+psycopg2://me@db/mlflow

To see the UI of a remote machine: ssh -L 5000:127.0.0.1:5000 MACHINE, start it there, and open the address on your own machine. Ctrl-C stops the UI."""

_HOST = "127.0.0.1"
_USUAL_PORT = 5000
_START_S = 90.0
# Its standard input ends with this process, even by SIGKILL
_WATCHDOG = 'read _; kill -TERM "-$0"; sleep 5; kill -KILL "-$0"'
"""Shell script that ends the server and its worker when its standard input ends."""

ARGUMENTS = {
    "--port": {"type": int, "help": f"default: {_USUAL_PORT}, or a free port if that is taken"},
    "--run-root": {
        "type": Path,
        "default": Path("runs"),
        "help": "the folder whose mlflow.db is shown (default: runs)",
    },
    "--uri": {"help": "another store: sqlite:///FILE, or a database"},
    "--open": {"action": "store_true", "help": "open the browser"},
}
EXCLUSIVE = ("--run-root", "--uri")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    path = "--uri" if args.uri else "--run-root"
    uri = check_uri(args.uri or f"sqlite:///{args.run_root / 'mlflow.db'}", path=path)
    require_there(uri, path=path)
    if uri.startswith(("http://", "https://")):
        print(f"MLflow UI: {uri}")
        if args.open:
            webbrowser.open(uri)
        return 0
    with on_signals([signal.SIGTERM, signal.SIGINT], _end), _listening(args.port) as listening:
        port = listening.getsockname()[1]
        try:
            _serve(
                listening,
                _command(uri, port),
                {**_environment(), "MLFLOW_BACKEND_STORE_URI": uri},
                f"http://{_HOST}:{port}",
                open_page=args.open,
            )
        except KeyboardInterrupt:
            print()
    return 0


def _serve(
    listener: socket.socket,
    command: list[str],
    environment: dict[str, str],
    address: str,
    *,
    open_page: bool,
) -> None:
    from samewise.runner.tracking import front_page

    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command,
            env=environment,
            # A group of its own, by which the server and its worker are ended together
            start_new_session=True,
            stdin=listener.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, str(server.pid)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        try:
            # Now only the server has the socket
            listener.close()
            print("starting MLflow, which takes a few seconds", file=sys.stderr, flush=True)
            _wait_for(server, address, log)
            page = front_page.prepare(address)
            print(f"MLflow UI: {page}   (press Ctrl-C to stop)", flush=True)
            if open_page:
                webbrowser.open(page)
            server.wait()
        finally:
            _stop(server)
            watchdog.kill()
            watchdog.communicate()


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _listening(requested: int | None) -> socket.socket:
    """Open the socket that the server inherits."""
    # Bound here, so that no other user of the machine can answer on the port
    ConfigError.raise_if(
        requested is not None and not 0 < requested < 65536,
        "--port",
        "is not a valid port number",
        requested,
        "1 to 65535",
    )
    for port in (requested,) if requested is not None else (_USUAL_PORT, 0):
        with suppress(OSError):
            listener = socket.create_server((_HOST, port), backlog=100)
            # Connections inherit this; asyncio does not recognise the socket as TCP and would not
            # set it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listener
    raise ConfigError(
        Problem(
            "--port",
            "the port is taken",
            requested,
            "a free port",
            "leave out --port to use any free port",
        )
    )


def _command(uri: str, port: int) -> list[str]:
    """Return the server's command line, without the store's address."""
    # Other users can list commands, and the address may contain a password
    file = sqlite_file(uri)
    artifacts = (
        ["--artifacts-destination", str(file.parent / "mlartifacts")] if file is not None else []
    )
    return [
        sys.executable,
        # No module of the current folder is imported
        "-P",
        "-m",
        "mlflow",
        "server",
        *artifacts,
        # The socket is standard input; uvicorn would import modules from the current folder
        "--uvicorn-opts",
        f"--fd 0 --app-dir {os.devnull}",
        "--host",
        _HOST,
        "--port",
        str(port),
        "--workers",
        "1",
    ]


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "UVICORN_LOG_LEVEL": "error",
        "PYTHONSAFEPATH": "1",
    }


def _wait_for(server: subprocess.Popen[bytes], address: str, log: IO[str]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    log.seek(0)
    sys.stderr.write(log.read())
    raise SamewiseError(
        Problem("samewise ui", "the MLflow server did not start; see its messages above")
    )


def _stop(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(5.0)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
