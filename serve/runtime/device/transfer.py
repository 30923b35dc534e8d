"""How images get to the device that a network runs on, and logits back: by pinned memory where that is a GPU.

From pageable memory CUDA copies by way of a buffer of its own and makes the caller wait, whatever ``non_blocking`` says
("CUDA C++ Best Practices Guide", pinned memory). From pinned memory it copies by itself, and the host gathers the next
images meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

# Images of a slot: 2.4 MB at 224x224 pixels, some 50 µs on PCIe 5, beside which a launch costs little.
_SLOT_IMAGES = 16
_SLOTS = 2

#: Makes a tensor on the host of a shape and dtype.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


class Event(Protocol):
    """A mark in the order of what a device was given to do."""

    def record(self) -> None:
        """Set the mark after what it was given so far, in place of an earlier one."""
        ...

    def synchronize(self) -> None:
        """Wait until it has come to the mark; at once where none was set."""
        ...


class Transfer(Protocol):
    """To the device and back. Called by one thread at a time, on the stream that the engine runs on."""

    def send(self, images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Images ``(C, H, W)``, at least one, each on the host or the device, as ``(N, C, H, W)`` on the device.

        They may be changed as soon as it returns; the device may not have them yet.
        """
        ...

    def receive(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` on the device as ``float32`` on the host, once they are there."""
        ...


class Plain:
    """A `Transfer` that leaves it to torch: on the CPU there is nothing to copy.

    Args:
        device: where the engine runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Transfer`."""
        if isinstance(images, torch.Tensor):
            return images.to(self._device)
        together = len({image.device for image in images}) == 1
        return torch.stack([*images] if together else [image.to(self._device) for image in images]).to(self._device)

    def receive(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Transfer`."""
        return logits.float().cpu()


class Ring:
    """A `Transfer` by a few slots of host memory, which take turns: one is filled while others are copied from.

    No slot is written before the device has read what it held.

    Args:
        device: where the engine runs.
        shape: ``(C, H, W)`` of an image, ``uint8``.
        allocate: makes the slots, and what logits are received in.
        event: makes a mark in the order of the engine's stream.
        slots: how many there are.
        rows: images of a slot.
    """

    def __init__(
        self,
        device: torch.device,
        shape: Sequence[int],
        *,
        allocate: Allocate,
        event: Callable[[], Event],
        slots: int = _SLOTS,
        rows: int = _SLOT_IMAGES,
    ) -> None:
        self._device, self._shape, self._rows = device, tuple(shape), rows
        self._allocate = allocate
        # Not made in inference mode, whoever opens the artifact: such a tensor can never be written outside of it.
        with torch.inference_mode(False):
            self._slots = [(allocate((rows, *shape), torch.uint8), event()) for _ in range(slots)]
        self._next = 0
        self._received = event()

    def send(self, images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Transfer`. What a decoder left on the device stays there."""
        if isinstance(images, torch.Tensor) and not _on_host(images):
            return images
        on_host = [_on_host(image) for image in images]
        if not any(on_host):
            return torch.stack([*images])
        batch = torch.empty((len(images), *self._shape), dtype=torch.uint8, device=self._device)
        start = 0
        while start < len(images):
            stop = start + 1
            if not on_host[start]:
                batch[start].copy_(images[start])
            else:
                while stop < min(len(images), start + self._rows) and on_host[stop]:
                    stop += 1
                self._copy(images[start:stop], batch[start:stop])
            start = stop
        return batch

    def receive(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Transfer`. The memory is the caller's: no slot."""
        host = self._allocate(logits.shape, torch.float32)
        host.copy_(logits.float(), non_blocking=True)
        self._received.record()
        self._received.synchronize()
        return host

    def _copy(self, images: torch.Tensor | Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Images of the host into the rows of a batch, by the slot whose turn it is."""
        slot, read = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        read.synchronize()
        filled = slot[: len(images)]
        # copy_ would broadcast and convert without a word.
        if any(image.shape != self._shape or image.dtype != torch.uint8 for image in images):
            raise ValueError(f"images must be {self._shape} of torch.uint8")
        if isinstance(images, torch.Tensor):
            filled.copy_(images)
        else:
            torch.stack([*images], out=filled)
        try:
            rows.copy_(filled, non_blocking=True)
        finally:
            read.record()


def _on_host(image: torch.Tensor) -> bool:
    return image.device.type == "cpu"


class _CudaEvent:
    """See `Event`; on the stream that is the current one of a device, whichever device is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()


def open_transfer(device: torch.device, shape: Sequence[int]) -> Transfer:
    """What copies to and from a device: pinned memory for CUDA.

    Args:
        device: where the engine runs.
        shape: ``(C, H, W)`` of an image.

    Raises:
        RuntimeError: the machine gives no pinned memory.
    """
    if device.type != "cuda":
        return Plain(device)
    return Ring(device, shape, allocate=_pinned, event=lambda: _CudaEvent(device))


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # torch keeps what was pinned for the next of its size: pinning costs as much as a batch (CachingHostAllocator).
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
