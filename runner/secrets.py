"""Removes secrets, and control characters of terminals and spreadsheets, from output."""

import errno
import json
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any, TextIO, TypeGuard, cast

HIDDEN = "***"

_WORDS = (
    r"(?:[\w.-]*[_.-])?(?:(?:pg)?password|passwd|passphrase|secret|secrets|(?:api|access|secret|private|account|auth|signing|encryption)[_-]?key|credentials?"
    r"|shared[_-]?access[_-]?(?:key|signature)|pw)|[\w.-]*[_.-](?:pwd|pass)"
)
_TOKENS = r"(?:[\w.-]*[_.-])?(?:access|auth|api|bearer|refresh|session|security|tracking|hf|github|gitlab)[_-]token"
"""Not `unk_token`, which is a word of a vocabulary."""
_NAMES = rf"(?i:{_WORDS}|{_TOKENS}|(?:[\w.-]*\.)?token)|[A-Z0-9_]+_TOKEN"
_PARTS = ("pass", "pw", "secret", "key", "credential", "signature", "token")
"""Each of these names has one of these."""
_KEY = re.compile(rf"(?<![\w.-])-*(?:{_NAMES})")
_WIDTH = re.compile(r"(?i:.*(?:pw|pass)\W+\d{1,4})")
"""`pw` is the width of a patch, too, and `pass` a number."""
_USER = re.compile(r"(\b[A-Za-z][\w+.-]*://)([^\s/@:'\"]*:(?!\d{1,5}/)[^\s'\"]*|[^\s/@'\"]+)(?=@)")
"""A password may contain an unencoded slash or `@`; what follows a port is not one."""
_QUERY = re.compile(
    r"((?:[?&;=]|%3[BD]|%26)(?:[\w.%-]*[_.-])?(?:key|code|sig|signature|pwd|token)(?:=|%3D))((?:(?!%3B|%26)[^\s&;'\"])+)",
    re.IGNORECASE,
)
"""Also of ODBC's words in an address, encoded or not: `?odbc_connect=UID%3Dme%3BPWD%3D...`."""
_HEADER = re.compile(
    r"((?i:\bauthorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+))([^\s'\",]+)"
)
_GIVEN = re.compile(
    rf"((?<![\w.-])(?:(?:--)?(?:{_NAMES})=|--(?:{_NAMES})(?:['\"],)?[ "
    rf"\t]+(?!-))['\"]?|['\"](?:{_NAMES})['\"]: *['\"]?|^\s*(?:{_NAMES}): *['\"]?)"
    r"([^\s&'\",;}\]]+)",
    re.MULTILINE,
)
_BARE = re.compile(
    r"(?<![\w-])()(sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{40,}|xox[a-z]-[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{35}|dapi[0-9a-f]{32}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*)"
)
"""Keys that are recognised by how they begin, under any name or none."""
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)(?s:.*?)(?=-----END [A-Z ]*PRIVATE KEY|\Z)"
)
SECRET_FILES = (
    *(
        ".env",
        ".env.*",
        "*.env",
        "*.pem",
        "*.key",
        "*.p12",
        "*.pfx",
        "*.jks",
        "*.keystore",
        "id_rsa*",
        "id_dsa*",
        "id_ecdsa*",
        "id_ed25519*",
    ),
    *(
        "*credential*",
        "*secret*",
        "*password*",
        ".netrc",
        ".pgpass",
        ".npmrc",
        ".pypirc",
        "*.tfstate",
        "*kubeconfig*",
    ),
)
"""Names of files and folders, in lower case, that are neither recorded nor handed on."""
_NOTHING = ("null", "None", "none", "true", "false", HIDDEN, "")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""Unicode's categories Cc, without line ends and tabs, and Cs; and characters that turn the direction
of writing, so that a line reads as another."""


def redact(text: str) -> str:
    """Replace secrets in a text by stars.

    Secrets are user and password of an address, and the values of names such as `token`.
    """
    # Quick tests come first, since all output passes through here
    if "://" in text:
        text = _QUERY.sub(_mask, _USER.sub(_mask, text))
    if "uthorization" in text:
        text = _HEADER.sub(_mask, text)
    lower = text.lower()
    if (not text.isascii() or any(part in lower for part in _PARTS)) and _KEY.search(text):
        text = _GIVEN.sub(_mask, text)
    return _BARE.sub(_mask, text)


def redact_file(name: str, text: str) -> str:
    """Replace secrets in a run's file, which stays valid in its format.

    In YAML a bare `***` would be an alias, and in JSON a secret may end inside an escape.
    """
    if name.endswith(".yaml"):
        return re.sub(r"(?m)([:-] +)\*\*\*(?=\s*$)", rf"\1'{HIDDEN}'", redact(text))
    if name != "environment.json":
        return text  # digests and numbers
    try:
        return json.dumps(redact_values(json.loads(text)), indent=2) + "\n"
    except ValueError:
        return redact(text)


def remove_private_keys(text: str) -> str:
    """Remove private keys from a text, often a diff."""
    return _PRIVATE_KEY.sub(rf"\1{HIDDEN}", text)


def looks_secret(path: PurePath) -> bool:
    """Return whether the name of a file, or of a folder above it, usually holds secrets."""
    return any(
        fnmatchcase(part.lower(), pattern) for part in path.parts for pattern in SECRET_FILES
    )


def redact_values(value: Any) -> Any:
    """Redact every text in plain values, and every value under the name of a secret."""
    if isinstance(value, Mapping):
        return {
            key: _redact_value(str(key), part)
            for key, part in cast(Mapping[Any, Any], value).items()
        }
    if isinstance(value, list | tuple):
        parts = cast(Sequence[Any], value)
        return [
            # `--token VALUE` in a list of arguments
            _redact_value(before[2:], part) if _is_option(before) else redact_values(part)
            for before, part in zip((None, *parts), parts, strict=False)
        ]
    return redact(value) if isinstance(value, str) else value


def printable(text: str) -> str:
    """Escape characters that control a terminal (escapes, carriage returns) as Python does.

    Line ends and tabs stay.
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def plain_cell(value: Any) -> Any:
    """Return a CSV cell that no spreadsheet takes for a formula. Numbers stay.

    Text that starts like a formula gets an apostrophe.
    """
    if not isinstance(value, str):
        return value
    text = printable(value)
    try:
        float(text)
    except ValueError:
        return f"'{text}" if len(text) > 1 and text[0] in "=+-@\t\n" else text
    return text


