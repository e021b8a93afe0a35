"""Limits on responses of tracking servers: in size, and to the host that was named. Imports mlflow.

requests reads an answer whole into memory, and urllib3 a header or the length of a chunk, however long they are; MLflow asks for as many pages as
a server says there are, and writes as much of an artifact as comes. So each answer's bytes are counted where they leave the socket, and again
when they have been decompressed. It may also send elsewhere: by a redirection, by an address to download from, by a run whose artifacts are on another
host, to which MLflow would send this user's token. Databricks' own client and the clients of clouds do not come by here.
"""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils import request_utils
from sqlalchemy import event
from sqlalchemy.engine import Engine

from samewise.runner.errors import ConfigError, Problem, SamewiseError, limit_from, summarise_error
from samewise.runner.tracking import store_places
from samewise.runner.tracking.address import describe_failure
from samewise.runner.tracking.store_places import LONGEST_S

ANSWER = ("SAMEWISE_MAX_ANSWER_BYTES", 64 << 20)
"""The environment variable that limits an answer that is held in memory, and its value without it. A command's together may be `_ANSWERS` times that."""
DOWNLOAD = ("SAMEWISE_MAX_DOWNLOAD_BYTES", 4 << 30)
"""The same of all files that a command downloads."""
HOSTS = "SAMEWISE_TRACKING_HOSTS"
"""The environment variable that names further hosts, `HOST:PORT` with commas between, to which a tracking server may send."""
_ANSWERS = 8
_HEADERS = 1 << 20


class NotTaken(Exception):
    """A server's response is too large, or not a response at all."""


class _Taken:
    """The size of a command's responses so far, and why a response was refused."""

    def __init__(self) -> None:
        self.answers = 0
        self.downloads = 0
        self.refused: NotTaken | None = None

    def refuse(self, why: str) -> NotTaken:
        """Make the error to raise, and record it: libraries in between wrap it or drop its message."""
        self.refused = NotTaken(why)
        return self.refused


_here = threading.local()
_named = set[str]()
"""The hosts that the user has named, as `HOST:PORT`; `*` for any."""
_command: list[_Taken] = []


def _current_total() -> _Taken:
    """The current command's total; outside a command, as in the sender, responses are not added up."""
    return _command[-1] if _command else _Taken()


class _Counted(io.RawIOBase):
    """Counts the bytes of one response as they arrive."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._coming, self._decoded = 0, 0
        self._download = False
        self._until = time.monotonic() + LONGEST_S
        _here.counted = self

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0
        self._coming += count
        self._check(self._coming, count)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()

    def decoded(self, pieces: Iterator[bytes], *, of_json: bool) -> Generator[bytes]:
        """The response's body as the client receives it. With `of_json` it has to be a mapping: MLflow takes an empty body for "done"."""
        head = b""
        for piece in pieces:
            self._decoded += len(piece)
            self._check(self._decoded, 0)
            head = head or piece.lstrip()[:1]
            yield piece
        if of_json and head != b"{":
            raise _current_total().refuse("it reports success, but not in the form that an MLflow server uses: something else may be answering in its place")

    def be_a_download(self) -> None:
        """Allow more: the rest is written to a file, not kept in memory."""
        self._download = True

    def _check(self, count: int, more: int) -> None:
        taken = _current_total()
        if self._download:
            taken.downloads += more
            most = limit_from(*DOWNLOAD)
            enough = max(taken.downloads, count) > most
        else:
            taken.answers += more
            most = limit_from(*ANSWER)
            enough = count > most + _HEADERS or taken.answers > _ANSWERS * most
            most *= 1 if count > most + _HEADERS else _ANSWERS
        if enough:
            name = (DOWNLOAD if self._download else ANSWER)[0]
            what = "its files come to" if self._download else "its answer has"
            raise taken.refuse(f"{what} more than {most:,} bytes; if that is intended, set {name} to a larger number")
        if not self._download and time.monotonic() > self._until:
            raise taken.refuse(f"its answer was not complete after {LONGEST_S:.0f} s")


class _Answer(HTTPResponse):
    def __init__(self, sock: Any, *given: Any, **named: Any) -> None:
        super().__init__(sock, *given, **named)
        self.fp = io.BufferedReader(_Counted(self.fp.detach()))


