"""A TorchServe archive (``.mar``) of this project as a file: what lies in it by which name, read, checked and written.

What is packed into it, `archive` knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serve.hints import command
from serve.runtime.card import CARD_FILE, Card, parse_card, write_card
from serve.runtime.errors import CardError, UserError
from serve.runtime.known import KNOWN_FILE, KnownAnswer, parse_known
from serve.runtime.serving import SERVING_FILE, Serving, parse_serving

MANIFEST_FILE = "MAR-INF/MANIFEST.json"
CONFIG_FILE = "model-config.yaml"
HANDLER_FILE = "handler.py"
CLASSES_FILE = "index_to_name.json"

#: Of a model that takes no other's place.
MODEL_VERSION = "1.0"

# torch-model-archiver's rule for model names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")

# The stock archiver writes the present time here, and entries with the times and the order of a
# folder's listing: two archives of one artifact never compare equal, so nobody can tell by its hash
# whether an archive is what it should be. Ours depend on their contents alone.
CREATED_ON = "01/01/1980 00:00:00"
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


def check_model_name(name: str) -> str:
    """Return ``name`` if TorchServe accepts it as a model's name.

    Raises:
        UserError: it does not.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot name a served model: letters, digits, '_', '-' and '.' are allowed, "
            f"and the first must be a letter or a digit"
        )
    return name


def with_version(archive: Path, version: str, destination: Path) -> Path:
    """Pack an archive again as another version of the model, which TorchServe tells versions apart by.

    Args:
        archive: an archive of this project, which may be ``destination``.
        version: stands in the manifest of the new one.
        destination: the ``.mar`` to write, atomically.

    Raises:
        UserError: there is no such archive, or the new one cannot be written.
        CardError: it is not whole.
    """
    card = check_archive(archive)
    with _opened(archive) as opened:
        manifest = json.loads(opened.read(MANIFEST_FILE))
    manifest["model"]["modelVersion"] = version
    content = json_bytes(manifest)
    packed = {**card.packed, MANIFEST_FILE: hashlib.sha256(content).hexdigest()}
    try:
        with (
            tempfile.TemporaryDirectory(dir=destination.parent, prefix=".version-") as unpacked,
            zipfile.ZipFile(archive) as whole,
        ):
            entries: dict[str, bytes | Path] = {
                name: Path(whole.extract(name, unpacked)) for name in {**card.files, **card.packed}
            }
            entries |= {MANIFEST_FILE: content, CARD_FILE: card_bytes(dataclasses.replace(card, packed=packed))}
            write_zip(destination, entries)
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror or error})") from None
    return destination


def check_archive(archive: Path) -> Card:
    """Check every file in an archive, handler and runtime included, against the card in it.

    Returns:
        The card.

    Raises:
        UserError: there is no such file.
        CardError: a file was changed, added or removed, which the message names.
    """
    with _opened(archive) as opened:
        # Before anything is read: a small file may unpack to any size, deflated or in entries that overlap.
        if sum(entry.file_size for entry in opened.infolist()) > archive.stat().st_size:
            raise CardError(f"{archive}: unpacks to more than it has, and what this project packs does not")
        card = _card_of(archive, opened)
        expected = {**card.files, **card.packed}
        names = [entry.orig_filename for entry in opened.infolist()]
        for name in names:
            if names.count(name) > 1:
                raise CardError(f"{archive}: holds {name} twice")
            if name not in expected and name != CARD_FILE:
                raise CardError(f"{archive}: holds {name[:80]!r}, which its card does not name; pack it again")
        for name, digest in expected.items():
            if name not in names:
                raise CardError(f"{archive}: the file {name} that its card names is missing")
            with opened.open(name) as stream:
                actual = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
            if actual != digest:
                raise CardError(f"{archive}: {name} was changed after it was packed")
        if not card.packed:
            raise CardError(f"{archive}: its card does not name the handler; pack it again")
        return card


def archived_name(archive: Path) -> str:
    """The name that an archive was packed to be served by.

    Raises:
        UserError: there is no such file.
        CardError: it is no archive.
    """
    with _opened(archive) as opened:
        manifest = json.loads(opened.read(MANIFEST_FILE))
        return str(manifest["model"]["modelName"])


@dataclass(frozen=True)
class Instructions:
    """What an archive tells a server: how it is served, and what it knows an answer to; None: nothing."""

    serving: Serving
    known: KnownAnswer | None


def serving_in(archive: Path) -> Serving:
    """How an archive says that it is served; the known answer beside it is not read, for it holds an image.

    Raises:
        UserError: there is no such file.
        CardError: it is not an archive of this project.
    """
    with _opened(archive) as opened:
        return _serving_of(archive, opened)


def instructions_in(archive: Path) -> Instructions:
    """What an archive tells a server.

    Raises:
        UserError: there is no such file.
        CardError: it is not an archive of this project.
    """
    with _opened(archive) as opened:
        serving = _serving_of(archive, opened)
        if KNOWN_FILE not in opened.namelist():
            return Instructions(serving, None)
        return Instructions(serving, parse_known(opened.read(KNOWN_FILE).decode(), archive / KNOWN_FILE))


#: A broken zip is told by BadZipFile, by zlib, by a wrong length, by a compression that is unknown; a document that is
#: no mapping by TypeError.
_NOT_OURS = (
    *(OSError, KeyError, ValueError, TypeError, EOFError),
    *(NotImplementedError, zlib.error, zipfile.BadZipFile),
)


@contextmanager
def _opened(archive: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(archive) as opened:
            yield opened
    except FileNotFoundError:
        raise UserError(f"{archive}: there is no such archive; make it with `{command('serve package RUN')}`") from None
    except _NOT_OURS as error:
        raise CardError(f"{archive}: not an archive of this project ({error})") from None


def _card_of(archive: Path, opened: zipfile.ZipFile) -> Card:
    return parse_card(opened.read(CARD_FILE).decode(), archive / CARD_FILE)


def _serving_of(archive: Path, opened: zipfile.ZipFile) -> Serving:
    return parse_serving(opened.read(SERVING_FILE).decode(), archive / SERVING_FILE)


def card_bytes(card: Card) -> bytes:
    """The text of a card, as its file would be."""
    with tempfile.TemporaryDirectory() as folder:
        write_card(Path(folder), card)
        return (Path(folder) / CARD_FILE).read_bytes()


def json_bytes(body: object) -> bytes:
    """A JSON document of an archive."""
    return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()


def write_zip(destination: Path, entries: dict[str, bytes | Path]) -> None:
    """Write a zip whose bytes depend on ``entries`` alone, by way of a temporary file.

    Stored, not deflated: weights do not compress, and zlib's output differs between its versions.
    """
    handle, temporary = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
    try:
        with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(entries):
                content = entries[name]
                info = zipfile.ZipInfo(name, _ZIP_TIME)
                info.create_system = 3  # Unix, wherever it is written
                info.external_attr = 0o100644 << 16
                if isinstance(content, bytes):
                    archive.writestr(info, content)
                    continue
                info.file_size = content.stat().st_size
                with content.open("rb") as source, archive.open(info, "w") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(destination)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