_STREAMS = {"<stdout>": "standard output", "<stderr>": "standard error"}


class LastingStream:
    """A stream that discards output once its reader is gone (`| head`, a closed terminal).

    The work continues and ends normally. A full disk behind it is an error with the stream's name,
    and the rest is discarded.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        with self._unheard():
            self.raw.write(text)
        return len(text)

    def flush(self) -> None:
        with self._unheard():
            self.raw.flush()

    @contextmanager
    def _unheard(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            # A closed terminal gives EIO, a closed pipe EPIPE
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            # Everything written from now on, and what Python still buffers
            os.dup2(nowhere, self.raw.fileno())
            os.close(nowhere)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.filename = _STREAMS.get(name := getattr(self.raw, "name", None), name)
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class PlainStream(LastingStream):
    """A lasting stream that escapes control characters and redacts secrets."""

    def write(self, text: str) -> int:
        lead = "\r" if text.startswith("\r") else ""  # a library's download bar restarts its line
        return super().write(lead + printable(redact(text[len(lead) :])))


@contextmanager
def filter_output() -> Generator[None]:
    """Within it, everything that is printed is escaped and redacted."""
    before = sys.stdout, sys.stderr
    within = tuple(
        PlainStream(stream.raw if isinstance(stream, PlainStream) else stream) for stream in before
    )
    sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], within)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in within:
            with suppress(OSError, ValueError):  # Python reports a full disk when it ends
                stream.flush()


def unfiltered_stream(stream: TextIO) -> TextIO:
    """The stream below the filter, for coloured output that is already escaped."""
    return cast(TextIO, LastingStream(stream.raw if isinstance(stream, LastingStream) else stream))


def _is_option(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.startswith("--")


def _redact_value(key: str, value: Any) -> Any:
    if isinstance(value, str) and _KEY.fullmatch(key) and value not in _NOTHING:
        return HIDDEN
    return redact_values(value)


def _mask(match: re.Match[str]) -> str:
    before, value = match.groups()
    return (
        match[0]
        if value in _NOTHING or value.startswith("${") or _WIDTH.fullmatch(match[0])
        else before + HIDDEN
    )
