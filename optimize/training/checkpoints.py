"""How far an unfinished run has come, in a file that is always whole: it goes on from there after any end."""

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
#: How many hexadecimal digits stand behind a checkpoint: its SHA-256. torch.load (2.14) compares no checksum.
_DIGEST = 64
_AT_ONCE = 1 << 20  # bytes

#: A checkpoint is written no oftener than takes this share of the time.
_MOST = 0.05


def fingerprint(module: nn.Module, config: Config, processes: int) -> str:
    """SHA-256 over the parameters of ``module``, by their names, the settings and how many processes train.

    Another number of processes has other parts of the batches: it does not go on where these were.

    Returns:
        16 hexadecimal digits of it.
    """
    digest = hashlib.sha256(f"{config.model_dump_json()}\0{processes}\0".encode())
    for name, tensor in sorted(module.named_parameters(), key=lambda named: named[0]):
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(f"{name}\0{tuple(tensor.shape)}\0".encode() + content.numpy().tobytes())
    return digest.hexdigest()[:16]


def load_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give ``module`` the state of one like it, in this process or another.

    A graph module comes out of a pickle without the second names of modules that it has under two (torch 2.14): they
    are given their state under the first.

    Raises:
        ValueError: the state lacks a parameter of the module.
    """
    missing, _ = module.load_state_dict(state, strict=False)
    if lacking := sorted(set(missing) & {name for name, _ in module.named_parameters()}):
        raise ValueError(f"the state is another module's: it has no {lacking[0]}")


class Checkpoints:
    """The checkpoints of one run; each takes the place of the one before.

    Args:
        folder: where; it belongs to what is being made, by its key, so that a run with another setting finds none.
            None: nothing is kept.
        start: what is trained and how, as `fingerprint` has it: more than one may be trained for one object.
        seconds: how long after one the next is due; 0: at each step.
        listener: told what cannot be written or read.
    """

    def __init__(self, folder: Path | None, start: str, seconds: float, listener: Listener) -> None:
        self._folder = folder
        self._file = _FILE.format(start)
        self._seconds = seconds
        self._listener = listener
        self._next = time.monotonic() + seconds

    @property
    def due(self) -> bool:
        """Whether it is time for one."""
        return self._folder is not None and time.monotonic() >= self._next

    def save(self, state: dict[str, Any]) -> None:
        """Write tensors and plain values, so that a process that is killed at any moment leaves this or the last one.

        A disk that is full stops no training: it is said once, and no other is tried.
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
        except (OSError, RuntimeError) as error:  # torch.save's own for a full disk (2.14)
            self._listener.said(f"no checkpoint can be written, and training goes on without: {str(error)[:200]}")
            self._folder = None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        now = time.monotonic()
        least = (now - started) / _MOST if self._seconds else 0.0
        self._next = now + max(self._seconds, least)

    def load(self) -> dict[str, Any] | None:
        """What was saved last; None if nothing was, or it cannot be read: then training begins anew."""
        if self._folder is None or not (self._folder / self._file).is_file():
            return None
        for left in self._folder.glob(f".{self._file}.*"):
            left.unlink(missing_ok=True)
        try:
            _check_digest(self._folder / self._file)
            state: dict[str, Any] = torch.load(self._folder / self._file, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - a damaged file fails in many ways
            self._listener.said("the checkpoint of the interrupted training cannot be read; it begins anew")
            return None
        return state

    def forget(self) -> None:
        """Remove what was saved."""
        if self._folder is not None:
            (self._folder / self._file).unlink(missing_ok=True)


def _append_digest(path: Path) -> None:
    """Write a file's SHA-256 behind its content."""
    digest = sha256_file(path)
    with path.open("ab") as stream:
        stream.write(digest.encode())


def _check_digest(path: Path) -> None:
    """See that a file is as `_append_digest` left it.

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
