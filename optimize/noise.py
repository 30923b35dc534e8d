"""Warnings of libraries that a user of this program can do nothing about, silenced one by one.

The command line silences them for its process, the API while it works: what a program hears otherwise is its own.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

#: Category and beginning of each message. All are of torch 2.14: TorchScript and quantized tensors are deprecated
#: there and still the only way to write and run torch.ao's int8 modules; see docs/explanations/limits.md. What the last
#: two ask for is a matter of torch's own layers.
_KNOWN: tuple[tuple[type[Warning], str], ...] = (
    (FutureWarning, r"`torch\.jit\.\w+` is deprecated"),
    (DeprecationWarning, r"`torch\.jit\.\w+` is deprecated"),
    (UserWarning, r"torch\.quantize_per_tensor, torch\.quantize_per_channel and other quantized tensor"),
    (DeprecationWarning, r"torch\.ao\.quantization is deprecated"),
    (UserWarning, r"Please use quant_min and quant_max to specify the range for observers"),  # of a layer norm
    (UserWarning, r"The tensor attributes self\.[\w.]*_flat_weights\["),  # of a recurrent layer that is exported
)

#: Of torch.compile, that a machine without a GPU has no CUDA runtime; of what torchao (0.18) does when it is imported,
#: that torch 2.14 wants it otherwise.
_LOGGERS = ("torch.utils.cpp_extension", "torch.utils._pytree")


def silence() -> None:
    """Ignore the warnings above, and what the loggers above remark."""
    import torch

    for category, message in _KNOWN:
        warnings.filterwarnings("ignore", message, category)
    # Said once a process. Where a TorchScript file is the first to make a quantized tensor, it is said by a thread
    # of C++ that no filter hears; so it is said here.
    torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """As `silence`, until the block ends. Python's filters belong to the process: not for two threads at once."""
    with warnings.catch_warnings():
        silence()
        yield
