"""The tokens of clients, from a file that may change while the server runs."""

from __future__ import annotations

import codecs
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import time
from pathlib import Path

from serve.asgi.http.messages import RefusedError
from serve.runtime.errors import UserError

_LOG = logging.getLogger(__name__)
_TOKEN = re.compile(rb"[!-~]{16,512}")
_MOST = 64
_LARGEST_FILE = 1 << 16
_CHECK_EVERY_S = 1.0


class Tokens:
    """The tokens of a file, one on each line. Empty lines and lines that begin with ``#`` are ignored.

    Every token in the file is valid. To replace one without a refused request: add the new one, give it to the clients,
    remove the old one. The file is checked once a second and read again after a change. If the new content cannot be
    used, the old tokens stay valid and the log says why.

    Args:
        path: the file. Only its owner may read or write it, who is this user or root. If root owns it, its group may
            read it, because Kubernetes mounts secrets so.

    Raises:
        UserError: the file is missing, readable by others, without a token, or has a token of less than 16 characters.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digests, self._state = _read(path)
        self._looked = time.monotonic()

    def check(self, authorization: str) -> None:
        """Check that an ``Authorization`` header has a valid token. Its run time reveals nothing about the tokens.

        Raises:
            RefusedError: 401.
        """
        self._refresh()
        kind, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.strip().encode("latin-1", "replace")).digest()
        valid = False
        for known in self._digests:
            valid |= hmac.compare_digest(digest, known)
        if kind.lower() != "bearer" or not valid:
            found = "a token that is not valid" if authorization else "no token"
            raise RefusedError(
                401,
                f"the request has {found}: send the header 'Authorization: Bearer TOKEN'",
                "unauthorised",
                (("www-authenticate", "Bearer"),),
            )

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < _CHECK_EVERY_S:
            return
        self._looked = now
        try:
            status = self.path.stat()
            if _state(status) == self._state:
                return
            self._digests, self._state = _read(self.path)
            _LOG.info("%s: read again, %d token(s) are valid", self.path, len(self._digests))
        except (OSError, UserError) as error:
            _LOG.error("the previous tokens stay valid, because the file cannot be used now: %s", error)


def make_token_file(path: Path) -> bool:
    """Write a file with one new token that only its owner can read, unless the file exists.

    Returns:
        Whether the file was written.

    Raises:
        UserError: the file cannot be written. No file is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return False
    try:
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(
                "# One token on each line; all are valid. The server reads this file again when it "
                f"changes.\n{secrets.token_hex(24)}\n"
            )
    except OSError as error:
        path.unlink(missing_ok=True)  # else the next start would find a file without a token
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return True


def _read(path: Path) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """Return the SHA-256 of each token of a file, and the file's state when it was read."""
    try:
        # Without O_NONBLOCK, a pipe at this path would block the server until somebody writes.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            status = os.fstat(stream.fileno())
            _check_private(path, status)
            content = stream.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    # Editors on Windows write a byte order mark first.
    lines = [line.strip() for line in content.removeprefix(codecs.BOM_UTF8).splitlines()]
    tokens = [line for line in lines if line and not line.startswith(b"#")]
    if not 1 <= len(tokens) <= _MOST or len(content) > _LARGEST_FILE:
        raise UserError(f"{path}: must hold 1 to {_MOST} tokens, one on each line; found {len(tokens)}")
    for number, token in enumerate(tokens, 1):
        if not _TOKEN.fullmatch(token):
            raise UserError(f"{path}: token {number} must have 16 to 512 visible ASCII characters; it has {len(token)}")
    return tuple(hashlib.sha256(token).digest() for token in tokens), _state(status)


def _check_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is not a regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise UserError(f"{path}: belongs to user {status.st_uid}; it must belong to you or to root")
    allowed = 0o640 if status.st_uid == 0 and os.geteuid() != 0 else 0o600
    if mode & 0o077 & ~allowed:
        raise UserError(f"{path}: other users may read or write it (mode {mode:04o}); set it with `chmod 600 {path}`")


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
