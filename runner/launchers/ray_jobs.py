"""Ray's Jobs API, over HTTP and without Ray.

https://docs.ray.io/en/latest/cluster/running-applications/job-submission/api.html
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from samewise.runner.errors import ConfigError, Problem
from samewise.runner.launchers.submission import PATIENCE_S, last_line

ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Variables in which Ray's own commands look for the address, in their order."""
_EXPECTED = "the address of the cluster's dashboard, such as http://HOST:8265"


class NoAnswer(Exception):
    """The server does not answer, or gives an unexpected answer; it may be restarting."""


class Refused(Exception):
    """The server refused a request; contains the HTTP status and the last line of its message."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"{said} (HTTP status {code})")
        self.code = code


class Server:
    """The server of a cluster's dashboard, at http://HOST:PORT."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json", **_headers()}

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, post: bool = False) -> Any:
        """Send one request and return the answer, read as JSON.

        Refused if its status is an error, NoAnswer if none came, or one that is not Ray's.

        Args:
            path: Below the address.
            body: To be sent as JSON.
            post: With POST, otherwise GET.
        """
        data = json.dumps(body or {}).encode() if post else None
        request = urllib.request.Request(
            f"{self.address}{path}",
            data=data,
            headers=self._headers,
            method="POST" if post else "GET",
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            said = refused.read().decode(errors="replace")
            is_page = said.lstrip().startswith("<")
            raise Refused(
                refused.code, (not is_page and last_line(said)) or refused.reason
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(str(getattr(error, "reason", "") or error)) from None
        except ValueError:
            raise NoAnswer("what answers there is not Ray's dashboard") from None


def address_from(given: str | None) -> str:
    """The given address, or the one in Ray's variables.

    ConfigError if it is missing or is not an HTTP address.
    """
    named = next((name for name in ADDRESSES if os.environ.get(name)), None)
    path, address = (
        ("launcher.address", given)
        if given
        else (named or "launcher.address", os.environ[named] if named else None)
    )
    if not address:
        raise ConfigError(
            Problem(
                path,
                "the address of the Ray cluster is missing",
                expected=_EXPECTED,
                hint=f"set it, or {ADDRESSES[0]}",
            )
        )
    if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
        raise ConfigError(
            Problem(
                path,
                "is not an address where Ray accepts jobs",
                address,
                _EXPECTED,
                "launcher.address",
            )
        )
    return address


def _headers() -> dict[str, str]:
    """Authentication headers, as Ray's own commands send them: from its variables, or from the file
    that `ray get-auth-token` writes.
    """
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        return {}
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        try:
            token = file.read_text(encoding="utf-8").strip()
        except OSError:
            return {}
    return {"Authorization": f"Bearer {token}"} if token else {}
