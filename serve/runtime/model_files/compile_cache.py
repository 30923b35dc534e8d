"""The cache of compiled code for this machine, in the user's cache folder, never in an artifact.

It holds native code or Java's, which is loaded without a question. So only the user may write here. Each file that the
project loads is checked against the SHA-256 recorded at its creation (`kept`). TensorRT's files have no recorded hash,
because ONNX Runtime reads them itself. Only the folder's mode protects them.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..card.card import sha256_file
from ..errors import EngineError, first_line

if TYPE_CHECKING:
    import torch

_KEY_FILE = "key.json"


def cache_folder(kind: str, key: Mapping[str, Any]) -> Path:
    """Return the private folder for compiled code with a key. It is created if it does not exist.

    Args:
        kind: kind of content, for example ``inductor``.
        key: everything that the compiled code depends on, as JSON values.

    Raises:
        EngineError: the folder, or the project's own above it, is not private to the user.
    """
    document = json.dumps(key, sort_keys=True, separators=(",", ":")).encode()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # A relative path must be ignored (XDG Base Directory Specification).
        folder = Path(base) if base.startswith("/") else Path.home() / ".cache"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Not in the folder of the project's other caches, which need not be private.
        for name in ("optimize-and-serve-compiled", kind, hashlib.sha256(document).hexdigest()):
            folder = folder / name
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_private(folder)
        (folder / _KEY_FILE).write_bytes(document + b"\n")  # for a curious person; the code never reads it
    except (OSError, RuntimeError) as error:  # no home folder, or one that cannot be written
        raise EngineError(
            f"there is no folder for compiled code: {first_line(error)}; set XDG_CACHE_HOME to a folder of yours"
        ) from None
    return folder


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise EngineError(f"{path}: is not a folder; compiled code needs a folder here")
    if found.st_uid != os.geteuid():
        raise EngineError(f"{path}: belongs to user {found.st_uid}, whose code would run here; remove it")
    if found.st_mode & 0o077:
        raise EngineError(
            f"{path}: is writable or readable by others (mode {stat.S_IMODE(found.st_mode):o}), whose code would "
            "run here; remove it, or set mode 700 if nobody else wrote to it"
        )


def kept(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return a file of a cache folder. It is created if it is missing or was changed, by one process at a time.

    Args:
        folder: from `cache_folder`.
        name: name of the file.
        make: writes the file to the given path, which has the ending of ``name``.

    Returns:
        The file. Its SHA-256 is the recorded one.
    """
    path, record = folder / name, folder / f"{name}.sha256"
    with _locked(folder):
        if path.is_file() and record.is_file() and sha256_file(path) == record.read_text(encoding="ascii"):
            return path
        temporary = folder / f"new-{name}"
        temporary.unlink(missing_ok=True)
        try:
            make(temporary)
            record.write_text(sha256_file(temporary), encoding="ascii")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w", encoding="ascii") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released when the process ends
        yield


def device_key(device: torch.device) -> dict[str, str]:
    """Return the properties of a device that compiled code depends on."""
    import torch  # not above, because the launcher of TorchServe needs no torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
            "memory": str(properties.total_memory),
            "cuda": str(torch.version.cuda),
        }
    return _processor()


@functools.cache
def _processor() -> dict[str, str]:
    """Return the processor's name and a digest of its instruction sets, because compiled code may use all of them."""
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = " ".join(sorted((facts.get("flags") or facts.get("Features") or "").split()))
    return {
        "name": facts.get("model name", "unknown"),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flags": hashlib.sha256(flags.encode()).hexdigest(),
    }
