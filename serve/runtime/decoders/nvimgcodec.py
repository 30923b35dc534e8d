"""``nvimgcodec``: nvImageCodec on a GPU, in batches (nvJPEG, and the hardware decoder if there is one)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from .base import TINY_JPEG, Decoder, DecoderType, DeviceDecoder, check_tiny, register


class NvImageCodecDecoder(DeviceDecoder):
    """See `Decoder`. The library returns None for a bad item (nvidia-nvimgcodec-cu13 0.9)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("nvimgcodec", device)
        library: Any = importlib.import_module("nvidia.nvimgcodec")
        self._decoder = library.Decoder(device_id=device.index or 0)
        self._params = library.DecodeParams(apply_exif_orientation=True, color_spec=library.ColorSpec.SRGB)

    def decode(self, items: Sequence[bytes]) -> list[torch.Tensor | None]:
        """See `DeviceDecoder`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        found = self._decoder.decode(list(items), params=self._params, cuda_stream=stream)
        # (H, W, 3) in the library's memory, by __cuda_array_interface__. The tensor keeps it alive.
        return [
            None if image is None else torch.as_tensor(image, device=self._device).permute(2, 0, 1) for image in found
        ]


def _open(device: torch.device) -> Decoder:
    decoder = NvImageCodecDecoder(device)
    check_tiny(decoder.decode([TINY_JPEG])[0])
    return decoder


NVIMGCODEC = register(DecoderType("nvimgcodec", open=_open, device="cuda", libraries=("nvidia-nvimgcodec-cu13",)))
