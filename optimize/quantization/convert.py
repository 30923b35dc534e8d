"""From a prepared FX model to an artifact's files: the packed int8 program and its reference form."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import fx, nn
from torch.ao.nn.quantized.modules.linear import LinearPackedParams
from torch.ao.quantization.quantize_fx import convert_fx

from optimize.errors import NotApplicableError
from optimize.export.program import save_program, write_script
from optimize.export.trace import trace
from optimize.quantization.observers import settle_weights
from optimize.quantization.qdq import reference_program
from optimize.quantization.targets import Target
from optimize.store.artifact import REFERENCE_FILE, Product
from serve.runtime.engines.torchscript import use_int8_kernels


def trace_calls(module: nn.Module) -> fx.GraphModule:
    """Trace a module for quantization: a layer with weights that is called twice becomes two, with equal weights.

    torch.ao (2.11 to 2.14) gives a shared layer the output scale of one of its calls for all of them.

    Raises:
        PassError: as `trace`.
    """
    graph_module = trace(module)
    called: set[int] = set()
    for number, node in enumerate(graph_module.graph.nodes):
        if node.op != "call_module":
            continue
        layer = graph_module.get_submodule(str(node.target))
        if id(layer) in called and next(layer.parameters(), None) is not None:
            node.target = f"{node.target}_call{number}"
            graph_module.add_submodule(node.target, copy.deepcopy(layer))
        called.add(id(layer))
    graph_module.recompile()
    return graph_module


def write_quantized(prepared: fx.GraphModule, example: torch.Tensor, target: Target, folder: Path) -> Product:
    """Convert a calibrated or QAT-trained model and write it.

    Writes the TorchScript program that is served, and ``reference.pt2``, the same integers as a graph
    of explicit quantize and dequantize operators, which ``onnx-int8`` is lowered from.

    Args:
        prepared: the observed or fake-quantized model on the CPU, in eval mode; its weights' ranges are settled.
        example: ``float32 (N, C, H, W)``, N >= 2.
        target: what the model was prepared for.
        folder: where to write.

    Raises:
        NotApplicableError: torch.ao found nothing to quantize in this model.
    """
    use_int8_kernels()
    settle_weights(prepared, example)
    backend_config = target.backend_config()
    converted = convert_fx(copy.deepcopy(prepared), backend_config=backend_config)
    layers = quantized_layers(converted)
    if not layers:
        raise NotApplicableError("torch.ao.quantization found no layer that it can quantize in this model")
    program = reference_program(prepared, example, backend_config)
    save_program(program, folder / REFERENCE_FILE)
    file = write_script(converted, example, folder)
    return Product(
        file,
        "torchscript",
        precision="int8",
        device="cpu",
        notes=(f"{layers} quantized layers, activations 0 to {target.activation_max} ({target.name})",),
    )


def quantized_layers(module: nn.Module) -> int:
    """How many submodules of a converted model hold packed int8 weights."""
    return sum(
        type(layer).__module__.startswith("torch.ao.nn")
        and callable(getattr(layer, "_weight_bias", None))
        and not isinstance(layer, LinearPackedParams)  # the inside of a quantized linear layer
        for layer in module.modules()
    )