class _Adapter(request_utils.TCPKeepAliveHTTPAdapter):
    def init_poolmanager(self, *given: Any, **named: Any) -> None:
        super().init_poolmanager(*given, **named)
        _count(self.poolmanager)

    def proxy_manager_for(self, *given: Any, **named: Any) -> Any:
        manager = super().proxy_manager_for(*given, **named)
        _count(manager)
        return manager

    def send(self, request: Any, stream: bool = False, timeout: Any = None, verify: Any = True, cert: Any = None, proxies: Any = None) -> Any:
        _require_named_host(request, is_sent_on=getattr(_here, "is_sent_on", False))
        _here.is_sent_on = False
        response = super().send(request, stream, timeout, verify, cert, proxies)
        _here.is_sent_on = response.is_redirect  # the next request of this thread follows the redirect
        counted: _Counted = _here.counted
        if stream and response.ok:
            counted.be_a_download()
        plain, of_json = response.raw.stream, response.status_code == 200 and "/api/2.0/mlflow/" in str(request.path_url)

        def stream_counted(*given: Any, **named: Any) -> Iterator[bytes]:
            return counted.decoded(plain(*given, **named), of_json=of_json)

        response.raw.stream = stream_counted
        return response


def _require_named_host(request: Any, *, is_sent_on: bool) -> None:
    """Refuse requests, and tokens, to a host that the user has not named. Uploads without a token may go where the server says.

    What MLflow itself asks goes to the server that its client was made for: in a notebook that may be one of the user's, beside samewise's.
    """
    if str(request.path_url).startswith("/api/2.0/mlflow/") and not is_sent_on:
        return
    host = _host(request.url)
    more = {one.strip().lower() for one in os.environ.get(HOSTS, "").split(",")}
    is_named = _named & {"*", host, host.removesuffix(":443") + ":80"} or host in more
    if not is_named and not (request.method == "PUT" and "Authorization" not in request.headers):
        raise _current_total().refuse(f"it redirects to {host}, which is not the server that was named; if that is intended, set {HOSTS}={host}")


def _host(address: str) -> str:
    split = urlsplit(address)
    return f"{(split.hostname or '').lower()}:{split.port or (80 if split.scheme == 'http' else 443)}"


def allow(address: str) -> None:
    """Allow requests to the host of an address that the user has named or trusts; to any host, if it names none (`databricks`)."""
    _named.add(_host(address.replace("mlflow-artifacts:", "http:", 1)) if urlsplit(address).hostname else "*")


def _count(manager: Any) -> None:
    """Make the connections of a urllib3 manager count their responses."""

    def counting(pool: Any) -> Any:
        connection = type(pool.ConnectionCls.__name__, (pool.ConnectionCls,), {"response_class": _Answer})
        return type(pool.__name__, (pool,), {"ConnectionCls": connection})

    manager.pool_classes_by_scheme = {scheme: counting(pool) for scheme, pool in manager.pool_classes_by_scheme.items()}


def connect(uri: str) -> MlflowClient:
    """A client of a store whose responses are limited."""
    for of in (ANSWER, DOWNLOAD):
        limit_from(*of)
    for address in (uri, os.environ.get("MLFLOW_REGISTRY_URI", "")):
        if address.startswith(("http://", "https://", "databricks")):
            allow(address)
    os.environ.setdefault("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "false")  # from an address chosen by the server; it may also send the file itself
    if request_utils.TCPKeepAliveHTTPAdapter is not _Adapter:
        request_utils.TCPKeepAliveHTTPAdapter = _Adapter
        request_utils._cached_get_request_session.cache_clear()  # pyright: ignore[reportPrivateUsage]
    return MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def open_reader(uri: str, told: Callable[[str], Problem]) -> Generator[MlflowClient]:
    """A client that reads a store for one command, whatever a server sends. `told` makes the problem from an error.

    Whatever goes wrong inside becomes a ConfigError, but for what samewise itself has found.
    """
    taken = _Taken()
    _command.append(taken)

    until, words = time.monotonic() + store_places.LONGEST_S, f"its database did not answer within {LONGEST_S:.0f} s"

    def taken_out(store: Any, *_: Any) -> None:
        if isinstance(store, sqlite3.Connection):
            store_places.limit_queries(store, until=until, largest=limit_from(*ANSWER), over=lambda: taken.refuse(words))

    def put_back(store: Any, *_: Any) -> None:
        if isinstance(store, sqlite3.Connection):
            store_places.unlimit_queries(store)

    event.listen(Engine, "checkout", taken_out)
    event.listen(Engine, "checkin", put_back)
    try:
        yield connect(uri)
    except SamewiseError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError):
            taken.refuse(f"its database takes more than {store_places.HEAP:,} bytes of memory")
        known = isinstance(error, MlflowException | OSError)
        strange = f"its answer cannot be understood: {summarise_error(error)}"
        reason = str(taken.refused) if taken.refused else describe_failure(str(error)) if known else strange
        raise ConfigError(told(reason)) from None
    finally:
        event.remove(Engine, "checkout", taken_out)
        event.remove(Engine, "checkin", put_back)
        _command.remove(taken)
