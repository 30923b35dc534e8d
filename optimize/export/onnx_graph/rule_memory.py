"""The rules by which torch's exporter simplifies graphs, which keep the last graph that they have seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onnx import TensorProto, helper


@contextlib.contextmanager
def let_go() -> Iterator[None]:
    """Have the rules let go, at the end of the block, of the weights of the graph that was exported in it.

    Each of onnxscript's rules (0.7.2, ``SimplePatternMatcher``) notes the graph that it is tried on and notes no other
    until it is tried again, and the rules live as long as the process: after an export of 160 MB of weights it kept
    160 MB more. So they are tried on a graph of one node, which takes half a millisecond.
    """
    try:
        yield
    finally:
        _try_on_nothing()


def _try_on_nothing() -> None:
    from onnxscript import rewriter

    image = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("given", "taken")]
    node = helper.make_node("Identity", ["given"], ["taken"])
    rewriter.rewrite(helper.make_model(helper.make_graph([node], "nothing", image[:1], image[1:])))
