"""Commands for signatures of archives: ``sign``, ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serve.common.command_line import reported
from serve.runtime.errors import UserError

Signed = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="An archive (.mar), or an artifact's folder.")]
PasswordFile = Annotated[
    Path | None, typer.Option(help="A file whose first line is the private key's password, if it has one.")
]


def sign(
    archive: Signed,
    *,
    key: Annotated[Path, typer.Option(help="A private key on the curve P-256, P-384 or P-521, in PEM.")],
    password_file: PasswordFile = None,
) -> None:
    """Sign ARCHIVE with a key of your own; the signature is written beside it as ARCHIVE.sig.

    It is an OpenSSF model signature, made without any network. A pair of keys is made by `openssl ecparam -name
    prime256v1 -genkey -noout -out release.key` and `openssl ec -in release.key -pubout -out release.pub`. Whoever
    packs ARCHIVE anew signs it anew.
    """
    with reported():
        from serve.archive.signature import sign as sign_archive

        typer.echo(f"{sign_archive(archive, key, password=password_in(password_file))}")


def verify(
    archive: Signed,
    *,
    key: Annotated[
        list[Path], typer.Option(help="The public key of who should have signed it; repeatable, any will do.")
    ],
) -> None:
    """See that ARCHIVE is whole and that KEY signed exactly that. The exit code is 1 where it did not.

    `start --require-signed` and `run --require-signed` do so on a private copy and load that. A stock TorchServe
    cannot: there, verify first and see to it that nobody changes the file meanwhile.
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
