"""A server that loses just the end of a run: the end stays in the run's journal, is reported, and is sent by `samewise sync`."""

from __future__ import annotations

import http.server
import importlib
import json
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from samewise_mlflow_server import Server
from samewise_tiny import DIGITS

TRAINING = [*(one for one in DIGITS if one != "tracking=none"), "model.width=4", "max_steps=2"]


class Losing:
    """A proxy in front of a server."""

    def __init__(self, server: Server, liar: Any) -> None:
        self.loses, self.lost = "", 0

        class Handler(liar.Liar):
            behind = server.uri

            def do_GET(handler) -> None:
                body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
                ends = handler.path.endswith("/runs/update") and b"FINISHED" in body
                status, answer = (0, b"") if ends and self.loses == "the request" else handler._ask(body)
                if ends and self.loses:
                    self.lost += 1
                    handler.connection.shutdown(socket.SHUT_RDWR)
                    return
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(answer)))
                handler.end_headers()
                handler.wfile.write(answer)
                handler.close_connection = True

            do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        self._proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.uri = f"http://127.0.0.1:{self._proxy.server_address[1]}"

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "server")
    made.start()
    yield made
    made.kill()


@pytest.fixture
def proxy(server: Server, repository: Path) -> Iterator[Losing]:
    sys.path.append(str(repository / "tests" / "faults"))  # where the files beside it are
    made = Losing(server, importlib.import_module("liar"))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("loses", ["the request", pytest.param("the answer", marks=pytest.mark.long)])
def test_an_end_that_the_server_loses_is_reported_and_sent_by_the_next_sync(
    samewise: Callable[..., Any], server: Server, proxy: Losing, tmp_path: Path, caplog: pytest.LogCaptureFixture, loses: str
) -> None:
    proxy.loses = loses
    given = [*TRAINING, f"run_root={tmp_path / 'runs'}", f"tracking.uri={proxy.uri}", "tracking.flush_timeout_s=12"]
    done = samewise("train", *given)
    assert done.returncode == 0, done.stderr
    assert "not everything has reached" in caplog.text  # on standard error, outside of pytest
    (folder,) = (file.parent for file in tmp_path.glob("runs/*/*/summary.json"))
    while "gave up" not in (folder / "sender.log").read_text():  # it may have started late
        threading.Event().wait(0.5)
    assert proxy.lost
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["status"] == "FINISHED"
    again = samewise("train", *given)
    assert "already finished" in again.stdout
    assert f"not everything has reached MLflow yet; run `samewise sync {folder}`" in again.stderr
    proxy.loses = ""
    sync = samewise("sync", folder)
    assert sync.returncode == 0, sync.stdout + sync.stderr
    if loses == "the request":
        assert "its status was changed from RUNNING to FINISHED" in sync.stdout
    with sqlite3.connect(server.database) as store:
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]
    assert "not everything" not in samewise("train", *given).stderr
