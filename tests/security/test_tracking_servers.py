"""A tracking server that misbehaves: it points to no other host, and answers that cannot be understood are reported."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RUN = "0" * 32
RUN_JSON = (
    f'{{"run": {{"info": {{"run_id": "{RUN}", "run_uuid": "{RUN}", "experiment_id": "1", "status": "FINISHED", "lifecycle_stage": "active",'
    ' "artifact_uri": "mlflow-artifacts:/1/x"}, "data": {}}}'
)
FILES_JSON = '{"files": [{"path": "config.yaml", "is_dir": false, "file_size": 100}]}'
HEAD = b"HTTP/1.1 %d X\r\nConnection: close\r\n"
STRANGE = {
    "empty": b"",
    "a list": b"[]",
    "deep": b"[" * 200_000,
    "text": b"<html>hello</html>",
    "another shape": b'{"run": {"info": 3}, "experiments": 5}',
    "wrong types": b'{"run": {"info": {"start_time": "soon"}}, "experiments": [{"experiment_id": {}}]}',
    "not utf-8": b'{"run": "\xff\xfe"}',
    "an error that is none": b'{"error_code": 7, "message": {"a": []}}',
}


class _Stranger(http.server.BaseHTTPRequestHandler):
    answer: Callable[[_Stranger], None]

    def do_GET(self) -> None:
        if self.path == "/":  # the client asks whether the server is there at all
            self.plain(b"ok")
        else:
            with contextlib.suppress(OSError):
                type(self).answer(self)
        self.close_connection = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def plain(self, body: bytes, more: bytes = b"") -> None:
        self.wfile.write(HEAD % 200 + more + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The handler class of a server, which decides its answers, and its address."""

    class Kind(_Stranger):
        pass

    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Kind, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()
    assert not list((tmp_path / "tmp").iterdir())


COMMANDS = {"runs": ("runs",), "verify": ("verify", RUN)}


def _serves_a_run(handler: _Stranger) -> None:
    listed = handler.path.endswith("artifacts?path=1%2Fx")
    handler.plain(FILES_JSON.encode() if listed else RUN_JSON.encode() if "runs/get" in handler.path else b"{}")


@pytest.fixture
def other() -> Iterator[tuple[str, list[Any]]]:
    """`HOST:PORT` of a server that the user has not named, such as a cloud's credentials service, and the requests that it received."""
    heard = list[Any]()

    class Kind(_Stranger):
        def do_GET(self) -> None:
            heard.append((self.path, dict(self.headers)))
            self.plain(b"{}")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}", heard
    server.shutdown()
    thread.join()
    server.server_close()


def redirects(handler: _Stranger, to: str) -> None:
    handler.wfile.write(HEAD % 307 + f"Location: http://{to}/latest/meta-data/\r\nContent-Length: 0\r\n\r\n".encode())


def redirects_within_mlflow(handler: _Stranger, to: str) -> None:
    handler.wfile.write(HEAD % 307 + f"Location: http://{to}/api/2.0/mlflow/runs/get\r\nContent-Length: 0\r\n\r\n".encode())


def keeps_files_elsewhere(handler: _Stranger, to: str) -> None:
    """Another user of the same server can arrange this through the artifact location of an experiment."""
    handler.plain(RUN_JSON.replace("mlflow-artifacts:/1/x", f"mlflow-artifacts://{to}/1/x").encode())


def names_an_address_to_download_from(handler: _Stranger, to: str) -> None:
    if handler.path.endswith("server-info"):
        handler.plain(b'{"multipart_downloads_enabled": true, "multipart_uploads_enabled": true}')
    elif "presigned" in handler.path:
        handler.plain(f'{{"url": "http://{to}/latest/meta-data/", "headers": {{"Metadata-Flavor": "Google"}}, "file_size": 100}}'.encode())
    else:
        _serves_a_run(handler)


@pytest.mark.parametrize("way", [redirects, redirects_within_mlflow, keeps_files_elsewhere, names_an_address_to_download_from])
def test_no_request_or_token_reaches_a_host_that_a_server_points_to(
    samewise: Callable[..., Any], stranger: Any, other: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch, way: Callable[..., None]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "a-token")
    kind, address = stranger
    host, heard = other
    kind.answer = lambda handler: way(handler, host)
    done = samewise("verify", RUN, "--uri", address)
    assert heard == []
    assert done.returncode == 2
    assert "--debug" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("what", STRANGE)
def test_an_answer_that_cannot_be_understood_is_reported(samewise: Callable[..., Any], stranger: Any, what: str, command: str) -> None:
    kind, address = stranger
    kind.answer = lambda handler: handler.plain(STRANGE[what])
    done = samewise(*COMMANDS[command], "--uri", address)
    allowed = (0, 2) if what in ("empty", "not utf-8", "an error that is none") else (2,)
    assert done.returncode in allowed, done
    assert "--debug" not in done.stderr
    assert address in done.stderr + done.stdout


LOG_IN = "the server refuses access (HTTP 401, not logged in): set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
TINY = ("experiment=resnet18_digits", "debug=tiny", "model.width=4", "callbacks=none", "evaluate.pictures=false")


def deny(handler: _Stranger) -> None:
    handler.wfile.write(HEAD % 401 + b"Content-Length: 29\r\n\r\nYou are not authenticated.\nNo.")


def test_a_server_that_asks_for_a_password_is_reported_in_one_line(samewise: Callable[..., Any], stranger: Any) -> None:
    kind, address = stranger
    kind.answer = deny
    done = samewise("runs", "--uri", address, code=2)
    assert f"--uri: MLflow cannot read it: {LOG_IN}" in done.stderr.splitlines()[0]
