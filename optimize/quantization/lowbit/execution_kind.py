"""How an artifact with fewer bits describes itself: *executed*, *packed* or *simulated*, and never more than it is.

Executed: int8 kernels compute exactly these integers, and weights are stored as int8. Packed: the same kernels, and
weights are stored in 4 or 2 bits. Simulated: a float program between quantizers, no faster than float.
"""

from __future__ import annotations

import re
from typing import Literal

Way = Literal["executed", "packed", "simulated"]

_FLOAT = "int8 in float arithmetic"
#: Bits of ONNX's types below int8.
_SMALLEST = (2, 4)
_SAID = re.compile(r"\((.+) (executed|packed|simulated)\)$")

#: The end of the note on the file size of an int8 graph.
OF_FLOAT = "of the float weights' bytes"


def precision(label: str, own: str) -> str:
    """Return a card's precision, from bits such as ``W4A4`` and the precision of the int8 program that has them."""
    return f"{_FLOAT} ({label} simulated)" if own == _FLOAT else f"int8 ({label} executed)"


def of_graph(precision: str) -> str:
    """Return the precision of an int8 graph, from its source's. A source that only simulates has executed nothing."""
    said = _SAID.search(precision)
    return f"int8 ({said[1]} {said[2]})" if said else "int8"


def of_packed(precision: str) -> str:
    """Return the precision of a packed graph, from that of the graph before."""
    said = _SAID.search(precision)
    return f"int8 ({said[1] if said else 'weights'} packed)"


def note(label: str, layers: int, way: Way, bits: int) -> str:
    """Return the note of an artifact with fewer bits. ``bits`` are those that its weights' integers need."""
    what = f"{label} in {layers} layers, the others int8"
    if way == "simulated":
        return f"{what}: simulated, a float program between quantizers; no faster than float (1.0×)"
    smaller = "ONNX has no smaller type for them"
    if bits <= _SMALLEST[-1]:
        smaller = f"onnx-packed stores them in {' or '.join(str(size) for size in _SMALLEST if size >= bits)} bits"
    return (
        f"{what}: executed by int8 kernels, which compute the same integers as fast as any int8; weights are stored "
        f"as int8 here, and {smaller}"
    )
