"""What is not written down or shown: passwords and tokens; and what would make a terminal or a spreadsheet do something."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import unicodedata
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
_KEY = re.compile(_NAMES)
_WIDTH = re.compile(r"(?i:.*(?:pw|pass)\W+\d{1,4})")
"""`pw` is the width of a patch, too, and `pass` a number."""
_USER = re.compile(r"(\b[A-Za-z][\w+.-]*://)([^\s/@:'\"]*:(?!\d{1,5}/)[^\s'\"]*|[^\s/@'\"]+)(?=@)")
"""A password may hold a slash or an `@` that nobody has encoded; what follows a port is none."""
_QUERY = re.compile(r"((?:[?&;=]|%3[BD]|%26)(?:[\w.%-]*[_.-])?(?:key|code|sig|signature|pwd|token)(?:=|%3D))((?:(?!%3B|%26)[^\s&;'\"])+)", re.IGNORECASE)
"""Also of ODBC's words in an address, encoded or not: `?odbc_connect=UID%3Dme%3BPWD%3D...`."""
_HEADER = re.compile(r"((?i:\bauthorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+))([^\s'\",]+)")
_GIVEN = re.compile(
    rf"((?<![\w.-])(?:(?:--)?(?:{_NAMES})=|--(?:{_NAMES})(?:['\"],)?[ \t]+(?!-))['\"]?|['\"](?:{_NAMES})['\"]: *['\"]?|^\s*(?:{_NAMES}): *['\"]?)"
    r"([^\s&'\",;}\]]+)",
    re.MULTILINE,
)
_BARE = re.compile(
    r"(?<![\w-])()(sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{40,}|xox[a-z]-[\w-]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{35}|dapi[0-9a-f]{32}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*)"
)
"""Keys that tell themselves by how they begin, under whatever name or none."""
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)(?s:.*?)(?=-----END [A-Z ]*PRIVATE KEY|\Z)")
SECRET_FILES = (
    *(".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("*credential*", "*secret*", "*password*", ".netrc", ".pgpass", ".npmrc", ".pypirc", "*.tfstate", "*kubeconfig*"),
)
"""Names of files and folders, in lower case, that are neither recorded nor handed on."""
_NOTHING = ("null", "None", "none", "true", "false", HIDDEN, "")
_TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that turn the direction of writing, so that a line reads as another."""


def redact(text: str) -> str:
    """The text with stars for what may open something: user and password of an address, and the values of names such as `token` and `password`."""
    if "://" in text:
        text = _QUERY.sub(_starred, _USER.sub(_starred, text))
    if "uthorization" in text:
        text = _HEADER.sub(_starred, text)
    if _KEY.search(text):
        text = _GIVEN.sub(_starred, text)
    return _BARE.sub(_starred, text)


def redact_file(name: str, text: str) -> str:
    """A run's file as it is handed on, of its format still: in YAML a bare `***` would be an alias, and in JSON a secret may end in the middle of an escape."""
    if name.endswith(".yaml"):
        return re.sub(r"(?m)([:-] +)\*\*\*(?=\s*$)", rf"\1'{HIDDEN}'", redact(text))
    if name != "environment.json":
        return text  # digests and numbers
    try:
        return json.dumps(redact_values(json.loads(text)), indent=2) + "\n"
    except ValueError:
        return redact(text)


def without_keys(text: str) -> str:
    """The text, often a diff, less the private keys in it."""
    return _PRIVATE_KEY.sub(rf"\1{HIDDEN}", text)


def looks_secret(path: PurePath) -> bool:
    """Whether a file, or a folder that it is in, is called as those are that hold secrets."""
    return any(fnmatchcase(part.lower(), pattern) for part in path.parts for pattern in SECRET_FILES)


def redact_values(value: Any) -> Any:
    """Plain values with the same done to every text in them, and to whatever stands under such a name."""
    if isinstance(value, Mapping):
        return {key: _under(str(key), part) for key, part in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        parts = cast(Sequence[Any], value)
        return [_under(before[2:], part) if _is_option(before) else redact_values(part) for before, part in zip((None, *parts), parts, strict=False)]
    return redact(value) if isinstance(value, str) else value


def printable(text: str) -> str:
    """The text with characters that steer a terminal (escapes, carriage returns) spelled as Python does; lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in "\n\t" or not (one in _TURNING or unicodedata.category(one) in ("Cc", "Cs")) else _spelled(one) for one in text)


def plain_cell(value: Any) -> Any:
    """A cell of a CSV file that no spreadsheet takes for a formula: text that begins like one gets an apostrophe before it. Numbers stay."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    try:
        float(text)
    except ValueError:
        return f"'{text}" if len(text) > 1 and text[0] in "=+-@\t\n" else text
    return text


class LastingStream:
    """A stream that is silent once nobody reads it (`| head`, a terminal that is closed): what is done goes on, and ends as it would have."""

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
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.raw.fileno())  # what is written from now on, by whomever, and what Python has not written yet
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class PlainStream(LastingStream):
    """Such a stream that gives on what it is told, printable and without secrets."""

    def write(self, text: str) -> int:
        lead = "\r" if text.startswith("\r") else ""  # a library's bar of a download begins its line anew
        return super().write(lead + printable(redact(text[len(lead) :])))


@contextmanager
def plain_output() -> Generator[None]:
    """All that is printed within goes through such streams."""
    before = sys.stdout, sys.stderr
    within = tuple(PlainStream(stream.raw if isinstance(stream, PlainStream) else stream) for stream in before)
    sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], within)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in within:
            with suppress(OSError, ValueError):  # a full disk is told by Python, as it ends
                stream.flush()


def unfiltered(stream: TextIO) -> TextIO:
    """The stream for who colours what is printable already."""
    return cast(TextIO, LastingStream(stream.raw if isinstance(stream, LastingStream) else stream))


def _is_option(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.startswith("--")


def _under(key: str, value: Any) -> Any:
    if isinstance(value, str) and _KEY.fullmatch(key) and value not in _NOTHING:
        return HIDDEN
    return redact_values(value)


def _starred(found: re.Match[str]) -> str:
    before, value = found.groups()
    return found[0] if value in _NOTHING or value.startswith("${") or _WIDTH.fullmatch(found[0]) else before + HIDDEN


def _spelled(one: str) -> str:
    return one.encode("unicode_escape").decode("ascii")
