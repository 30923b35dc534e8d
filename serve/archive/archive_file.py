"""A TorchServe archive (``.mar``) of this project as a file: what lies in it by which name, read, checked and written.

What is packed into it, `archive_builder` knows.
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.common.hints import command
from serve.runtime.card.card import CARD_FILE, Card, parse_card, write_card
from serve.runtime.card.known_answer import KNOWN_FILE, KnownAnswer, parse_known
from serve.runtime.card.serving import MOST_BYTES, SERVING_FILE, Serving, parse_serving
from serve.runtime.errors import CardError, UserError

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
    with open_archive(archive) as opened:
        card, manifest = opened.check(), opened.manifest()
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
    with open_archive(archive) as opened:
        return opened.check()


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
    with open_archive(archive) as opened:
        return opened.serving()


def instructions_in(archive: Path) -> Instructions:
    """What an archive tells a server.

    Raises:
        UserError: there is no such file.
        CardError: it is not an archive of this project.
    """
    with open_archive(archive) as opened:
        return Instructions(opened.serving(), opened.known())


#: A broken zip is told by BadZipFile, by zlib, by a wrong length, by a compression that is unknown; a document that is
#: no mapping by TypeError.
_READ_ERRORS = (
    *(OSError, KeyError, ValueError, TypeError, EOFError),
    *(NotImplementedError, zlib.error, zipfile.BadZipFile),
)


class OpenArchive:
    """An archive that is open for one thread: what is read of it is of one file, whatever is put in its place."""

    def __init__(self, path: Path, opened: zipfile.ZipFile) -> None:
        self._path, self._opened = path, opened

    def check(self) -> Card:
        """Check every file in it against its card, which is returned.

        Raises:
            CardError: as `check_archive`.
        """
        with _named_errors(self._path):
            # Before anything is read: a small file may unpack to any size, deflated or in entries that overlap.
            if sum(entry.file_size for entry in self._opened.infolist()) > self._path.stat().st_size:
                raise CardError(f"{self._path}: unpacks to more than it has, and what this project packs does not")
            card = self.card()
            self._check_files({**card.files, **card.packed})
        if not card.packed:
            raise CardError(f"{self._path}: its card does not name the handler; pack it again")
        return card

    def card(self) -> Card:
        """Its card; the files that it names are not checked.

        Raises:
            CardError: it is no archive, or its card is damaged.
        """
        with _named_errors(self._path):
            return parse_card(self._opened.read(CARD_FILE).decode(), self._path / CARD_FILE)

    def _check_files(self, expected: Mapping[str, str]) -> None:
        names = [entry.orig_filename for entry in self._opened.infolist()]
        for name in names:
            if names.count(name) > 1:
                raise CardError(f"{self._path}: holds {name} twice")
            if name not in expected and name != CARD_FILE:
                raise CardError(f"{self._path}: holds {name[:80]!r}, which its card does not name; pack it again")
        for name, digest in expected.items():
            if name not in names:
                raise CardError(f"{self._path}: the file {name} that its card names is missing")
            with self._opened.open(name) as stream:
                actual = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
            if actual != digest:
                raise CardError(f"{self._path}: {name} was changed after it was packed")

    def manifest(self) -> dict[str, Any]:
        """What TorchServe reads of it, as JSON values.

        Raises:
            CardError: it is no archive.
        """
        with _named_errors(self._path):
            return dict(json.loads(self._opened.read(MANIFEST_FILE)))

    def name(self) -> str:
        """The name that it was packed to be served by.

        Raises:
            CardError: it is no archive.
        """
        with _named_errors(self._path):
            return str(self.manifest()["model"]["modelName"])

    def serving(self) -> Serving:
        """How it says that it is served.

        Raises:
            CardError: as `serving_in`.
        """
        with _named_errors(self._path):
            if (size := self._opened.getinfo(SERVING_FILE).file_size) > MOST_BYTES:  # it may be asked before `check`
                raise ValueError(f"its {SERVING_FILE} has {size} bytes")
            return parse_serving(self._opened.read(SERVING_FILE).decode(), self._path / SERVING_FILE)

    def known(self) -> KnownAnswer | None:
        """The image whose answer it knows; None if there is none.

        Raises:
            CardError: as `instructions_in`.
        """
        with _named_errors(self._path):
            if KNOWN_FILE not in self._opened.namelist():
                return None
            return parse_known(self._opened.read(KNOWN_FILE).decode(), self._path / KNOWN_FILE)


@contextmanager
def open_archive(archive: Path) -> Iterator[OpenArchive]:
    """Open an archive for the block.

    Raises:
        UserError: there is no such file.
        CardError: it is not an archive of this project.
    """
    with ExitStack() as stack:
        with _named_errors(archive):
            opened = stack.enter_context(zipfile.ZipFile(archive))
        yield OpenArchive(archive, opened)


@contextmanager
def _named_errors(archive: Path) -> Iterator[None]:
    """Errors of reading an archive as the project's own, which name it."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{archive}: there is no such archive; make it with `{command('serve package RUN')}`") from None
    except _READ_ERRORS as error:
        raise CardError(f"{archive}: not an archive of this project ({error})") from None


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
