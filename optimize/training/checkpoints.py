"""Writes the state of an unfinished run to a file that is always complete, so that the run can resume."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize.listener import Listener
from optimize.store.atomic_files import temporary_for
from serve.common.config import Config
from serve.runtime.card.card import sha256_file

_FILE = "training-{}.pt"
#: The number of hexadecimal digits of the SHA-256 at the end of a checkpoint. torch.load (2.14) checks no checksum.
_DIGEST = 64
_AT_ONCE = 1 << 20  # bytes

#: Writing checkpoints takes at most this share of the time.
_MOST = 0.05


def fingerprint(module: nn.Module, config: Config, processes: int) -> str:
    """Return the SHA-256 over the parameters of ``module`` with names, the settings and the number of processes.

    With another number of processes the parts of the batches differ, so that a run cannot resume from these.

    Returns:
        16 hexadecimal digits of it.
    """
    digest = hashlib.sha256(f"{config.model_dump_json()}\0{processes}\0".encode())
    for name, tensor in sorted(module.named_parameters(), key=lambda named: named[0]):
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(f"{name}\0{tuple(tensor.shape)}\0".encode() + content.numpy().tobytes())
    return digest.hexdigest()[:16]


def load_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load into ``module`` the state of an equal module from this process or another.

    A graph module loses the second name of a shared module when it is unpickled (torch 2.14). Such a module gets its
    state under the first name.

    Raises:
        ValueError: the state lacks a parameter of the module.
    """
    missing, _ = module.load_state_dict(state, strict=False)
    if lacking := sorted(set(missing) & {name for name, _ in module.named_parameters()}):
        raise ValueError(f"the state belongs to another module: it has no {lacking[0]}")


class Checkpoints:
    """The checkpoints of one run. Each replaces the previous one.

    Args:
        folder: the folder. It belongs to one object by its key, so that a run with another setting finds no checkpoint.
            None: nothing is written.
        start: identifies the training by `fingerprint`, because one object may need several trainings.
        seconds: seconds from one checkpoint to the next. 0: at each step.
        listener: receives a message if a checkpoint cannot be written or read.
    """

    def __init__(self, folder: Path | None, start: str, seconds: float, listener: Listener) -> None:
        self._folder = folder
        self._file = _FILE.format(start)
        self._seconds = seconds
        self._listener = listener
        self._next = time.monotonic() + seconds

    @property
    def due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        return self._folder is not None and time.monotonic() >= self._next

    def save(self, state: dict[str, Any]) -> None:
        """Write tensors and plain values. If the process is killed, this or the previous checkpoint is complete.

        A full disk does not stop the training. It is reported once, and no further checkpoint is tried.
        """
        if self._folder is None:
            return
        started = time.monotonic()
        path = self._folder / self._file
        temporary = temporary_for(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save(state, temporary)
            _append_digest(temporary)
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # torch.save has its own exception for a full disk (2.14)
            self._listener.said(
                f"training continues without checkpoints, because none can be written: {str(error)[:200]}"
            )
            self._folder = None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        now = time.monotonic()
        least = (now - started) / _MOST if self._seconds else 0.0
        self._next = now + max(self._seconds, least)

    def load(self) -> dict[str, Any] | None:
        """Return the last checkpoint. None if there is none or it cannot be read, so that training starts again."""
        if self._folder is None or not (self._folder / self._file).is_file():
            return None
        for left in self._folder.glob(f".{self._file}.*"):
            left.unlink(missing_ok=True)
        try:
            _check_digest(self._folder / self._file)
            state: dict[str, Any] = torch.load(self._folder / self._file, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - a damaged file fails in many ways
            self._listener.said("the checkpoint of the interrupted training cannot be read; training starts again")
            return None
        return state

    def forget(self) -> None:
        """Remove the checkpoint."""
        if self._folder is not None:
            (self._folder / self._file).unlink(missing_ok=True)


def _append_digest(path: Path) -> None:
    """Append a file's SHA-256 to it."""
    digest = sha256_file(path)
    with path.open("ab") as stream:
        stream.write(digest.encode())


def _check_digest(path: Path) -> None:
    """Check that a file is as `_append_digest` left it.

    Raises:
        ValueError: it was changed, or cut off.
    """
    left = path.stat().st_size - _DIGEST
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while left > 0 and (part := stream.read(min(left, _AT_ONCE))):
            found.update(part)
            left -= len(part)
        if stream.read().decode() != found.hexdigest():
            raise ValueError("its SHA-256 does not match")
