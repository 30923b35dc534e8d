"""Imports torchvision without torch's compiler, for the runtime and for the start of `optimize`.

torchvision (0.19 to 0.29) should import ``torch._dynamo`` only if ``roi_align`` is compiled (pytorch/vision PR 8436).
But it imports all of it for two functions. ``roi_align`` calls one of them then. The other marks ``tv_tensors.wrap`` as
not to be compiled. With torch 2.14 that is 1.7 of the 3.4 seconds of CPU time, and 157 MB, of every process that
decodes a JPEG. Here torchvision gets stand-ins for the two, which use the compiler when they are called.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch  # torchvision imports it first, and it must see no stand-in

__all__ = ["InterpolationMode", "decode_jpeg", "decode_webp", "functional", "models", "torchvision"]

_COMPILER, _UTILS = "torch._dynamo", "torch._dynamo.utils"


def _is_compile_supported(device_type: str) -> bool:
    supported: bool = importlib.import_module(_UTILS).is_compile_supported(device_type)
    return supported


def _disable(function: Callable[..., Any], recursive: bool = True, **more: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        if (compiler := sys.modules.get(_COMPILER)) is None:  # nothing is being compiled then
            return function(*args, **kwargs)
        return compiler.disable(function, recursive, **more)(*args, **kwargs)

    return disabled


def _stand_in(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = [f"{path}/_dynamo" for path in torch.__path__]

    def compiler_attribute(attribute: str) -> Any:  # for other attributes that a version may need
        if attribute.startswith("__"):  # `inspect` reads the file of every module
            raise AttributeError(attribute)
        _remove_stand_ins()
        return getattr(importlib.import_module(name), attribute)

    module.__getattr__ = compiler_attribute  # type: ignore[method-assign]
    return module


_STAND_INS = {} if _COMPILER in sys.modules else {name: _stand_in(name) for name in (_COMPILER, _UTILS)}


def _remove_stand_ins() -> None:
    for name, module in _STAND_INS.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


if _STAND_INS:
    _STAND_INS[_COMPILER].disable = _disable  # type: ignore[attr-defined]
    _STAND_INS[_UTILS].is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    sys.modules |= _STAND_INS
try:
    import torchvision
    import torchvision.io  # loads the operators below
    from torchvision import models
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional
finally:
    _remove_stand_ins()

#: torchvision's operator: from a JPEG as ``uint8 (N,)``, channels, and whether to apply the EXIF orientation, to
#: ``uint8 (C, H, W)``. Its function (0.29) warns each time that it is deprecated, while it holds Python's lock: 0.05 of
#: 1.4 ms.
decode_jpeg: Callable[[torch.Tensor, int, bool], torch.Tensor] = torch.ops.image.decode_jpeg.default

_TINY_WEBP = bytes.fromhex("524946461a000000574542505650384c0e0000002f00000000071011fd0f4444ff03")


def _webp_operator() -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    try:
        operator: Callable[[torch.Tensor, int], torch.Tensor] = torch.ops.image.decode_webp.default
        operator(torch.frombuffer(bytearray(_TINY_WEBP), dtype=torch.uint8), 3)
    except (AttributeError, RuntimeError):  # the operator exists, but reports that it is not supported
        return None
    return operator


#: From a WebP without animation as ``uint8 (N,)``, and 3 for colours without alpha, to ``uint8 (3, H, W)``. None if
#: torchvision was built without libwebp.
decode_webp = _webp_operator()
