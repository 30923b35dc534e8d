"""From a prepared FX model to an artifact's files: the packed int8 program and its reference form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import fx, nn
from torch.ao.nn.quantized.modules.linear import LinearPackedParams
from torch.ao.quantization import QConfig, QConfigMapping
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from optimize.errors import NotApplicableError
from optimize.export.program import write_script
from optimize.quantization.choices import Chosen
from optimize.quantization.graph.torchao_memory import forgotten
from optimize.quantization.lowering.packed_table import PACKED, Packing
from optimize.quantization.lowering.qdq import quantized_weights, reference_form, reference_program
from optimize.quantization.observer_choice import Observer
from optimize.quantization.observers import settle_weights
from optimize.quantization.placement.float_calls import InFloat
from optimize.quantization.placement.global_pools import GlobalPool
from optimize.quantization.placement.inexact_layers import IN_FLOAT
from optimize.quantization.placement.known_ranges import KNOWN_IN_FLOAT
from optimize.quantization.prepared_table import OBSERVED, UNOBSERVED, Preparing
from optimize.quantization.rewrites.traced_table import TRACED, Tracing
from optimize.quantization.targets import Target
from optimize.store.artifact import REFERENCE_FILE, Product
from optimize.tracing.foreign_layers import left_whole
from optimize.tracing.trace import trace
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import save_program

_NOTHING = "torch.ao.quantization found no layer that it can quantize in this model"


def trace_calls(
    module: nn.Module, example: torch.Tensor, in_float: Callable[[str], bool] = lambda name: False
) -> fx.GraphModule:
    """Trace a module for quantization: attention is written out, and a layer that is called twice becomes two.

    A mean over 1 × 1 maps becomes a flatten (see `flatten_places`). A sum with a number becomes a method call (see
    `free_scalars`). Zero padding becomes a convolution's padding (see `fold_padding`).

    Layers that shared a tensor get one each. A weight that is rounded, a sign that is turned or a bias that is shifted
    for one layer must not change the others. A computed (parametrised) weight is stored as its value. On norms see
    `with_factors`.

    torch.ao (2.11 to 2.14) gives a shared layer the output scale of one of its calls for all of them. On attention see
    `write_out_attention`.

    Args:
        module: the module to trace, in eval mode.
        example: an input, ``float32 (N, C, H, W)``.
        in_float: tells by a module's name whether it stays in float.

    Raises:
        PassError: as `trace`.
        NotApplicableError: a norm has no running statistics.
    """
    graph_module = trace(module, example)
    TRACED.run(graph_module, Tracing(example, in_float))
    graph_module.recompile()
    return graph_module


def prepare(module: fx.GraphModule, mapping: QConfigMapping, example: torch.Tensor, target: Target) -> fx.GraphModule:
    """Insert fake-quantize modules into a module in training mode (for QAT), and observers otherwise (for calibration).

    Args:
        module: see `trace_calls`.
        mapping: which layers are quantized, and how.
        example: an input, ``float32 (N, C, H, W)``.
        target: the target whose kernels' patterns are used.
    """
    # FX would trace into layers of foreign classes again, and fail.
    whole = PrepareCustomConfig().set_non_traceable_module_classes(
        [*left_whole(module), GlobalPool, InFloat, *IN_FLOAT, *KNOWN_IN_FLOAT]
    )
    insert = prepare_qat_fx if module.training else prepare_fx
    unbound: frozenset[str] = frozenset()
    while True:
        bounded, given = copy.deepcopy(module), Preparing(example, target, module.training, mapping, unbound)
        UNOBSERVED.run(bounded, given)
        with forgotten(bounded):
            prepared: fx.GraphModule = insert(
                bounded, mapping, (example,), whole, backend_config=target.backend_config()
            )
        OBSERVED.run(prepared, given)
        if not given.lost:
            return prepared
        unbound |= given.lost


def choose(
    module: fx.GraphModule,
    mapping: QConfigMapping,
    chosen: Chosen,
    override: Callable[[Observer], QConfig] | None = None,
) -> QConfigMapping:
    """Write the choices for single layers of a traced module into the mapping.

    Args:
        module: see `trace_calls`.
        mapping: the settings of all other layers.
        chosen: layers in float, and layers with their own observer.
        override: gives the settings of a layer with its own observer. None: such a layer is like the others.
    """
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        name = str(node.target)
        observer = chosen.observer(name)
        # An operator class may need special settings, such as a known range or none at all. These hold even where an
        # observer is chosen.
        special = type(module.get_submodule(name)) in mapping.object_type_qconfigs
        if chosen.in_float(name):
            mapping = mapping.set_module_name(name, None)
        elif observer is not None and override is not None and not special:
            mapping = mapping.set_module_name(name, override(observer))
    return mapping


def write_quantized(prepared: fx.GraphModule, example: torch.Tensor, target: Target, folder: Path) -> Product:
    """Convert a calibrated or QAT-trained model and write it.

    This writes the TorchScript program that is served, and ``reference.pt2``. The reference holds the same integers as
    a graph of explicit quantize and dequantize operators, and ``onnx-int8`` is lowered from it. If torch has no kernels
    for the target's integers, only the reference is written. It is then the artifact, and computes in float arithmetic
    what the integers mean.

    Args:
        prepared: the observed or fake-quantized model on the CPU, in eval mode. Its weights' ranges are settled.
        example: an input, ``float32 (N, C, H, W)``, N >= 2.
        target: the target that the model was prepared for.
        folder: where to write.

    Raises:
        NotApplicableError: torch.ao found nothing to quantize in this model.
    """
    settle_weights(prepared, example)
    if not target.packed:
        form = reference_form(prepared, example, target.backend_config())
        return write_reference(form, example, target, folder, "torch has no kernels for them")
    converted, form = packed_form(prepared, example, target)
    layers = quantized_layers(converted)
    program = reference_program(form, example)
    save_program(program, folder / REFERENCE_FILE)
    file = write_script(converted, example, folder)
    return Product(
        file,
        "torchscript",
        precision="int8",
        device="cpu",
        target=target.name,
        notes=(
            f"{layers} quantized layers, {target.described}",
            *_left_in_float(converted),
        ),
    )


def packed_form(
    prepared: fx.GraphModule, example: torch.Tensor, target: Target
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return torch's packed program of a model with settled ranges, and its reference form with the same integers.

    Args:
        prepared: as for `write_quantized`; it is not changed.
        example: an input, ``float32 (N, C, H, W)``, N >= 2.
        target: the target that the model was prepared for. It has packed kernels.

    Raises:
        NotApplicableError: torch.ao found nothing to quantize in this model.
    """
    use_int8_kernels()
    with forgotten(prepared):
        converted = convert_fx(copy.deepcopy(prepared), backend_config=target.backend_config())
    if not quantized_layers(converted):
        raise NotApplicableError(_NOTHING)
    form = reference_form(prepared, example, target.backend_config())
    PACKED.run(converted, Packing(form, example))
    return converted, form


