"""Copies images to the network's device and outputs back, through pinned memory for a GPU.

From pageable memory CUDA copies through its own buffer, and the caller waits, whatever ``non_blocking`` says ("CUDA C++
Best Practices Guide", pinned memory). From pinned memory it copies alone, and the host can gather the next images
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..outputs import Outputs

# Images of a slot: 2.4 MB at 224x224 pixels, some 50 µs on PCIe 5. A launch costs little in comparison.
_SLOT_IMAGES = 16
_SLOTS = 2

#: Creates a host tensor of a shape and dtype.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


class Event(Protocol):
    """A mark in a device's order of work."""

    def record(self) -> None:
        """Set the mark after all work so far, and drop an earlier mark."""
        ...

    def synchronize(self) -> None:
        """Wait until the device reaches the mark. Return at once if none was set."""
        ...


class Transfer(Protocol):
    """Copies to the device and back. One thread at a time may call it, on the engine's stream."""

    def send(self, images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """Return images ``(C, H, W)``, from the host or the device, as ``(N, C, H, W)`` on the device, N >= 1.

        The caller may then change them, although the device may not have them yet.
        """
        ...

    def receive(self, outputs: Outputs) -> Outputs:
        """Return outputs from the device on the host, floats as ``float32``. It waits for them."""
        ...


class Plain:
    """A `Transfer` that uses torch's own copies. On the CPU there is nothing to copy.

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

    def receive(self, outputs: Outputs) -> Outputs:
        """See `Transfer`."""
        return tuple(_single(output).cpu() for output in outputs)


class Ring:
    """A `Transfer` by a few slots of host memory in turns. One is filled while others are copied.

    No slot is written before the device has read its old content.

    Args:
        device: where the engine runs.
        shape: ``(C, H, W)`` of an image, ``uint8``.
        allocate: creates the slots, and the memory for outputs.
        event: creates a mark in the engine's stream.
        slots: number of slots.
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
        # Never created in inference mode, even if the caller is in it: such a tensor can never be written outside of
        # it.
        with torch.inference_mode(False):
            self._slots = [(allocate((rows, *shape), torch.uint8), event()) for _ in range(slots)]
        self._next = 0
        self._received = event()

    def send(self, images: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Transfer`. Images that are on the device already stay there."""
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

    def receive(self, outputs: Outputs) -> Outputs:
        """See `Transfer`. The caller owns the memory: it is not a slot."""
        singles = [_single(output) for output in outputs]
        hosts = tuple(self._allocate(output.shape, output.dtype) for output in singles)
        for host, output in zip(hosts, singles, strict=True):
            host.copy_(output, non_blocking=True)
        self._received.record()
        self._received.synchronize()
        return hosts

    def _copy(self, images: torch.Tensor | Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Copy images from the host into rows of a batch, through the next slot."""
        slot, read = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        read.synchronize()
        filled = slot[: len(images)]
        # copy_ would broadcast and convert silently.
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


def _single(output: torch.Tensor) -> torch.Tensor:
    return output.float() if output.is_floating_point() else output


def _on_host(image: torch.Tensor) -> bool:
    return image.device.type == "cpu"


class _CudaEvent:
    """See `Event`. It uses the current stream of its own device, whichever device is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()


def open_transfer(device: torch.device, shape: Sequence[int]) -> Transfer:
    """Return the transfer for a device: pinned memory for CUDA.

    Args:
        device: where the engine runs.
        shape: ``(C, H, W)`` of an image.

    Raises:
        RuntimeError: the machine has no pinned memory left.
    """
    if device.type != "cuda":
        return Plain(device)
    return Ring(device, shape, allocate=_pinned, event=lambda: _CudaEvent(device))


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # torch caches pinned memory for the next tensor of its size (CachingHostAllocator), because pinning costs as much
    # as a batch.
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
