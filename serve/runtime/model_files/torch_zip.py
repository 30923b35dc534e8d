"""Checks the zip format of torch's files (``.pt2``, ``.pt``), so that every reader sees the same records.

torch reads with miniz, Python with `zipfile`. Duplicate names, bytes before or behind the archive and two directories
are ways to show them different records. torch never writes such files.
"""

from __future__ import annotations

import re
import struct
import zipfile
from pathlib import Path

import torch

from ..errors import EngineError

# Data descriptor and UTF-8 names: the only flags that torch's writer sets. Encryption would be another.
_FLAGS = 0x0808
_DESCRIPTORS = (0, 12, 16, 20, 24)  # bytes behind an entry's data, with and without signature and 64-bit sizes
_LOCAL, _END = 30, 22  # bytes of a local header without its name, and of the end record
_TAIL64 = 56 + 20 + _END  # with the 64-bit end record and its locator, which torch always writes
_LARGEST_COMPRESSED = 64 << 20  # bytes, unpacked
_RECORD = re.compile(r"[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)*")


class Records:
    """The records of a checked file, by torch's names for them."""

    def __init__(self, path: Path, names: frozenset[str], reader: torch._C.PyTorchFileReader) -> None:
        self.path = path
        self.names = names
        self._reader = reader

    def read(self, name: str) -> bytes:
        """Return a record's bytes, exactly as torch will read them.

        Raises:
            EngineError: there is no such record.
        """
        if name not in self.names:
            raise refused(self.path, f"it has no record {name}")
        record: bytes = self._reader.get_record(name)
        return record


def refused(path: Path, reason: str) -> EngineError:
    """Return the error for a file that must not be loaded."""
    return EngineError(f"{path}: refused before loading, because {reason}; this project does not write such files")


def open_records(path: Path, compressed: str | None = None) -> Records:
    """Check the structure of a zip file and list its records. Nothing is unpickled or run.

    Args:
        path: the file.
        compressed: prefix of the records that may be compressed. None: none may.

    Raises:
        EngineError: the file is not a zip file as torch writes it.
    """
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            names = _names(path, archive, compressed)
            _check_layout(path, archive)
        reader = torch._C.PyTorchFileReader(str(path))
        seen = reader.get_all_records()
    except EngineError:
        raise
    # zipfile raises BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError …, torch RuntimeError.
    except Exception as error:  # noqa: BLE001
        raise refused(path, f"it is not a complete zip file ({_first_line(error)})") from None
    if sorted(seen) != sorted(names):
        raise refused(path, "torch and Python find different records in it")
    return Records(path, frozenset(names), reader)


def _names(path: Path, archive: zipfile.ZipFile, compressed: str | None) -> list[str]:
    """Return the records' names without torch's top folder."""
    entries = archive.infolist()
    if not entries:
        raise refused(path, "it is empty")
    roots = {entry.orig_filename.partition("/")[0] for entry in entries}
    names = [entry.orig_filename.partition("/")[2] for entry in entries]
    if len(roots) != 1:
        raise refused(path, "its records are in more than one folder")
    for entry, name in zip(entries, names, strict=True):
        if not _RECORD.fullmatch(name) or {".", ".."} & set(name.split("/")):
            raise refused(path, f"it has a record with the name {entry.orig_filename[:80]!r}")
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
        if compressed is not None and name.startswith(compressed):
            stored |= entry.compress_type == zipfile.ZIP_DEFLATED and entry.file_size <= _LARGEST_COMPRESSED
        if not stored:
            raise refused(path, f"its record {name} is compressed")
        if entry.flag_bits & ~_FLAGS:
            raise refused(path, f"its record {name} has the flags {entry.flag_bits:#x}")
    # miniz compares names without case.
    if len({name.lower() for name in names}) != len(names):
        raise refused(path, "two of its records have the same name")
    return names


def _check_layout(path: Path, archive: zipfile.ZipFile) -> None:
    """Check the layout: entries without gaps from byte 0, one directory of them, its end record, and nothing more."""
    stream = archive.fp
    assert stream is not None
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    ends = [*(entry.header_offset for entry in entries[1:]), archive.start_dir]
    if entries[0].header_offset != 0:
        raise refused(path, "there is data before its first record")
    for entry, end in zip(entries, ends, strict=True):
        stream.seek(entry.header_offset)
        header = stream.read(_LOCAL)
        signature, _, _, method, *_, name_length, extra_length = struct.unpack("<4s5H3I2H", header)
        name = stream.read(name_length)
        used = entry.header_offset + _LOCAL + name_length + extra_length + entry.compress_size
        if signature != b"PK\3\4" or method != entry.compress_type or name != entry.orig_filename.encode():
            raise refused(path, f"its record {entry.orig_filename} has a header that differs from its directory")
        if end - used not in _DESCRIPTORS:
            raise refused(path, f"there is data after its record {entry.orig_filename}")
    stream.seek(archive.start_dir)
    rest = stream.read()
    position = 0
    for _ in entries:
        signature, *_, name_length, extra_length, comment_length = struct.unpack_from("<4s6H3I3H", rest, position)
        if signature != b"PK\1\2" or comment_length:
            raise refused(path, "its directory is broken")
        position += 46 + name_length + extra_length
    tail, directory_end = rest[position:], archive.start_dir + position
    if len(tail) not in (_END, _TAIL64):
        raise refused(path, "there is data after its directory")
    signature, disk, first_disk, here, total, size, offset, comment = struct.unpack("<4s4H2IH", tail[-_END:])
    wide = len(tail) == _TAIL64
    counts, sizes, offsets = {len(entries)}, {position}, {archive.start_dir}
    if wide:  # the short record may then refer to the wide one
        counts, sizes, offsets = counts | {0xFFFF}, sizes | {0xFFFFFFFF}, offsets | {0xFFFFFFFF}
    whole = signature == b"PK\5\6" and not (disk or first_disk or comment) and {here, total} <= counts
    whole = whole and size in sizes and offset in offsets
    if wide:
        record, locator = struct.unpack("<4sQ2H2I4Q", tail[:56]), struct.unpack("<4sIQI", tail[56:76])
        whole = whole and record[0] == b"PK\6\6" and record[1] == 44 and record[4:6] == (0, 0)
        whole = whole and record[6:] == (len(entries), len(entries), position, archive.start_dir)
        whole = whole and locator == (b"PK\6\7", 0, directory_end, 1)
    if not whole:
        raise refused(path, "the end of its directory contradicts the directory")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
