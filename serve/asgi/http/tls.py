"""TLS with files that can be renewed: new handshakes use the new files, open connections stay."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from serve.runtime.errors import UserError


@dataclass(frozen=True)
class Secrets:
    """The contents of the TLS files at one time.

    Attributes:
        context: made from the files.
        chain: the certificate chain, in PEM.
        key: the private key, in PEM.
        authorities: the authorities whose clients may connect, in PEM. None: any client may.
    """

    context: ssl.SSLContext
    chain: bytes
    key: bytes
    authorities: bytes | None


class Tls:
    """The TLS files of one server, shared by everything that listens.

    Attributes:
        newest: used for new handshakes. Any thread may replace it with a result of `read`.
        context: for a listener. Its handshakes use ``newest``.

    Args:
        certificate: file of a certificate chain in PEM.
        key: file of its private key. None: it is in the same file.
        client_authorities: file of the authorities whose clients may connect. None: any client may.

    Raises:
        UserError: see `read`.
    """

    def __init__(self, certificate: Path, key: Path | None, client_authorities: Path | None) -> None:
        self._certificate, self._key, self._authorities = certificate, key, client_authorities
        self.newest = self.read()
        self.context = self.newest.context
        # OpenSSL calls this at each handshake, also for clients that name no server.
        self.context.sni_callback = self._use_newest

    def read(self) -> Secrets:
        """Read the files. There is no prompt for a pass phrase.

        Raises:
            UserError: the files cannot be used for TLS. The message names the file and the reason.
        """
        before = self._contents()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        options = f"--tls-certificate {self._certificate}" + (f" and --tls-key {self._key}" if self._key else "")
        right = "give a certificate chain and its private key, in PEM and without a pass phrase"
        try:
            context.load_cert_chain(self._certificate, self._key, password="")
            if self._authorities is not None:
                options = f"--tls-client-authorities {self._authorities}"
                right = "it must hold certificates in PEM"
                context.load_verify_locations(self._authorities)
                context.verify_mode = ssl.CERT_REQUIRED
                # A resumed session sends no certificate and stays with its first context. A client whose authority was
                # removed could still connect. TLS 1.2 also resumes without a ticket, and Python (3.11) cannot forbid
                # that.
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.num_tickets = 0
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror or error
            raise UserError(f"{options} cannot be used for TLS ({reason}): {right}") from None
        if self._contents() != before:
            raise UserError(f"{options} changed while it was read: try again")
        return Secrets(context, *before)

    def _contents(self) -> tuple[bytes, bytes, bytes | None]:
        try:
            chain = self._certificate.read_bytes()
            key = chain if self._key is None else self._key.read_bytes()
            return chain, key, None if self._authorities is None else self._authorities.read_bytes()
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None

    def _use_newest(self, handshake: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: object) -> None:
        handshake.context = self.newest.context
