"""What a decoder is, how one is opened, and the registry of them. ``cpu`` is the runtime's own: it needs no file here.

No decoder sees an image before its header was read and found within the budget. Whatever it does not take, or fails
on, goes to the runtime's own decoder, which is the reference: its error is the item's.
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
from ..images.image_preprocessing import fit
from ..images.structure import whole_jpeg
from ..registry import Registry

#: 16x16 pixels of one colour, for probes.
TINY_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZGNywtQFdBRkxOUlNSMj5aYVpQ"
    "YEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT09PT0//wAARCAAQABAD"
    "ASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAAL/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/8QAFAEBAAAAAAAAAAAAAAAAAAAABf/EABQRAQAA"
    "AAAAAAAAAAAAAAAAAAD/2gAMAwEAAhEDEQA/AJADn3//2Q=="
)
_TINY_COLOUR = (200, 100, 50)

#: The runtime's own decoder, `image_preprocessing.decode`: what accuracy was measured with.
CPU = "cpu"


class Decoder(Protocol):
    """An opened decoder. Safe to share between threads.

    Attributes:
        name: as registered.
        batch: images that it decodes together best; it takes fewer, too.
    """

    name: str
    batch: int

    def accepts(self, header: Header, preprocessing: Preprocessing) -> bool:
        """Whether it decodes such an image at all, and better than the runtime's own."""
        ...

    def load(
        self, items: Sequence[bytes], headers: Sequence[Header], preprocessing: Preprocessing
    ) -> list[torch.Tensor | None]:
        """Encoded images that it accepts to ``uint8`` of ``preprocessing.shape``, each on the host or a device.

        None stands for an image that it could not decode.

        Raises:
            BrokenError: the device is lost to this process.
        """
        ...


@dataclass(frozen=True)
class DecoderType:
    """One registered decoder.

    Attributes:
        name: the word for it in ``serving.json``.
        open: opens it for the device that the engine runs on, and has it decode `TINY_JPEG` (see `check_tiny`): raises
            whatever fails there.
        device: where it decodes: ``cpu`` or ``cuda``. One for CUDA works beside an engine that runs there.
        libraries: distributions that it runs with.
    """

    name: str
    open: Callable[[torch.device], Decoder]
    device: str
    libraries: tuple[str, ...] = ()


_REGISTRY: Registry[DecoderType] = Registry("decoder", package=__package__, group="serve.decoders")


def register(entry: DecoderType) -> DecoderType:
    """Add a decoder to the registry.

    Raises:
        ValueError: its name is taken.
    """
    if entry.name == CPU:
        raise ValueError(f"{CPU!r} is the runtime's own decoder")
    return _REGISTRY.register(entry)


def decoders() -> dict[str, DecoderType]:
    """All decoders by name, without the runtime's own."""
    return _REGISTRY.all()


def check_decoder(name: str) -> str:
    """Return ``name`` if a decoder is called so.

    Raises:
        UserError: none is; the message names the nearest and lists all.
    """
    known = [CPU, *decoders()]
    if name not in known:
        raise UserError(f"unknown decoder {name!r}{did_you_mean(name, known)}; known are {', '.join(known)}")
    return name


def open_decoder(name: str, device: torch.device) -> Decoder | None:
    """Open a decoder; None for the runtime's own.

    Args:
        name: of the decoder.
        device: where the engine runs.

    Raises:
        UserError: there is none of that name.
        EngineError: it does not work here, with the reason.
    """
    if check_decoder(name) == CPU:
        return None
    entry = decoders()[name]
    if entry.device not in (device.type, CPU):
        raise EngineError(f"the decoder {name} works on {entry.device}, and the engine runs on {device.type}")
    try:
        return entry.open(device)
    except Exception as error:
        said = str(error) if isinstance(error, EngineError) else one_line(error)
        raise EngineError(f"the decoder {name} does not work here: {said}") from error


def check_tiny(image: torch.Tensor | None) -> torch.Tensor:
    """Return what a decoder made of `TINY_JPEG`, if it has its colour.

    Raises:
        EngineError: it has not.
    """
    if image is None:
        raise EngineError("it cannot decode a JPEG of 16x16 pixels")
    mean = image.float().mean(dim=(1, 2)).tolist()
    if max(abs(found - wanted) for found, wanted in zip(mean, _TINY_COLOUR, strict=True)) > 8:
        raise EngineError(f"it decodes the colour {_TINY_COLOUR} to {[round(value) for value in mean]}")
    return image


class DeviceDecoder:
    """What decoders on a GPU have in common: one batch at a time, on a stream of its own beside the engine's.

    Only colour JPEGs go to the device, and of them only whole ones: nvJPEG makes black of what was cut off, and
    something of what has no tables, and says nothing (TorchCodec 0.17). The images of a batch are resized and cropped
    there, by the same function as on the host (`image_preprocessing.fit`), which computes in float32 there: pixels may
    differ by a level.

    Args:
        name: as registered.
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
    ) -> list[torch.Tensor | None]:
        """See `Decoder`."""
        whole = [index for index, item in enumerate(items) if whole_jpeg(item)]
        fitted: list[torch.Tensor | None] = [None] * len(items)
        if not whole:
            return fitted
        with self._turn, torch.inference_mode(), torch.cuda.stream(self._stream):  # None: the current one
            try:
                for index, image in zip(whole, self._together([items[index] for index in whole]), strict=True):
                    if image is not None and _as_told(image, headers[index]):
                        fitted[index] = fit(image, preprocessing)
                if self._stream is not None:
                    self._stream.synchronize()  # the engine reads them on another stream
            except Exception as error:  # noqa: BLE001 - a library raises what it likes; the CPU has the last word
                if is_lost(error) or not device_answers(self._device):
                    raise BrokenError(
                        f"{self.name}: {self._device} is lost to this process: {one_line(error)}"
                    ) from None
                return [None] * len(items)
        return fitted

    def _together(self, items: Sequence[bytes]) -> list[torch.Tensor | None]:
        """As `decode`; where a bad image fails the whole batch, one after the other."""
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
        """JPEGs to ``uint8`` of shape ``(3, H, W)`` on the device, upright, on its current stream."""


def _as_told(image: torch.Tensor, header: Header) -> bool:
    """Whether an image has the shape that its header told, lying or standing: else they were read differently."""
    return image.shape[0] == 3 and sorted(image.shape[1:]) == sorted((header.height, header.width))
