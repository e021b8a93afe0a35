"""Call Ray's Jobs API over HTTP, without Ray.

https://docs.ray.io/en/latest/cluster/running-applications/job-submission/api.html
"""

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
    """The server does not answer, or not as Ray's would; it may be restarting."""


class Refused(Exception):
    """The server refused a request.

    Args:
        code: HTTP status.
        message: Last line of the server's message.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} (HTTP status {code})")
        self.code = code


class Server:
    """Server of a cluster's dashboard, at http://HOST:PORT."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Content-Type": "application/json", **_headers()}

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, post: bool = False) -> Any:
        """Send one request and return the answer, read as JSON.

        Args:
            path: Path below the address.
            body: Values to send as JSON.
            post: Send with POST instead of GET.

        Raises:
            Refused: The answer's status is an error.
            NoAnswer: No answer came, or one that is not Ray's.
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
        except urllib.error.HTTPError as refusal:
            text = refusal.read().decode(errors="replace")
            # Another server, or a proxy, answers with a page of HTML
            is_page = text.lstrip().startswith("<")
            raise Refused(
                refusal.code, (not is_page and last_line(text)) or refusal.reason
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(str(getattr(error, "reason", "") or error)) from None
        except ValueError:
            raise NoAnswer("what answers there is not Ray's dashboard") from None


def address_from(configured: str | None) -> str:
    """Return the configured address, or the one in Ray's variables.

    Raises:
        ConfigError: The address is missing, or is not an HTTP address.
    """
    variable = next((name for name in ADDRESSES if os.environ.get(name)), None)
    path = variable if variable and not configured else "launcher.address"
    address = configured or (os.environ[variable] if variable else None)
    if not address:
        raise ConfigError(
            Problem(
                path,
                "the address of the Ray cluster is missing",
                expected=_EXPECTED,
                hint=f"set it, or {ADDRESSES[0]}",
            )
        )
    ConfigError.raise_if(
        urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname,
        path,
        "is not an address where Ray accepts jobs",
        address,
        _EXPECTED,
        "launcher.address",
    )
    return address


def _headers() -> dict[str, str]:
    """Return authentication headers, as Ray's own commands send them."""
    # From Ray's variables, or from the file that `ray get-auth-token` writes
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
