"""What an artifact of fewer bits says of itself: *executed*, *packed* or *simulated*, and never more than it is.

executed: int8 kernels compute the very integers, and weights are stored as int8. packed: the same kernels, and weights
are stored in 4 or 2 bits. simulated: a float program between quantizers, no faster than float.
"""

from __future__ import annotations

import re
from typing import Literal

Way = Literal["executed", "packed", "simulated"]

_FLOAT = "int8 in float arithmetic"
#: Bits of ONNX's types below int8.
_SMALLEST = (2, 4)
_SAID = re.compile(r"\((.+) (executed|packed|simulated)\)$")

#: How the note on the size of an int8 graph's file ends.
OF_FLOAT = "of the float weights' bytes"


def precision(label: str, own: str) -> str:
    """A card's precision, of bits such as ``W4A4`` and of what the int8 program of them would be called."""
    return f"{_FLOAT} ({label} simulated)" if own == _FLOAT else f"int8 ({label} executed)"


def of_graph(precision: str) -> str:
    """The precision of an int8 graph, by that of what it is lowered from: what only simulates has executed nothing."""
    said = _SAID.search(precision)
    return f"int8 ({said[1]} {said[2]})" if said else "int8"


def of_packed(precision: str) -> str:
    """The precision of a packed graph, by that of the graph that it was."""
    said = _SAID.search(precision)
    return f"int8 ({said[1] if said else 'weights'} packed)"


def note(label: str, layers: int, way: Way, bits: int) -> str:
    """What is said of an artifact of fewer bits, as a note; ``bits`` are those that its weights' integers take."""
    what = f"{label} in {layers} layers, the others int8"
    if way == "simulated":
        return f"{what}: simulated, a float program between quantizers; no faster than float (1.0×)"
    smaller = "no type of ONNX that is smaller holds them"
    if bits <= _SMALLEST[-1]:
        smaller = f"onnx-packed stores them in {' or '.join(str(size) for size in _SMALLEST if size >= bits)} bits"
    return (
        f"{what}: executed by int8 kernels, which compute the same integers as fast as any int8; weights are stored "
        f"as int8 here, and {smaller}"
    )
