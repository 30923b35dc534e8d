"""The task's ending behind the network, in the same ONNX graph.

The engine then computes it, and only what answers are made of leaves the engine: a class map instead of a logit for
each class and pixel. The network's own outputs stay outputs of the graph, for whoever compares logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import onnx
import torch
from torch import nn

from optimize.context import Context
from optimize.errors import PassError
from optimize.export.onnx_graph.pixel_input import graph_input
from optimize.export.onnx_graph.write import check_graph, quietly, run_onnx
from optimize.store.artifact import Product
from serve.runtime.outputs import Outputs, as_outputs
from serve.runtime.tasks.base import Task, find_task

_PREFIX = "ending/"
#: Number of training images on which the graph's ending is compared with the runtime's.
_IMAGES = 4
#: The sum of many logits, in another order.
_TOLERANCE = 1e-3


class _Ending(nn.Module):
    def __init__(self, task: type[Task]) -> None:
        super().__init__()
        self._task = task

    def forward(self, *outputs: torch.Tensor) -> Outputs:
        return self._task.ending(outputs)


def with_ending(product: Product, folder: Path, context: Context, outputs: Sequence[str]) -> Product:
    """Write the ending of the context's task into a product's graph, in place, unless the graph has it.

    Args:
        product: its file is an ONNX graph, float or quantized.
        folder: where the file is.
        context: names the task, and has images to check the result with.
        outputs: names of the network's outputs.

    Returns:
        The product, which names the further outputs. Unchanged if the task has no ending.

    Raises:
        PassError: the graph's ending does not compute what the runtime's does.
    """
    task = find_task(context.data.task)
    if not task.ended:
        return product
    path = folder / product.file
    model = onnx.load(str(path), load_external_data=False)
    if not {*task.ended} <= {output.name for output in model.graph.output}:
        _append(model, _exported(task, model, outputs))
        onnx.save(model, str(path))
        check_graph(str(path))
        _compare(path, product, context, task, len(outputs))
    return dataclasses.replace(product, ending=task.ended)


def _exported(task: type[Task], model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """Return the ending as a graph of its own, in the operators' version of ``model``."""
    shapes = {value.name: value.type.tensor_type for value in model.graph.output}
    examples = tuple(
        torch.zeros(
            (2, *(side.dim_value for side in shapes[name].shape.dim[1:])),
            dtype=torch.float16 if shapes[name].elem_type == onnx.TensorProto.FLOAT16 else torch.float32,
        )
        for name in outputs
    )
    dynamic = (({0: torch.export.Dim.DYNAMIC},) * len(examples),)
    version = next(entry.version for entry in model.opset_import if not entry.domain)
    with quietly():
        program = torch.export.export(_Ending(task).eval(), examples, dynamic_shapes=dynamic)
        written = torch.onnx.export(
            program, dynamo=True, input_names=[*outputs], output_names=[*task.ended], opset_version=version
        )
    assert written is not None
    return written.model_proto


def _append(model: onnx.ModelProto, ending: onnx.ModelProto) -> None:
    """Append a graph whose inputs have the names of the model's outputs. Its own outputs become further ones."""
    kept = {value.name for value in (*ending.graph.input, *ending.graph.output)}

    def renamed(name: str) -> str:
        return name if not name or name in kept else f"{_PREFIX}{name}"

    for node in ending.graph.node:
        node.name = f"{_PREFIX}{node.name}"
        node.input[:] = map(renamed, node.input)
        node.output[:] = map(renamed, node.output)
        node.doc_string = ""
        del node.metadata_props[:]
    for tensor in ending.graph.initializer:
        tensor.name = renamed(tensor.name)
        tensor.doc_string = ""
    batch = model.graph.output[0].type.tensor_type.shape.dim[0].dim_param
    for value in ending.graph.output:
        value.type.tensor_type.shape.dim[0].dim_param = batch
        del value.metadata_props[:]
    model.graph.node.extend(ending.graph.node)
    model.graph.initializer.extend(ending.graph.initializer)
    model.graph.output.extend(ending.graph.output)


def _compare(path: Path, product: Product, context: Context, task: type[Task], outputs: int) -> None:
    batch = graph_input(context, "uint8" if product.input_dtype == "uint8" else "float", _IMAGES)
    found = as_outputs(run_onnx(path, batch, half=product.precision == "float16", literal=True))
    wanted = [tensor.float() for tensor in task.ending(found[:outputs])]
    for name, one, other in zip(task.ended, wanted, found[outputs:], strict=True):
        if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise PassError(f"ONNX graph: its ending computes another {name!r} than the runtime")