def write_reference(form: fx.GraphModule, example: torch.Tensor, target: Target, folder: Path, why: str) -> Product:
    """Write a reference form as the artifact itself, if there is no packed program.

    Args:
        form: see `optimize.quantization.lowering.qdq.explicit_form`.
        example: an input, ``float32 (N, C, H, W)``, N >= 2.
        target: the target of its integers.
        folder: where to write.
        why: the reason why there is no packed program, for the card.

    Raises:
        NotApplicableError: nothing in it is quantized.
    """
    program = reference_program(form, example)
    layers = quantized_weights(program)
    if not layers:
        raise NotApplicableError(_NOTHING)
    save_program(program, folder / REFERENCE_FILE)
    return Product(
        REFERENCE_FILE,
        "exported_program",
        precision="int8 in float arithmetic",
        device="cpu",
        target=target.name,
        notes=(
            f"{layers} quantized layers, {target.described}; {why}: this program computes them in float "
            "arithmetic, so its speed says nothing about int8",
        ),
    )


def _left_in_float(converted: fx.GraphModule) -> Iterator[str]:
    """Yield a note of the layers with weights that no int8 kernel computes, if there are any."""
    kinds = (_ConvNd, nn.Linear, nn.MultiheadAttention, _BatchNorm)
    functions = (functional.conv1d, functional.conv2d, functional.conv3d, functional.linear, functional.batch_norm)
    left = []
    for node in converted.graph.nodes:
        if node.op == "call_module":
            layer = converted.get_submodule(str(node.target))
            fused = type(layer).__module__.startswith("torch.ao.nn.intrinsic.modules")
            if fused or (isinstance(layer, kinds) and not type(layer).__module__.startswith("torch.ao")):
                left.append(f"{node.target} ({type(layer).__name__})")
        elif node.op == "call_function" and node.target in functions:
            left.append(f"{node.name} ({node.target.__name__})")
    if left:
        yield f"{len(left)} layers left in float: {', '.join(left[:4])}{' …' if len(left) > 4 else ''}"


def quantized_layers(module: nn.Module) -> int:
    """Return the number of submodules of a converted model that hold packed int8 weights."""
    return sum(
        type(layer).__module__.startswith("torch.ao.nn")
        and callable(getattr(layer, "_weight_bias", None))
        and not isinstance(layer, LinearPackedParams)  # the inside of a quantized linear layer
        for layer in module.modules()
    )
