"""Checks tracking addresses, and shows errors of trackers, without importing mlflow."""

import importlib.util
import re
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

from samewise.runner.errors import ConfigError, Problem, nearest, truncate
from samewise.runner.secrets import HIDDEN

_SQL = {"postgresql": "psycopg2", "mysql": "MySQLdb", "mssql": "pyodbc"}
_PACKAGES = {
    "psycopg2": "psycopg2-binary",
    "MySQLdb": "mysqlclient",
    "psycopg": "psycopg[binary]",
}
"""Packages of database drivers, if they have another name."""
REFUSED = "the server refuses access"
_SQLITE = {
    "database or disk is full": "the store's disk is full",
    "readonly database|unable to open database file": "you need read and write access to the "
    "store's file and folder",
    "file is not a database|disk image is malformed": "the store's file is damaged, or not SQLite",
    "database is locked": "another program has locked the store's file",
    "disk I/O error": "the store's disk fails",
}
"""What is wrong, for SQLite's errors."""
_SHOWN = 300
"""Maximum length of a shown MLflow message."""
_EXAMPLES = "sqlite:///runs/mlflow.db, http://HOST:5000 or postgresql+psycopg2://USER@HOST/DATABASE"


def problem(uri: str, *, path: str = "tracking.uri") -> Problem | None:
    """Return the problem of a tracking URI, or None; create nothing."""
    scheme, separator, _ = uri.partition("://")
    dialect, _, driver = scheme.partition("+")
    # `user:password@host` without a scheme, of which the message must not show the password
    if re.match(r"(?:file://)?[^/@]*:[^/@]*@", uri):
        return Problem(
            path,
            "is not a tracking address: it does not begin with the kind of store",
            HIDDEN + uri[uri.rindex("@") :],
            _EXAMPLES,
        )
    if not separator or scheme == "file":
        folder = (uri.removeprefix("file://") if separator else uri).rstrip("/") or "."
        store = folder if folder.endswith((".db", ".sqlite")) else f"{folder}/mlflow.db"
        return Problem(
            path,
            "MLflow no longer stores runs as files in a folder",
            uri,
            _EXAMPLES,
            f"use sqlite:///{store}",
        )
    if dialect == "sqlite":
        file = sqlite_file(uri)
        if file is None:
            return Problem(path, "an SQLite store needs a file", uri, "sqlite:///FOLDER/mlflow.db")
        if file.is_dir():
            return Problem(
                path,
                "is a folder, not an SQLite file",
                uri,
                "sqlite:///FOLDER/mlflow.db",
                f"use {uri.rstrip('/')}/mlflow.db",
            )
    elif dialect in _SQL:
        module = driver or _SQL[dialect]
        if importlib.util.find_spec(module) is None:
            return Problem(
                path,
                f"the database driver '{module}' is not installed",
                remove_password(uri),
                _EXAMPLES,
                f"pip install {_PACKAGES.get(module, module)}",
            )
    elif scheme in ("http", "https"):
        try:
            # The port raises if it is invalid, as `urlsplit` does for brackets
            host, _ = urlsplit(uri).hostname, urlsplit(uri).port
        except ValueError as error:
            return Problem(
                path, f"is not a valid address: {error}", remove_password(uri), "http://HOST:5000"
            )
        if not host:
            return Problem(path, "the server's name is missing", uri, "http://HOST:5000")
    elif scheme != "databricks":
        return Problem(
            path,
            f"'{scheme}' is not a tracking address",
            remove_password(uri),
            _EXAMPLES,
            nearest(dialect, ["sqlite", "http", "https", *_SQL]),
        )
    return None


def check_uri(uri: str, *, path: str = "tracking.uri") -> str:
    """Return the URI as any process in any folder can use it, with an absolute path to a file.

    Raises:
        ConfigError: MLflow does not accept it as a tracking URI.
    """
    if wrong := problem(uri, path=path):
        raise ConfigError(wrong)
    file = sqlite_file(uri)
    if file is None:
        return uri
    head, mark, query = uri.partition("?")
    return f"{head.partition('://')[0]}:///{file.absolute()}{mark}{query}"


def require_there(uri: str, *, path: str) -> None:
    """Raise a ConfigError if a store does not exist or a server does not answer."""
    # MLflow would create the store, and retry the server for minutes
    file = sqlite_file(uri)
    ConfigError.raise_if(
        file is not None and not (file.is_file() and file.stat().st_size),
        path,
        "there is no MLflow store here yet",
        str(file),
        "a store made by a training run",
        "samewise train experiment=resnet18_digits",
    )
    if not uri.startswith(("http://", "https://")):
        return
    try:
        urllib.request.urlopen(uri, timeout=10).close()
    except urllib.error.HTTPError:
        # A server answers, and a browser may log in
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            Problem(
                path,
                f"the server does not answer: {reason}",
                remove_password(uri),
                "the address of an MLflow server",
            )
        ) from None


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite URI; None for other URIs, or if there is no file."""
    scheme, _, rest = uri.partition("://")
    if scheme.partition("+")[0] != "sqlite":
        return None
    # `sqlite:///x` is a relative path, `sqlite:////x` an absolute one
    name = unquote(rest.partition("?")[0].removeprefix("/"))
    return Path(name) if name not in ("", ":memory:") else None


def remove_password(uri: str) -> str:
    """Return the URI without its password, to be shown and stored."""
    return re.sub(r"^([^/]*://[^/@:]*:)[^/@]+@", r"\1***@", uri)


def without_sql(message: str) -> str:
    """Remove what SQLAlchemy adds to a database's error.

    That is its cause, the statement with its values, and a link.
    """
    return re.sub(
        r"\(raised as a result of Query-invoked autoflush;[^)]*\)\s*|\s*\[SQL: "
        r".*|\s*\(Background on this error at: [^)]*\)",
        "",
        message,
        flags=re.DOTALL,
    )


def describe_failure(message: str) -> str:
    """Return an error of MLflow's or W&B's client on one line.

    Says what to do if the server requires authentication, and why an SQLite file cannot be used.
    """
    if re.match("UsageError: No API key|AuthenticationError: ", message):
        return (
            f"{REFUSED} (not logged in): run `wandb login`, or set WANDB_API_KEY; "
            "WANDB_MODE=offline needs neither"
        )
    status = re.search(r"failed with error code (401|403)\b", message)
    if status is None:
        causes = [cause for pattern, cause in _SQLITE.items() if re.search(pattern, message)]
        text = truncate(" ".join(without_sql(message).split()), _SHOWN)
        return ": ".join([*causes[:1], text])
    variables = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    if status[1] == "401":
        return f"{REFUSED} (HTTP 401, not logged in): set {variables}"
    return f"{REFUSED} (HTTP 403, not allowed): set {variables} to those of a user with access"
