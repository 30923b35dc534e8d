"""OpenVINO's settings for a graph: which kernels it may keep."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from serve.runtime.engines.openvino import _without_kept, compile_bytes, core


def graph(*perm: int) -> bytes:
    """Images of 3 x 4 x 5 whose axes are moved, or not, and what is above zero of them."""
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 4, 5])
    nodes = [helper.make_node("Transpose", ["images"], ["moved"], perm=perm)] if perm else []
    nodes.append(helper.make_node("Relu", ["moved" if perm else "images"], ["above"]))
    above = helper.make_tensor_value_info("above", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "g", [images], [above])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(onnx.ModelProto.SerializeToString(model))


@pytest.mark.parametrize(("perm", "kept"), [((), True), ((0, 2, 3, 1), False)])
def test_where_axes_are_moved_no_kernel_is_kept(perm: tuple[int, ...], kept: bool) -> None:
    found = _without_kept(core().read_model(graph(*perm)))
    assert found == ({} if kept else {"CPU_RUNTIME_CACHE_CAPACITY": 0})


def test_batches_of_other_sizes_are_answered_in_turn() -> None:
    compiled = compile_bytes(graph(0, 3, 1, 2), 2)
    for count in (1, 4, 2, 4, 1):
        images = np.random.default_rng(count).normal(size=(count, 3, 4, 5)).astype(np.float32)
        (found,) = compiled(images).values()
        assert np.array_equal(found, np.maximum(images.transpose(0, 3, 1, 2), 0))
