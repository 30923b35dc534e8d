"""Where what was compiled for this machine is kept: in the user's cache, never in an artifact.

It is native code, or Java's, which is loaded without a question. So nobody but the user may write here, and each file
that we load is checked against the SHA-256 that was recorded when it was made (`kept`). TensorRT's are read by ONNX
Runtime itself: those have no recorded hash, and only the folder keeps others from them.
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
    """The private folder of what was compiled under a key; it is made if there is none.

    Args:
        kind: what is kept, such as ``inductor``.
        key: everything that the compiled code depends on, as JSON values.

    Raises:
        EngineError: the folder, or the project's own above it, is not the user's alone.
    """
    document = json.dumps(key, sort_keys=True, separators=(",", ":")).encode()
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # A relative path is to be ignored (XDG Base Directory Specification).
        folder = Path(base) if base.startswith("/") else Path.home() / ".cache"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Not in the folder of the project's other caches, which need not be private.
        for name in ("optimize-and-serve-compiled", kind, hashlib.sha256(document).hexdigest()):
            folder = folder / name
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_private(folder)
        (folder / _KEY_FILE).write_bytes(document + b"\n")  # for whoever looks; nothing reads it
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
        raise EngineError(
            f"there is no place for compiled code: {first_line(error)}; name a folder of yours in XDG_CACHE_HOME"
        ) from None
    return folder


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise EngineError(f"{path}: is no folder, and compiled code is kept in folders of its own")
    if found.st_uid != os.geteuid():
        raise EngineError(f"{path}: belongs to user {found.st_uid}, and code that it holds would be run; remove it")
    if found.st_mode & 0o077:
        raise EngineError(
            f"{path}: is open to others (mode {stat.S_IMODE(found.st_mode):o}), and code that it holds would be "
            f"run; remove it, or make it 700 if nobody else wrote to it"
        )


def kept(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """A file of a cache folder, made if it is not there or was changed; two processes do not make it at once.

    Args:
        folder: from `cache_folder`.
        name: the file's.
        make: writes the file to the path that it is given, whose ending is that of ``name``.

    Returns:
        The file, whose SHA-256 is the recorded one.
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
        fcntl.flock(stream, fcntl.LOCK_EX)  # ends with the process that holds it
        yield


def device_key(device: torch.device) -> dict[str, str]:
    """What compiled code depends on of the device that it was compiled for."""
    import torch  # not above: who starts TorchServe needs none of it

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
    """The processor's name, and a digest of its instruction sets: code is compiled for all of them."""
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = " ".join(sorted((facts.get("flags") or facts.get("Features") or "").split()))
    return {
        "name": facts.get("model name", "unknown"),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flags": hashlib.sha256(flags.encode()).hexdigest(),
    }
