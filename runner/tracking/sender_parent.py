"""A process that has imported mlflow and forks a sender for each run that asks.

    python -m samewise.runner.tracking.sender_parent SOCKET

The jobs of a sweep thereby share the seconds of the import. Forking is safe because the process
does nothing else: it has one thread and has opened no store. A run connects to the socket and
names its folder in a line of JSON; the connection is then its sender's standard input and output.
The process ends when its own standard input does; the senders go on until they have sent
everything.

multiprocessing's forkserver would not do: it forks only for the process that started it, where here
other processes, the runs, ask; and it waits for its children as it ends, where senders outlive the
runs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from samewise.runner.processes.this_process import close_input
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import link, sender

_PRELOAD = (
    "samewise.runner.tracking.sending",
    "samewise.runner.tracking.store",
    "samewise.runner.tracking.system",
)


class SenderParent:
    """The launcher's handle of such a process.

    Args:
        log: The file for its own errors.
    """

    def __init__(self, log: Path) -> None:
        # A folder for this user only, with a short path, because names of sockets are limited
        folder = tempfile.mkdtemp(prefix="samewise-")
        self.address = str(Path(folder) / "senders")
        command = [
            sys.executable,
            "-P",
            "-m",
            "samewise.runner.tracking.sender_parent",
            self.address,
        ]
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=link.environment(),
                start_new_session=True,
            )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        # Its first line says that the socket exists
        self._process.stdout.readline()

    def close(self) -> None:
        """Let the process end; its senders continue."""
        close_input(self._process)


def main(address: str) -> int:
    """Run as the parent."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(128)
    # From now on connections wait until mlflow is imported
    print("ready", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # The kernel reaps the senders, which nobody waits for
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sender.prepare_environment()
    for name in _PRELOAD:
        importlib.import_module(name)
    # Garbage collection in a fork would copy the pages that it shares with this process
    gc.freeze()
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        if listener in ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _be(connection)
            connection.close()
        elif 0 in ready:
            # Standard input ends with the launcher, however that ends
            with contextlib.suppress(OSError):
                os.unlink(address)
                os.rmdir(os.path.dirname(address))
            return 0


def _be(connection: socket.socket) -> NoReturn:
    """Become a sender."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A session of its own, so that Ctrl-C in the terminal does not reach it
        os.setsid()
        os.dup2(connection.detach(), 0)
        run = json.loads(sender.read_line())
        folder = RunFolder(Path(run["folder"]))
        log = os.open(folder.path / link.LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        code = sender.be(folder, run["trainer"])
    except EOFError:
        # The run was killed before it had sent its folder
        pass
    except BaseException as error:
        print(f"error:\n  {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
