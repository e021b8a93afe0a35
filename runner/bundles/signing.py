"""Signs a bundle in FILE.sig beside it, offline, with OpenSSF's model-signing and the user's key.

The signature covers the digests of all parts.

Anyone can check it without samewise: unpack the bundle with `tar`, then `model_signing verify key
FOLDER --signature FILE.sig --public-key KEY`.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from samewise.runner.bundles.archive import already_exists
from samewise.runner.errors import ConfigError, Problem, first_line
from samewise.runner.records.files import LARGEST

_MAKES = (
    "openssl ecparam -name prime256v1 -genkey -noout -out KEY; openssl ec -in KEY -pubout -out "
    "KEY.pub"
)


def signature_of(bundle: Path) -> Path:
    """The path of a bundle's signature."""
    return bundle.with_name(f"{bundle.name}.sig")


def require_signer(key: Path) -> None:
    """Check, before any other work, that signing will be possible.

    ConfigError if the package is not installed or the key does not exist.
    """
    missing = [
        name for name in ("model_signing", "OpenSSL") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(
            Problem(
                "--sign" if key.suffix != ".pub" else "--key",
                "needs OpenSSF's model-signing",
                hint="pip install 'samewise[sign]'",
            )
        )
    if not key.is_file():
        raise ConfigError(
            Problem(
                str(key),
                "this key does not exist",
                expected="an elliptic-curve key as PEM",
                hint=_MAKES,
            )
        )


def sign(folder: Path, bundle: Path, key: Path) -> Path:
    """Sign an unpacked bundle.

    Return the signature's path. ConfigError if the key cannot be used, or there is a signature
    already.

    Args:
        folder: Its parts.
        bundle: The file that they are from.
        key: A private key: PEM, on curve P-256, P-384 or P-521, without a passphrase.
    """
    file = signature_of(bundle)
    if file.exists():
        raise already_exists(file)
    signing: Any = importlib.import_module("model_signing.signing")
    try:
        signer: Any = signing.Config().use_elliptic_key_signer(private_key=key)
    except (ValueError, TypeError) as error:
        expected = "a private elliptic-curve key as PEM, without a passphrase"
        raise ConfigError(
            Problem(str(key), f"cannot sign: {first_line(error)}", expected=expected, hint=_MAKES)
        ) from None
    signer.sign(folder, file)
    return file


def require_signed(folder: Path, file: Path, key: Path) -> None:
    """Raise a ConfigError, naming the part, if an unpacked bundle is not signed with this public
    key (PEM) or was altered since.
    """
    if not file.is_file():
        raise ConfigError(
            Problem(
                str(file),
                "the signature is missing",
                expected="the file that `samewise bundle --sign` writes beside the bundle",
            )
        )
    if file.stat().st_size > LARGEST:
        raise ConfigError(
            Problem(
                str(file), f"is not the bundle's signature: it is larger than {LARGEST >> 20} MiB"
            )
        )
    verifying: Any = importlib.import_module("model_signing.verifying")
    try:
        verifier: Any = verifying.Config().use_elliptic_key_verifier(public_key=key)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            Problem(
                str(key),
                f"is not a public key: {first_line(error)}",
                expected="a public elliptic-curve key as PEM",
                hint=_MAKES,
            )
        ) from None
    try:
        verifier.verify(folder, file)
    except Exception as error:  # errors of cryptography, protobuf, JSON and model-signing
        why = (
            first_line(error)
            if str(error)
            else "the signature was made with another key, or was altered"
        )
        raise ConfigError(
            Problem(str(file), f"is not the bundle's signature by {key}: {why}")
        ) from None
