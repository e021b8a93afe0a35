"""A real `mlflow server`, for tests of what is sent to one."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


class Server:
    """With one worker, in a process group of its own.

    Args:
        folder: For its files; made here.
        store: Its backend store; an SQLite file in the folder if not given.
    """

    def __init__(self, folder: Path, *, store: str | None = None) -> None:
        folder.mkdir()
        self.folder, self.database = folder, folder / "server.db"
        self._store = store or f"sqlite:///{self.database}"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self._store, "--artifacts-destination", str(self.folder / "files")]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(self.folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
                return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
                time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
