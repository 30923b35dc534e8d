"""TLS by files that are renewed: who shakes hands after they were read anew gets the new ones, others keep theirs."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from serve.runtime.errors import UserError


@dataclass(frozen=True)
class Secrets:
    """What a server shows by TLS, and whom it lets in, as its files said when they were read.

    Attributes:
        context: made of the files.
        chain: the certificate and those above it, in PEM.
        key: its private key, in PEM.
        authorities: those whose clients alone are let in, in PEM; None: anybody is.
    """

    context: ssl.SSLContext
    chain: bytes
    key: bytes
    authorities: bytes | None


class Tls:
    """The files of TLS of one server, for all that listens there.

    Attributes:
        newest: what handshakes are made by; may be replaced by what `read` returns, from any thread.
        context: for a listener. Its handshakes are made by ``newest``.

    Args:
        certificate: file of a certificate chain in PEM.
        key: file of its private key; None: it is in the same file.
        client_authorities: file of the authorities whose clients alone are let in.

    Raises:
        UserError: as `read`.
    """

    def __init__(self, certificate: Path, key: Path | None, client_authorities: Path | None) -> None:
        self._certificate, self._key, self._authorities = certificate, key, client_authorities
        self.newest = self.read()
        self.context = self.newest.context
        # OpenSSL asks at each handshake, also of clients that name no server.
        self.context.sni_callback = self._by_the_newest

    def read(self) -> Secrets:
        """Read the files; nobody is asked for a pass phrase.

        Raises:
            UserError: TLS cannot be spoken with them: which of them is at fault, and why.
        """
        before = self._contents()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        told = f"--tls-certificate {self._certificate}" + (f" and --tls-key {self._key}" if self._key else "")
        right = "they must be a certificate chain and its private key, in PEM and without a pass phrase"
        try:
            context.load_cert_chain(self._certificate, self._key, password="")
            if self._authorities is not None:
                told = f"--tls-client-authorities {self._authorities}"
                right = "it must hold certificates in PEM"
                context.load_verify_locations(self._authorities)
                context.verify_mode = ssl.CERT_REQUIRED
                # A session that is resumed asks for no certificate, and is the first context's for ever: who is let in
                # no more would be. TLS 1.2 also resumes without a ticket, which Python (3.11) cannot forbid.
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.num_tickets = 0
        except OSError as error:
            reason = getattr(error, "reason", None) or error.strerror or error
            raise UserError(f"{told} cannot be used for TLS ({reason}): {right}") from None
        if self._contents() != before:
            raise UserError(f"{told} changed while it was read: try again")
        return Secrets(context, *before)

    def _contents(self) -> tuple[bytes, bytes, bytes | None]:
        try:
            chain = self._certificate.read_bytes()
            key = chain if self._key is None else self._key.read_bytes()
            return chain, key, None if self._authorities is None else self._authorities.read_bytes()
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None

    def _by_the_newest(self, handshake: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: object) -> None:
        handshake.context = self.newest.context
