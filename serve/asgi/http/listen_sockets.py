"""The address where the server listens, and who can reach it there."""

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

# Connections that wait to be accepted. uvicorn's default is the same.
_WAITING = 2048


@dataclass(frozen=True)
class Listening:
    """An address, and what protects it.

    Attributes:
        host: a name or an address. Without ``expose`` only loopback is allowed.
        port: the port. 0: any free port.
        path: path of a unix socket to use instead. Only this user may open it.
        expose: whether other machines may reach the server.
        certificate: file of a certificate chain in PEM. It turns TLS on.
        key: file of its private key.
        client_authorities: file of authorities. Only clients with a certificate of one of them may connect.
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
        _ = self.tls  # reports unusable files at once
        if self.path is None and not self.expose and not _is_loopback(self.host):
            raise UserError(
                f"--host {self.host} accepts connections from other machines: add --expose if you want that, or "
                "listen on 127.0.0.1 or a --socket"
            )

    @functools.cached_property
    def tls(self) -> Tls | None:
        """The TLS files for everything that listens here. None: no TLS."""
        if self.certificate is None:
            return None
        return Tls(self.certificate, self.key, self.client_authorities)

    def open(self) -> socket.socket:
        """Bind the address and listen. A client that connects waits until the server accepts it.

        The socket listens at once. Two sockets with SO_REUSEADDR may be bound to one port, but only the first can
        listen. uvloop 0.23 hides that error, and the server would be ready while nobody listens.

        Raises:
            UserError: the address is taken or cannot be used.
        """
        return self._open_unix(self.path) if self.path is not None else self._open_tcp(self.port)

    def join(self, port: int) -> socket.socket:
        """Listen beside another process of this user. The kernel then distributes new connections.

        Args:
            port: the port of the other process, whose socket was passed to `shared`.

        Raises:
            UserError: the port cannot be used.
        """
        return self._open_tcp(port, beside=True)

    def socket_file(self) -> SocketFile | None:
        """Return the file of the unix socket that `open` has just made. None: there is no unix socket."""
        if self.path is None:
            return None
        found = self.path.lstat()
        return SocketFile(self.path, found.st_dev, found.st_ino)

    def url(self, opened: socket.socket) -> str:
        """Return the address of an opened socket, for a person."""
        if self.path is not None:
            return f"unix:{self.path}"
        host, port = opened.getsockname()[:2]
        scheme = "https" if self.certificate is not None else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def opens(self, *, tokens: bool) -> list[str]:
        """Return notes on who can reach the server. There are none for a unix socket with tokens."""
        lines = []
        if self.path is None and self.expose:
            lines.append(f"exposed: everyone who can reach {self.host}:{self.port} over the network can send requests")
            if self.certificate is None:
                lines.append("exposed without TLS: images, answers and tokens are sent unencrypted")
        if not tokens:
            who = "this user" if self.path is not None else "every user of this machine"
            lines.append(f"no token: the server answers {'everyone who can reach it' if self.expose else who}")
        return lines

    def __getstate__(self) -> dict[str, Any]:
        """Leave the TLS files out. Another process reads them itself."""
        return {name: value for name, value in self.__dict__.items() if name != "tls"}

    def _open_tcp(self, port: int, *, beside: bool = False) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            opened = socket.socket(family, kind, protocol)
        except OSError as error:
            raise UserError(f"--host {self.host}: {error.strerror}") from None
        except UnicodeError:  # a label is empty or longer than 63 characters
            raise UserError(f"--host {self.host}: is not a valid host name") from None
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if beside:
                shared(opened)
            opened.bind(address)
            opened.listen(_WAITING)
        except OSError as error:
            opened.close()
            raise UserError(
                f"{self.host}:{port} cannot be used ({error.strerror}): stop the program that listens there, or "
                "choose another --port"
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
            raise UserError(f"--socket {path}: cannot be created ({error.strerror or error})") from None
        except UserError:
            opened.close()
            raise
        finally:
            os.umask(before)
        return opened


def shared(opened: socket.socket) -> None:
    """Let other processes of this user listen on the port of a socket too.

    Linux (3.9) gives each process an even share, by SO_REUSEPORT. The socket may listen already. If it was opened
    without the option, nobody else had the address then.
    """
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


@dataclass(frozen=True)
class SocketFile:
    """The file of a unix socket, identified even if another file takes its path later.

    Attributes:
        path: where the file was created.
        device: the number of its file system.
        inode: its inode. No other file gets it while the socket is open.
    """

    path: Path
    device: int
    inode: int

    def remove(self) -> None:
        """Remove the file if it is still there. The path may belong to another server by now.

        Call it while the socket is open.
        """
        with suppress(FileNotFoundError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                self.path.unlink()


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket that a dead server left behind, and nothing else.

    Raises:
        UserError: the file is not a socket, or a server listens there.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"--socket {path}: is a file, not a socket; choose another path")
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
