"""``torchcodec``: TorchCodec on a GPU, in batches (nvJPEG). It follows torchvision's decoders."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import EngineError
from .base import TINY_JPEG, Decoder, DecoderType, DeviceDecoder, check_tiny, register


class TorchCodecDecoder(DeviceDecoder):
    """See `Decoder`. A bad image raises for the whole batch, which is then decoded one by one (torchcodec 0.17)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("torchcodec", device)
        library: Any = importlib.import_module("torchcodec.decoders")
        if not hasattr(library, "decode_jpeg"):
            raise EngineError("TorchCodec decodes images since 0.16; install a newer one")
        self._decode = library.decode_jpeg

    def decode(self, items: Sequence[bytes]) -> list[torch.Tensor | None]:
        """See `DeviceDecoder`. The library applies the EXIF orientation."""
        buffers = [torch.frombuffer(bytearray(item), dtype=torch.uint8) for item in items]
        return list(self._decode(buffers, device=self._device))


def _open(device: torch.device) -> Decoder:
    decoder = TorchCodecDecoder(device)
    check_tiny(decoder.decode([TINY_JPEG])[0])
    return decoder


TORCHCODEC = register(DecoderType("torchcodec", open=_open, device="cuda", libraries=("torchcodec",)))
