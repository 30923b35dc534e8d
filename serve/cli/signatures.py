"""Commands for signatures of archives: ``sign``, ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve.common.command_line import reported
from serve.runtime.errors import UserError

Signed = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="An archive (.mar), or the folder of an artifact.")]
PasswordFile = Annotated[
    Path | None, typer.Option(help="File with the password of the private key in its first line, if it has one.")
]


def sign(
    archive: Signed,
    *,
    key: Annotated[Path, typer.Option(help="A private key on the curve P-256, P-384 or P-521, in PEM.")],
    password_file: PasswordFile = None,
) -> None:
    """Sign ARCHIVE with your private key. The signature is written beside it as ARCHIVE.sig.

    It is an OpenSSF model signature, made without any network. To create a pair of keys, run `openssl ecparam -name
    prime256v1 -genkey -noout -out release.key` and `openssl ec -in release.key -pubout -out release.pub`. Sign again
    after you pack ARCHIVE again.
    """
    with reported():
        from serve.archive.signature import sign as sign_archive

        typer.echo(f"{sign_archive(archive, key, password=password_in(password_file))}")


def verify(
    archive: Signed,
    *,
    key: Annotated[list[Path], typer.Option(help="Public key of the signer; with several, any of them is enough.")],
) -> None:
    """Check that ARCHIVE is complete and signed by KEY. The exit code is 1 if it is not.

    `start --require-signed` and `run --require-signed` do this on a private copy and load that copy. A stock TorchServe
    cannot. There, verify first and make sure that nobody changes the file afterwards.
    """
    with reported():
        from serve.archive.signature import verify as verify_archive
        from serve.runtime.card.card import load_card

        found = verify_archive(archive, key)
        if archive.is_dir():
            load_card(archive)
        else:
            from serve.archive.archive_file import check_archive

            check_archive(archive)
        typer.echo(f"{archive}: whole, and signed by {found}")


def password_in(file: Path | None) -> str | None:
    """Return the first line of a file. None without a file.

    Raises:
        UserError: the file cannot be read.
    """
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").partition("\n")[0]
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
