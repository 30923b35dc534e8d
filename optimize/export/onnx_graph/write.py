"""Writes an ONNX file from a module. All passes use it. The file is checked, small and reproducible."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from optimize.errors import PassError
from optimize.export.onnx_graph.exported_table import EXPORTED, EXPORTING, WRITTEN
from optimize.tracing.aten_program import required_program
from optimize.tracing.equivalence import require_alike
from serve.runtime.card.card import LOGITS
from serve.runtime.errors import one_line
from serve.runtime.model_files.onnx_session import LITERAL_QDQ, cpu_session
from serve.runtime.outputs import Answer

INPUT = "input"

#: The capacity of a protobuf file, less a margin for the graph. Weights of larger networks are in a file beside it. Its
#: suffix ``.data`` is torch's. The runtime's engines know it as a part of a graph.
_LARGEST_FILE = (2 << 30) - (64 << 20)

# How torch's exporter (2.11 to 2.14) names the node that it cannot translate.
_TRANSLATED = re.compile(r"target=torch\.ops\.([\w.]+)")


def export_onnx(
    module: nn.Module,
    example: torch.Tensor,
    path: Path,
    opset: int | None = None,
    *,
    outputs: Sequence[str] = (LOGITS,),
) -> onnx.ModelProto:
    """Export ``module`` with torch's dynamo exporter to ``path``.

    The graph takes ``input`` ``(batch, C, H, W)`` and gives its outputs, with ``batch`` dynamic and first. It passes
    ``onnx.checker`` with full shape inference. A protobuf file cannot hold 2 GiB. Larger weights are in ``<path>.data``
    beside it.

    Args:
        module: in eval mode, with the weights to write.
        example: an input with N >= 2 (an example of batch 1 would fix the batch at 1).
        path: the file.
        opset: the version of ONNX's operators. None: the exporter's own choice (20 in torch 2.14).
        outputs: names of the network's outputs, in their order.

    Returns:
        The graph, without weights that are stored beside the file.

    Raises:
        PassError: torch's exporter fails, the graph has other inputs or outputs, or a fixed batch, or ``onnx.checker``
            refuses it.
    """
    with EXPORTING.around(module, None), quietly():
        exported = required_program(module, example)
        EXPORTED.run(exported, None)
        try:
            program = torch.onnx.export(
                exported,
                dynamo=True,
                external_data=False,
                input_names=[INPUT],
                output_names=[*outputs],
                opset_version=opset,
            )
        except torch.onnx.OnnxExporterError as error:
            raise PassError(f"torch's ONNX exporter cannot translate this model: {_reason(error)}") from error
    assert program is not None
    tensors = [tensor for _, tensor in (*module.named_parameters(), *module.named_buffers())]
    beside = sum(tensor.nbytes for tensor in tensors) > _LARGEST_FILE
    if beside:
        program.save(str(path), external_data=True)
        model = onnx.load(path, load_external_data=False)
    else:
        model = program.model_proto
    _name_batch(model, outputs)
    _drop_metadata(model)
    WRITTEN.run(model, None)
    onnx.save(model, str(path))
    check_graph(str(path) if beside else model)
    return model


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep the exporter quiet: it reports progress on stdout and warns of its own internals."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        yield


def _reason(error: torch.onnx.OnnxExporterError) -> str:
    """Return the operator at which torch's exporter failed, and why.

    The error's own first line only says that it failed.
    """
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    operators = [found[1] for cause in causes if (found := _TRANSLATED.search(str(cause)))]
    return f"{operators[-1]}: {one_line(causes[-1])}" if operators else one_line(causes[-1])


def _name_batch(model: onnx.ModelProto, outputs: Sequence[str]) -> None:
    """Name the dynamic dimension ``batch``, and check that it is the first and only one of input and outputs."""
    graph = model.graph
    if len(graph.input) != 1 or [value.name for value in graph.output] != [*outputs]:
        raise PassError(
            f"ONNX graph: {len(graph.input)} inputs and {len(graph.output)} outputs, expected 1 input and "
            f"{len(outputs)} outputs ({', '.join(outputs)})"
        )
    for value in (graph.input[0], *graph.output):
        first, *rest = value.type.tensor_type.shape.dim
        if not first.dim_param or any(dimension.dim_param for dimension in rest):
            raise PassError(f"ONNX graph: the batch dimension of {value.name} is fixed, or another one is dynamic")
        first.dim_param = "batch"
    # Inferred shapes of inner values still carry the old symbol. They can be derived again, so they are removed.
    del graph.value_info[:]


def check_graph(model: onnx.ModelProto | str) -> None:
    """Check a graph or its file with ``onnx.checker`` and full shape inference.

    Raises:
        PassError: it is not valid.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise PassError(f"ONNX graph: it is not valid: {one_line(error)}") from error


def _drop_metadata(model: onnx.ModelProto) -> None:
    """Remove the exporter's notes on its own work. Their stack traces would name paths of this machine."""
    graph = model.graph
    del model.metadata_props[:]
    del graph.metadata_props[:]
    for item in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        del item.metadata_props[:]
        item.doc_string = ""


def save_changed(model: onnx.ModelProto, path: Path) -> None:
    """Check and write a graph whose nodes were changed, without the constants that nothing reads any more.

    Raises:
        PassError: ``onnx.checker`` refuses it.
    """
    graph = model.graph
    used = {name for node in graph.node for name in node.input}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
    check_graph(model)
    onnx.save(model, str(path))


def run_onnx(path: Path, batch: torch.Tensor, *, half: bool = False, literal: bool = False) -> Any:
    """Return the outputs, ``float32``, of an ONNX file in ONNX Runtime on the CPU.

    Args:
        path: the file.
        batch: ``(N, C, H, W)``, pixels for a graph that takes them, else float32.
        half: whether the graph computes in FP16.
        literal: run quantizers as the graph has them, with float operators between them. Otherwise integer kernels run.

    Returns:
        What the network returns: a tensor, or a tuple of several.

    Raises:
        PassError: ONNX Runtime has no kernel for a part of the graph, for example for bfloat16.
    """
    try:
        session = cpu_session(str(path), half=half, entries=LITERAL_QDQ if literal else None)
    except Exception as error:
        raise PassError(f"ONNX Runtime cannot run the graph: {one_line(error)}") from error
    wanted = session.get_inputs()[0]
    feed = batch.half() if wanted.type == "tensor(float16)" else batch
    outputs = tuple(torch.from_numpy(output).float() for output in session.run(None, {wanted.name: feed.numpy()}))
    return outputs if len(outputs) > 1 else outputs[0]


def check_against(path: Path, batch: torch.Tensor, expected: Answer, tolerance: float, *, half: bool = False) -> None:
    """Run the file in ONNX Runtime on the CPU and compare its outputs with those of its source.

    Args:
        path: the ONNX file.
        batch: as for `run_onnx`.
        expected: float32 outputs of the source for the same images.
        tolerance: largest allowed difference, relative to the largest number of an expected output.
        half: whether the graph computes in FP16.

    Raises:
        PassError: it differs by more, gives NaN, or cannot be run.
    """
    require_alike(run_onnx(path, batch, half=half), expected, tolerance, "ONNX graph")
