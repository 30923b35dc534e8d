"""Signatures of archives and artifact folders by OpenSSF Model Signing, with the user's own key and no network.

A signature is beside its file, as ``<name>.sig``. It is a Sigstore bundle that any implementation of the specification
reads (https://github.com/ossf/model-signing-spec). It proves who signed the bytes, and says nothing about their
effects.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve.archive.private_copy import private_copy
from serve.common.layout import SIGNATURE_ENDING
from serve.runtime.errors import PipelineError, UserError, first_line

_LARGEST_SIGNATURE = 16 << 20  # bytes
_KINDS = "it must be on the curve P-256, P-384 or P-521, in PEM"


class SignatureError(PipelineError):
    """A required signature is missing, from another signer, or does not match the content."""


def signature_path(signed: Path) -> Path:
    """Return the path of the signature of an archive or a folder."""
    return signed.with_name(signed.name + SIGNATURE_ENDING)


def sign(path: Path, key: Path, *, password: str | None = None) -> Path:
    """Sign an archive, or the loaded files of an artifact folder, and write the signature beside it.

    Args:
        path: the ``.mar`` file or the folder.
        key: a private key on the curve P-256, P-384 or P-521, in PEM.
        password: the key's password, if it is encrypted.

    Returns:
        The signature's path.

    Raises:
        UserError: there is nothing to sign, the key cannot be used, or model-signing is not installed.
        CardError: the folder is no artifact.
    """
    if not path.exists():
        raise UserError(f"{path}: there is nothing to sign")
    signing = _library("signing")
    try:
        # The library declares a text, but its cryptography needs bytes (model-signing 1.1.1).
        secret = None if password is None else password.encode()
        signer = signing.Config().use_elliptic_key_signer(private_key=key, password=secret)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{key}: cannot sign: {_why(error)}; {_KINDS}") from None
    written = signature_path(path)
    with tempfile.TemporaryDirectory(prefix="signing-") as folder:
        subject = private_copy(path, Path(folder)) if path.is_dir() else path
        try:
            signer.set_hashing_config(_hashing()).sign(subject, written)
        except OSError as error:
            raise UserError(f"{written}: cannot be written ({error.strerror})") from None
    return written


def check_signature(path: Path, keys: Sequence[Path], signature: Path | None = None) -> Path:
    """Check that one of ``keys`` signed exactly the content of ``path``.

    Args:
        path: the ``.mar`` file, or a folder from `private_copy.private_copy`. The caller must ensure that nobody
            changes it before its use.
        keys: public keys in PEM. One of them is enough.
        signature: path of the signature. None: beside it.

    Returns:
        The key that signed it.

    Raises:
        SignatureError: it is not signed, by none of the keys, or was changed afterwards.
        UserError: a key cannot be used, or model-signing is not installed.
    """
    signature = signature or signature_path(path)
    if not signature.is_file():
        raise SignatureError(f"{path}: is not signed: there is no {signature.name} beside it")
    if signature.stat().st_size > _LARGEST_SIGNATURE:
        raise SignatureError(f"{signature}: is not a signature: it is larger than {_LARGEST_SIGNATURE >> 20} MB")
    verifying = _library("verifying")
    reasons = []
    for key in keys:
        config = verifying.Config()
        try:
            config.use_elliptic_key_verifier(public_key=key)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{key}: cannot verify: {_why(error)}; {_KINDS}") from None
        try:
            config.set_hashing_config(_hashing()).verify(path, signature)
        except Exception as error:  # noqa: BLE001 - a crafted bundle fails in json, base64, pydantic, cryptography …
            reasons.append(f"{key.name}: {_why(error)}")
        else:
            return key
    raise SignatureError(f"{path}: its signature does not match {'; '.join(reasons)}")


def verify(path: Path, keys: Sequence[Path]) -> Path:
    """Check the signature of an archive or an artifact folder in a store; see `check_signature`.

    Raises:
        UserError: there is nothing to verify, or no key.
        CardError: the folder is no artifact.
    """
    if not path.exists():
        raise UserError(f"{path}: there is nothing to verify")
    if not keys:
        raise UserError(f"{path}: name the public key of the signer with --key")
    with tempfile.TemporaryDirectory(prefix="verifying-") as folder:
        subject = private_copy(path, Path(folder)) if path.is_dir() else path
        return check_signature(subject, keys, signature_path(path))


def _hashing() -> Any:
    """Return the hashing of all files. The library's default leaves out ``.gitignore`` and similar files."""
    files = _library("hashing").Config().use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False)
    return files.set_ignored_paths(paths=[], ignore_git_paths=False)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(f"model_signing.{name}")
    except ImportError as error:
        raise UserError(
            f"signatures need the extra 'signing' (pip install 'optimize-and-serve[signing]'): {first_line(error)}"
        ) from None


def _why(error: Exception) -> str:
    """Return the reason in one line. cryptography gives none for a wrong signature."""
    if type(error).__name__ == "InvalidSignature":
        return "it was signed with another key, or changed after signing"
    return (error.strerror if isinstance(error, OSError) else None) or first_line(error)
