"""The interface of decoders, and their registry. ``cpu`` is the runtime's own decoder, which needs no file here.

A decoder gets an image only after its header was read and fits the budget. If it does not accept an image, or fails on
it, the runtime's own decoder decodes it. That one is the reference, and its error is the item's.
"""

from __future__ import annotations

import base64
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..card.card import Preprocessing
from ..device.device_faults import device_answers, is_lost
from ..errors import BrokenError, EngineError, UserError, did_you_mean, one_line
from ..images.headers import Header
from ..images.image_preprocessing import place
from ..images.placement import PlacedImage
from ..images.structure import whole_jpeg
from ..registry import Registry

#: A JPEG of 16x16 pixels in one colour, for probes.
TINY_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYVpQ"
    "YEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//wAARCAAQABAD"
    "ASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAAL/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/8QAFAEBAAAAAAAAAAAAAAAAAAAABf/EABQRAQAA"
    "AAAAAAAAAAAAAAAAAAD/2gAMAwEAAhEDEQA/AJADn3//2Q=="
)
_TINY_COLOUR = (200, 100, 50)

#: The runtime's own decoder, `image_preprocessing.decode`. Accuracy was measured with it.
CPU = "cpu"


class Decoder(Protocol):
    """An opened decoder. Threads may share it.

    Attributes:
        name: the registered name.
        batch: best number of images to decode together. It accepts fewer too.
    """

    name: str
    batch: int

    def accepts(self, header: Header, preprocessing: Preprocessing) -> bool:
        """Whether it can decode such an image, and better than the runtime's own decoder."""
        ...

    def load(
        self, items: Sequence[bytes], headers: Sequence[Header], preprocessing: Preprocessing
    ) -> list[PlacedImage | None]:
        """Decode accepted images and bring them to ``preprocessing.shape``, each on the host or a device.

        An image that could not be decoded is None.

        Raises:
            BrokenError: the device is lost to this process.
        """
        ...


@dataclass(frozen=True)
class DecoderType:
    """One registered decoder.

    Attributes:
        name: the name in ``serving.json``.
        open: opens it for the engine's device, and lets it decode `TINY_JPEG` (see `check_tiny`). It raises whatever
            fails.
        device: where it decodes: ``cpu`` or ``cuda``. One for CUDA needs an engine that runs there.
        libraries: distributions that it needs.
    """

    name: str
    open: Callable[[torch.device], Decoder]
    device: str
    libraries: tuple[str, ...] = ()


_REGISTRY: Registry[DecoderType] = Registry("decoder", package=__package__, group="serve.decoders")


def register(entry: DecoderType) -> DecoderType:
    """Add a decoder to the registry.

    Raises:
        ValueError: the name is taken.
    """
    if entry.name == CPU:
        raise ValueError(f"{CPU!r} is the runtime's own decoder")
    return _REGISTRY.register(entry)


def decoders() -> dict[str, DecoderType]:
    """Return all decoders by name, without the runtime's own."""
    return _REGISTRY.all()


def check_decoder(name: str) -> str:
    """Return ``name`` if there is a decoder of that name.

    Raises:
        UserError: there is none. The message names the closest and lists all.
    """
    known = [CPU, *decoders()]
    if name not in known:
        raise UserError(f"unknown decoder {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
    return name


def open_decoder(name: str, device: torch.device) -> Decoder | None:
    """Open a decoder. None for the runtime's own.

    Args:
        name: name of the decoder.
        device: where the engine runs.

    Raises:
        UserError: there is no decoder of that name.
        EngineError: the decoder does not work here. The message has the reason.
    """
    if check_decoder(name) == CPU:
        return None
    entry = decoders()[name]
    if entry.device not in (device.type, CPU):
        raise EngineError(f"the decoder {name} needs {entry.device}, but the engine runs on {device.type}")
    try:
        return entry.open(device)
    except Exception as error:
        said = str(error) if isinstance(error, EngineError) else one_line(error)
        raise EngineError(f"the decoder {name} does not work here: {said}") from error


def check_tiny(image: torch.Tensor | None) -> torch.Tensor:
    """Return a decoder's image of `TINY_JPEG`, if its colour is right.

    Raises:
        EngineError: it is not.
    """
    if image is None:
        raise EngineError("it cannot decode a JPEG of 16x16 pixels")
    mean = image.float().mean(dim=(1, 2)).tolist()
    if max(abs(found - wanted) for found, wanted in zip(mean, _TINY_COLOUR, strict=True)) > 8:
        raise EngineError(f"it decodes the colour {_TINY_COLOUR} to {[round(value) for value in mean]}")
    return image


class DeviceDecoder:
    """Base class of decoders on a GPU. It decodes one batch at a time, on a stream beside the engine's.

    Only complete colour JPEGs go to the device. nvJPEG returns black for a missing end and arbitrary pixels for missing
    tables, without an error (TorchCodec 0.17). The same function as on the host resizes and crops the images there
    (`image_preprocessing.fit`). It computes in float32 on the device, so pixels may differ by a level.

    Args:
        name: the registered name.
        device: a CUDA device.
        batch: images decoded together.
    """

    def __init__(self, name: str, device: torch.device, batch: int = 16) -> None:
        self.name, self.batch = name, batch
        self._device = device
        self._turn = threading.Lock()
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def accepts(self, header: Header, preprocessing: Preprocessing) -> bool:
        """See `Decoder`."""
        return header.format == "JPEG" and header.mode == "RGB" and preprocessing.channels == 3

    def load(
        self, items: Sequence[bytes], headers: Sequence[Header], preprocessing: Preprocessing
    ) -> list[PlacedImage | None]:
        """See `Decoder`."""
        whole = [index for index, item in enumerate(items) if whole_jpeg(item)]
        fitted: list[PlacedImage | None] = [None] * len(items)
        if not whole:
            return fitted
        with self._turn, torch.inference_mode(), torch.cuda.stream(self._stream):  # None: the current stream
            try:
                for index, image in zip(whole, self._decode_batch([items[index] for index in whole]), strict=True):
                    if image is not None and _matches_header(image, headers[index]):
                        fitted[index] = place(image, preprocessing)
                if self._stream is not None:
                    self._stream.synchronize()  # the engine reads the images on another stream
            except Exception as error:  # noqa: BLE001 - a library may raise anything; the CPU decides then
                if is_lost(error) or not device_answers(self._device):
                    raise BrokenError(
                        f"{self.name}: {self._device} can no longer be used by this process: {one_line(error)}"
                    ) from None
                return [None] * len(items)
        return fitted

    def _decode_batch(self, items: Sequence[bytes]) -> list[torch.Tensor | None]:
        """Decode a batch, or one by one if a bad image fails the whole batch."""
        try:
            return self.decode(items)
        except Exception as error:
            if is_lost(error) or len(items) == 1:
                raise
        found: list[torch.Tensor | None] = []
        for item in items:
            try:
                found += self.decode([item])
            except Exception as error:
                if is_lost(error):
                    raise
                found.append(None)
        return found

    @abstractmethod
    def decode(self, items: Sequence[bytes]) -> list[torch.Tensor | None]:
        """Decode JPEGs to upright ``uint8`` of shape ``(3, H, W)`` on the device, on its current stream."""


def _matches_header(image: torch.Tensor, header: Header) -> bool:
    """Whether an image has its header's size, rotated or not. Otherwise the two were read differently."""
    return image.shape[0] == 3 and sorted(image.shape[1:]) == sorted((header.height, header.width))
