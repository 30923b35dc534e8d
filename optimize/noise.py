"""Silences, one by one, the warnings of libraries that a user of this program cannot act on.

The command line silences them for its whole process. The API silences them only while it works, so that it does not
hide warnings from the program that calls it.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

#: Category and beginning of each message, all of torch 2.14. TorchScript and quantized tensors are deprecated there,
#: but they are still the only way to write and run torch.ao's int8 modules: see docs/explanations/limits.md. The last
#: two concern torch's own layers, which a user cannot change.
_KNOWN: tuple[tuple[type[Warning], str], ...] = (
    (FutureWarning, r"`torch\.jit\.\w+` is deprecated"),
    (DeprecationWarning, r"`torch\.jit\.\w+` is deprecated"),
    (UserWarning, r"torch\.quantize_per_tensor, torch\.quantize_per_channel and other quantized tensor"),
    (DeprecationWarning, r"torch\.ao\.quantization is deprecated"),
    (UserWarning, r"Please use quant_min and quant_max to specify the range for observers"),  # from a layer norm
    (UserWarning, r"The tensor attributes self\.[\w.]*_flat_weights\["),  # from a recurrent layer that is exported
)

#: torch.compile logs that a machine without a GPU has no CUDA runtime. torchao 0.18, when it is imported, uses an
#: interface that torch 2.14 wants to be used in another way.
_LOGGERS = ("torch.utils.cpp_extension", "torch.utils._pytree")


def silence() -> None:
    """Ignore the warnings of ``_KNOWN`` and the remarks of ``_LOGGERS`` in this process."""
    import torch

    for category, message in _KNOWN:
        warnings.filterwarnings("ignore", message, category)
    # torch raises this warning once a process. If a TorchScript file makes the first quantized tensor, a C++ thread
    # raises it, where no Python filter applies. So it is triggered here.
    torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Silence the warnings as in `silence` until the block ends.

    Python's warning filters belong to the process: do not use this in two threads at once.
    """
    with warnings.catch_warnings():
        silence()
        yield
