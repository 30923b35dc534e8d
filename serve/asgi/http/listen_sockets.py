"""Where the server listens, and who can reach it there."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.asgi.http.tls import Tls
from serve.runtime.errors import UserError

# Connections that wait to be accepted: as many as uvicorn has wait, by default.
_WAITING = 2048


@dataclass(frozen=True)
class Listening:
    """An address, and what protects it.

    Attributes:
        host: a name or an address; only loopback where ``expose`` is not set.
        port: 0: any that is free.
        path: of a unix socket instead, which only this user may open.
        expose: whether others than this machine may reach it.
        certificate: file of a certificate chain in PEM: TLS.
        key: file of its private key.
        client_authorities: file of the authorities whose clients alone are let in, by a certificate of their own.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    path: Path | None = None
    expose: bool = False
    certificate: Path | None = None
    key: Path | None = None
    client_authorities: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port must be between 0 and 65535, got {self.port}")
        if self.key is not None and self.certificate is None:
            raise UserError("--tls-key needs --tls-certificate")
        if self.client_authorities is not None and self.certificate is None:
            raise UserError("--tls-client-authorities needs --tls-certificate")
        for option, path in (
            ("--tls-certificate", self.certificate),
            ("--tls-key", self.key),
            ("--tls-client-authorities", self.client_authorities),
        ):
            if path is not None and not path.is_file():
                raise UserError(f"{option}: there is no file {path}")
        _ = self.tls  # files that make none are told at once
        if self.path is None and not self.expose and not _is_loopback(self.host):
            raise UserError(
                f"--host {self.host} lets others than this machine in: add --expose if that is meant, or listen on "
                "127.0.0.1 or a --socket"
            )

    @functools.cached_property
    def tls(self) -> Tls | None:
        """By which all that listens speaks TLS; None: it does not."""
        if self.certificate is None:
            return None
        return Tls(self.certificate, self.key, self.client_authorities)

    def open(self) -> socket.socket:
        """Take the address, so that nobody else can; who connects waits until the server accepts it.

        It listens at once: two sockets with SO_REUSEADDR may be bound to one port, and only the first of them can
        listen. uvloop 0.23 says nothing where it cannot, and the server would be ready with nobody listening.

        Raises:
            UserError: it is taken, or cannot be.
        """
        return self._open_unix(self.path) if self.path is not None else self._open_tcp(self.port)

    def join(self, port: int) -> socket.socket:
        """Listen beside another process of this user that let it; the kernel deals out who connects from then on.

        Args:
            port: where the other listens, by a socket that was given to `shared`.

        Raises:
            UserError: it cannot be.
        """
        return self._open_tcp(port, beside=True)

    def socket_file(self) -> SocketFile | None:
        """The file of the unix socket that `open` made just now; None: it is none of a path."""
        if self.path is None:
            return None
        found = self.path.lstat()
        return SocketFile(self.path, found.st_dev, found.st_ino)

    def url(self, opened: socket.socket) -> str:
        """The address for a person: of a socket that `open` gave."""
        if self.path is not None:
            return f"unix:{self.path}"
        host, port = opened.getsockname()[:2]
        scheme = "https" if self.certificate is not None else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def opens(self, *, tokens: bool) -> list[str]:
        """What a person should know of who can reach it; empty for this user's own socket with tokens."""
        told = []
        if self.path is None and self.expose:
            told.append(f"exposed: whoever reaches {self.host}:{self.port} over the network can ask")
            if self.certificate is None:
                told.append("exposed: without TLS, images, answers and tokens pass in the clear")
        if not tokens:
            who = "this user" if self.path is not None else "every user of this machine"
            told.append(f"no token: {'whoever reaches it' if self.expose else who} is answered")
        return told

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which reads the files of TLS by itself."""
        return {name: value for name, value in self.__dict__.items() if name != "tls"}

    def _open_tcp(self, port: int, *, beside: bool = False) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            opened = socket.socket(family, kind, protocol)
        except OSError as error:
            raise UserError(f"--host {self.host}: {error.strerror}") from None
        except UnicodeError:  # a label of it is empty, or has more than 63 characters
            raise UserError(f"--host {self.host}: it is no name of a host") from None
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if beside:
                shared(opened)
            opened.bind(address)
            opened.listen(_WAITING)
        except OSError as error:
            opened.close()
            raise UserError(
                f"{self.host}:{port} cannot be used ({error.strerror}): stop what listens there or choose another "
                "--port"
            ) from None
        return opened

    def _open_unix(self, path: Path) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            _remove_dead_socket(path)
            opened.bind(str(path))
            opened.listen(_WAITING)
        except OSError as error:
            opened.close()
            raise UserError(f"--socket {path}: cannot be made ({error.strerror or error})") from None
        except UserError:
            opened.close()
            raise
        finally:
            os.umask(before)
        return opened


def shared(opened: socket.socket) -> None:
    """Let other processes of this user listen beside a socket (SO_REUSEPORT of Linux 3.9: an even share for each).

    It may listen already: a socket that was opened by itself has seen before that nobody else has the address.
    """
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


@dataclass(frozen=True)
class SocketFile:
    """The file of a unix socket, told from another that is put in its place later.

    Attributes:
        path: where it was made.
        device: of its file system.
        inode: its number there, which no other file gets while the socket is open.
    """

    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """Remove it, where it is still there: after somebody else has, the path may be another server's.

        Called while the socket is open.
        """
        with suppress(FileNotFoundError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                self.path.unlink()


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket that a server left behind, and nothing else.

    Raises:
        UserError: it is no socket, or somebody listens there.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"--socket {path}: is a file that is no socket; choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise UserError(f"--socket {path}: another server listens there")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
