"""A server that speaks as much of S3's protocol as s3fs needs, and fails as it is told. Its buckets are the folders of a folder.

Tests import this as `samewise_s3_server`.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from s3fs import S3FileSystem

FAULTS = ("500", "closed", "half", "slow")


class Store:
    """What the server has: files, the requests so far, and its faults.

    `fault(number, method, key)` returns a fault, or nothing, for a request by its number; by default every tenth request has the next of FAULTS.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.requests, self.served = folder, list[tuple[str, str, str]](), 0
        self.is_writable, self.lock = True, threading.Lock()
        self.fault: Callable[[int, str, str], str] = lambda number, method, key: ""

    def fail_one_in_ten(self) -> None:
        self.fault = lambda number, method, key: FAULTS[number // 10 % len(FAULTS)] if number % 10 == 9 else ""

    def gets(self, ending: str = "") -> list[tuple[str, str, str]]:
        return [x for x in self.requests if x[0] == "GET" and x[1].endswith(ending) and x[2]]


@contextmanager
def serve(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Serve it as the S3 of this process and those that it starts."""
    store = Store(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *given: object) -> None:
            pass

        def answer(self, status: int, content: bytes = b"", headers: Mapping[str, str] = {}, fault: str = "") -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if fault == "half" else content)
                store.served += len(content)
            self.close_connection = self.close_connection or fault == "half"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            address = urlsplit(self.path)
            key, query = unquote(address.path).strip("/"), {name: values[0] for name, values in parse_qs(address.query).items()}
            with store.lock:
                number = len(store.requests)
                store.requests.append((self.command, key, self.headers.get("Range", "")))
            fault = store.fault(number, self.command, key)
            if fault == "slow":
                time.sleep(0.3)
            if fault == "never":
                time.sleep(5)
            if fault in ("closed", "never"):
                self.close_connection = True
            elif fault == "500":
                self.answer(500, b"<Error><Code>InternalError</Code><Message>We encountered an internal error</Message></Error>")
            elif self.command == "PUT" and not store.is_writable:
                self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
            elif self.command == "PUT":
                (folder / key).parent.mkdir(parents=True, exist_ok=True)
                (folder / key).write_bytes(body)
                self.answer(200, headers={"ETag": '"0"'})
            elif "list-type" in query:
                self.answer(200, listing(folder / key, query.get("prefix", "")), {"Content-Type": "application/xml"}, fault)
            elif (folder / key).is_file():
                self.send_object((folder / key).read_bytes(), fault)
            else:
                self.answer(404, b"<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>")

        def send_object(self, content: bytes, fault: str) -> None:
            headers, part, status = {"ETag": f'"{hashlib.md5(content).hexdigest()}"'}, content, 200
            if asked := self.headers.get("Range"):
                first, last = asked.removeprefix("bytes=").split("-")
                part, status = content[int(first) : int(last) + 1], 206
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            if fault == "other" and part:
                part = part[:-1] + bytes([part[-1] ^ 1])
            if fault == "short":
                part = part[: len(part) // 2]
            self.answer(status, part, headers, fault)

        do_GET = do_HEAD = do_PUT = handle_any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        patch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()


def listing(bucket: Path, prefix: str) -> bytes:
    """List the files and folders directly below a prefix, in XML."""
    places = sorted((bucket / prefix).iterdir()) if (bucket / prefix).is_dir() else []
    files = [
        f"<Contents><Key>{escape(prefix + x.name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;{hashlib.md5(x.read_bytes()).hexdigest()}&quot;</ETag><Size>{x.stat().st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for x in places
        if x.is_file()
    ]
    folders = [f"<CommonPrefixes><Prefix>{escape(prefix + x.name)}/</Prefix></CommonPrefixes>" for x in places if x.is_dir()]
    return f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><IsTruncated>false</IsTruncated>{"".join(files + folders)}</ListBucketResult>'.encode()
