"""Reads, checks and writes a TorchServe archive (``.mar``) of this project as a file.

`archive_builder` decides what is packed into it.
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

#: Version of a model that replaces no other.
MODEL_VERSION = "1.0"

# torch-model-archiver's rule for model names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*")

# The stock archiver writes the current time here. Its entries have the times and the order of a folder's listing. So
# two archives of one artifact are never equal, and a hash proves nothing. This project's archives depend only on their
# contents.
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
    """Pack an archive again as another version of the model, for TorchServe.

    Args:
        archive: an archive of this project, which may be ``destination``.
        version: version for the new manifest.
        destination: the ``.mar`` to write, atomically.

    Raises:
        UserError: there is no such archive, or the new one cannot be written.
        CardError: the archive is damaged.
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
    """Check every file in an archive, handler and runtime included, against its card.

    Returns:
        The card.

    Raises:
        UserError: there is no such file.
        CardError: a file was changed, added or removed. The message names it.
    """
    with open_archive(archive) as opened:
        return opened.check()


@dataclass(frozen=True)
class Instructions:
    """An archive's instructions for a server: serving settings, and the known answer if there is one."""

    serving: Serving
    known: KnownAnswer | None


def serving_in(archive: Path) -> Serving:
    """Return an archive's serving settings. The known answer is not read, because it holds an image.

    Raises:
        UserError: there is no such file.
        CardError: the file is not an archive of this project.
    """
    with open_archive(archive) as opened:
        return opened.serving()


def instructions_in(archive: Path) -> Instructions:
    """Return an archive's instructions for a server.

    Raises:
        UserError: there is no such file.
        CardError: the file is not an archive of this project.
    """
    with open_archive(archive) as opened:
        return Instructions(opened.serving(), opened.known())


#: For a broken zip: BadZipFile, zlib's error, or the errors of a wrong length or unknown compression. For a document
#: that is no mapping: TypeError.
_READ_ERRORS = (
    *(OSError, KeyError, ValueError, TypeError, EOFError),
    *(NotImplementedError, zlib.error, zipfile.BadZipFile),
)


class OpenArchive:
    """An open archive for one thread. All reads are from one file, even if another takes its place."""

    def __init__(self, path: Path, opened: zipfile.ZipFile) -> None:
        self._path, self._opened = path, opened

    def check(self) -> Card:
        """Check every file in the archive against its card, and return the card.

        Raises:
            CardError: see `check_archive`.
        """
        with _named_errors(self._path):
            # Checked before any read. A small file may unpack to any size, by deflate or overlapping entries.
            if sum(entry.file_size for entry in self._opened.infolist()) > self._path.stat().st_size:
                raise CardError(
                    f"{self._path}: unpacks to more bytes than its directory states; archives of this project do not"
                )
            card = self.card()
            self._check_files({**card.files, **card.packed})
        if not card.packed:
            raise CardError(f"{self._path}: its card does not list the handler; pack it again")
        return card

    def card(self) -> Card:
        """Return the card without a check of the files.

        Raises:
            CardError: the file is not an archive, or its card is damaged.
        """
        with _named_errors(self._path):
            return parse_card(self._opened.read(CARD_FILE).decode(), self._path / CARD_FILE)

    def _check_files(self, expected: Mapping[str, str]) -> None:
        names = [entry.orig_filename for entry in self._opened.infolist()]
        for name in names:
            if names.count(name) > 1:
                raise CardError(f"{self._path}: holds {name} twice")
            if name not in expected and name != CARD_FILE:
                raise CardError(f"{self._path}: holds {name[:80]!r}, which its card does not list; pack it again")
        for name, digest in expected.items():
            if name not in names:
                raise CardError(f"{self._path}: the file {name}, which its card lists, is missing")
            with self._opened.open(name) as stream:
                actual = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
            if actual != digest:
                raise CardError(f"{self._path}: {name} was changed after it was packed")

    def manifest(self) -> dict[str, Any]:
        """Return TorchServe's manifest, as JSON values.

        Raises:
            CardError: the file is not an archive.
        """
        with _named_errors(self._path):
            return dict(json.loads(self._opened.read(MANIFEST_FILE)))

    def name(self) -> str:
        """Return the model name that it was packed for.

        Raises:
            CardError: the file is not an archive.
        """
        with _named_errors(self._path):
            return str(self.manifest()["model"]["modelName"])

    def serving(self) -> Serving:
        """Return the serving settings.

        Raises:
            CardError: see `serving_in`.
        """
        with _named_errors(self._path):
            if (size := self._opened.getinfo(SERVING_FILE).file_size) > MOST_BYTES:  # may be called before `check`
                raise ValueError(f"its {SERVING_FILE} has {size} bytes")
            return parse_serving(self._opened.read(SERVING_FILE).decode(), self._path / SERVING_FILE)

    def known(self) -> KnownAnswer | None:
        """Return the known answer. None if there is none.

        Raises:
            CardError: see `instructions_in`.
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
        CardError: the file is not an archive of this project.
    """
    with ExitStack() as stack:
        with _named_errors(archive):
            opened = stack.enter_context(zipfile.ZipFile(archive))
        yield OpenArchive(archive, opened)


@contextmanager
def _named_errors(archive: Path) -> Iterator[None]:
    """Convert errors of reading an archive to the project's own, with its path."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(
            f"{archive}: there is no such archive; build it with `{command('serve package RUN')}`"
        ) from None
    except _READ_ERRORS as error:
        raise CardError(f"{archive}: not an archive of this project ({error})") from None


def card_bytes(card: Card) -> bytes:
    """Return the content of a card's file."""
    with tempfile.TemporaryDirectory() as folder:
        write_card(Path(folder), card)
        return (Path(folder) / CARD_FILE).read_bytes()


def json_bytes(body: object) -> bytes:
    """Return a JSON document for an archive."""
    return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()


def write_zip(destination: Path, entries: dict[str, bytes | Path]) -> None:
    """Write a zip through a temporary file. Its bytes depend only on ``entries``.

    Entries are stored, not deflated: weights do not compress, and zlib's output differs between its versions.
    """
    handle, temporary = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
    try:
        with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(entries):
                content = entries[name]
                info = zipfile.ZipInfo(name, _ZIP_TIME)
                info.create_system = 3  # Unix, on every system
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
