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
from optimize.quantization.graph.in_place_writes import name_written
from optimize.quantization.graph.nodes import called_module
from optimize.quantization.graph.repeated_calls import another_call
from optimize.quantization.graph.torchao_memory import forgotten
from optimize.quantization.lowering.amx.narrow_groups import put_groups_together
from optimize.quantization.lowering.integer_biases import repack, round_biases
from optimize.quantization.lowering.narrow_ranges import clamp_packed
from optimize.quantization.lowering.qdq import quantized_weights, reference_form, reference_program
from optimize.quantization.lowering.uneven_padding import embed_padding, pad_integers
from optimize.quantization.observer_choice import Observer
from optimize.quantization.observers import settle_weights
from optimize.quantization.placement.attention_scores import call_softmax, free_scores
from optimize.quantization.placement.between_layers import free_between, free_image
from optimize.quantization.placement.float_calls import InFloat, free_masks, free_maxima, free_quotients, free_sizes
from optimize.quantization.placement.global_pools import GlobalPool, free_last_pool
from optimize.quantization.placement.inexact_layers import IN_FLOAT, free_inexact
from optimize.quantization.placement.known_ranges import KNOWN_IN_FLOAT, free_given, free_known
from optimize.quantization.placement.layer_outputs import free_outputs
from optimize.quantization.placement.network_output import free_answer
from optimize.quantization.placement.relu6 import bind, bound_relus
from optimize.quantization.placement.residual_stream import free_stream
from optimize.quantization.placement.scalar_operands import free_scalars
from optimize.quantization.placement.single_place_means import flatten_places, free_means
from optimize.quantization.rewrites.attention import write_out_attention
from optimize.quantization.rewrites.batch_norms import with_factors
from optimize.quantization.rewrites.call_rewrites import drop_empty, write_bounds, write_types
from optimize.quantization.rewrites.computed_weights import store_weights
from optimize.quantization.rewrites.constant_tensors import make_once
from optimize.quantization.rewrites.eval_dropouts import drop_dropouts
from optimize.quantization.rewrites.full_slices import drop_whole_slices
from optimize.quantization.rewrites.functional_layers import lift_functions, write_out_padding
from optimize.quantization.rewrites.resizes import free_resizes
from optimize.quantization.rewrites.same_padding import write_out_same
from optimize.quantization.rewrites.split_tensors import take_pieces
from optimize.quantization.rewrites.wide_patches import unfold_patches
from optimize.quantization.shared_observers import share_watchers
from optimize.quantization.targets import Target
from optimize.store.artifact import REFERENCE_FILE, Product
from optimize.tracing.constants import attribute
from optimize.tracing.foreign_layers import left_whole
from optimize.tracing.naming import free_name
from optimize.tracing.trace import note_shapes, trace
from optimize.tracing.zero_padding import call_pads, fold_padding
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import save_program

_NOTHING = "torch.ao.quantization found no layer that it can quantize in this model"


def trace_calls(
    module: nn.Module, example: torch.Tensor, in_float: Callable[[str], bool] = lambda name: False
) -> fx.GraphModule:
    """Trace a module for quantization: attention is written out, a layer that is called twice becomes two.

    A mean over maps of one place becomes a flattening (see `flatten_places`), a sum with a number a method's call (see
    `free_scalars`), and zeros that a network puts around images a convolution's padding (see `fold_padding`). What
    layers share, each has for itself afterwards: a weight that is rounded, a sign that is turned or a bias that is
    shifted for one of them would be so for the others. A weight that is computed (parametrised) is the one that it
    comes to; on norms see `with_factors`.

    torch.ao (2.11 to 2.14) gives a shared layer the output scale of one of its calls for all of them; on attention see
    `write_out_attention`.

    Args:
        module: what is traced, in eval mode.
        example: ``float32 (N, C, H, W)``.
        in_float: whether the module of this name is to stay in float.

    Raises:
        PassError: as `trace`.
        NotApplicableError: a norm has no running statistics.
    """
    graph_module = trace(module, example)
    name_written(graph_module, example)
    store_weights(graph_module)
    with_factors(graph_module)
    write_out_attention(graph_module, example, in_float)
    write_out_same(graph_module, example)
    lift_functions(graph_module)
    write_out_padding(graph_module)
    free_maxima(graph_module)
    call_softmax(graph_module)
    note_shapes(graph_module, example)  # of what attention has become, too
    make_once(graph_module, example)
    write_types(graph_module)
    write_bounds(graph_module)
    drop_empty(graph_module)
    take_pieces(graph_module)
    free_masks(graph_module)
    free_sizes(graph_module)
    free_quotients(graph_module)
    free_resizes(graph_module)
    flatten_places(graph_module)
    drop_whole_slices(graph_module)
    free_scalars(graph_module)
    called: set[int] = set()
    for number, node in enumerate(graph_module.graph.nodes):
        if node.op != "call_module":
            continue
        layer = graph_module.get_submodule(str(node.target))
        if id(layer) in called and next(layer.parameters(), None) is not None:
            node.target = another_call(str(node.target), number)
            graph_module.add_submodule(node.target, copy.deepcopy(layer))
        called.add(id(layer))
    _part(graph_module)
    _untie(graph_module)
    unfold_patches(graph_module)
    fold_padding(graph_module)
    call_pads(graph_module)
    graph_module.recompile()
    return graph_module


def _part(module: fx.GraphModule) -> None:
    """Give who reads a tensor of a layer that is called, too, one of its own, in place: an int8 layer's is a method."""
    called = {id(called_module(module, node)) for node in module.graph.nodes if node.op == "call_module"}
    for node in module.graph.nodes:
        owner, _, _ = str(node.target).rpartition(".")
        if node.op != "get_attr" or not owner or id(module.get_submodule(owner)) not in called:
            continue
        value: torch.Tensor = attribute(module, str(node.target))
        node.target = free_name(module, f"{node.name}_beside")
        if isinstance(value, nn.Parameter):
            module.register_parameter(node.target, nn.Parameter(value.detach().clone(), value.requires_grad))
        else:
            module.register_buffer(node.target, value.detach().clone())


def _untie(module: nn.Module) -> None:
    """Give each layer parameters of its own, in place."""
    known: set[int] = set()
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in known:
                setattr(layer, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
            known.add(id(parameter))


def prepare(module: fx.GraphModule, mapping: QConfigMapping, example: torch.Tensor, target: Target) -> fx.GraphModule:
    """Insert what watches tensors for quantization: into a module in training mode for QAT, else for calibration.

    Args:
        module: see `trace_calls`.
        mapping: which layers are quantized, and how.
        example: ``float32 (N, C, H, W)``.
        target: whose kernels' patterns are looked for.
    """
    # FX would trace into layers of foreign classes again, and fail.
    whole = PrepareCustomConfig().set_non_traceable_module_classes(
        [*left_whole(module), GlobalPool, InFloat, *IN_FLOAT, *KNOWN_IN_FLOAT]
    )
    insert = prepare_qat_fx if module.training else prepare_fx
    unbound: frozenset[str] = frozenset()
    while True:
        bounded = copy.deepcopy(module)
        if not module.training:
            drop_dropouts(bounded)
        if target.packed:
            free_last_pool(bounded, example)
            free_inexact(bounded)
            free_known(bounded)
        bounds = bound_relus(bounded, mapping, but_not=unbound)
        with forgotten(bounded):
            prepared: fx.GraphModule = insert(
                bounded, mapping, (example,), whole, backend_config=target.backend_config()
            )
        share_watchers(prepared, target)
        lost = bind(prepared, bounds)
        if not lost:
            free_given(prepared)
            free_scores(prepared)
            free_means(prepared, target.backend_config())
            free_stream(prepared)
            free_answer(prepared)
            if not target.packed:
                free_outputs(prepared, target.backend_config())
            free_between(prepared)
            free_image(prepared)
            return prepared
        unbound |= lost


def choose(
    module: fx.GraphModule,
    mapping: QConfigMapping,
    chosen: Chosen,
    override: Callable[[Observer], QConfig] | None = None,
) -> QConfigMapping:
    """Write what was chosen for single layers of a traced module into the mapping.

    Args:
        module: see `trace_calls`.
        mapping: what holds for the others.
        chosen: layers in float, and those with an observer of their own.
        override: how a layer with an observer of its own is prepared; None leaves it as the others.
    """
    for node in module.graph.nodes:
        if node.op != "call_module":
            continue
        name = str(node.target)
        observer = chosen.observer(name)
        # What an operator's class needs (a known range, none at all) holds also where an observer is chosen.
        special = type(module.get_submodule(name)) in mapping.object_type_qconfigs
        if chosen.in_float(name):
            mapping = mapping.set_module_name(name, None)
        elif observer is not None and override is not None and not special:
            mapping = mapping.set_module_name(name, override(observer))
    return mapping


def write_quantized(prepared: fx.GraphModule, example: torch.Tensor, target: Target, folder: Path) -> Product:
    """Convert a calibrated or QAT-trained model and write it.

    Writes the TorchScript program that is served, and ``reference.pt2``, the same integers as a graph
    of explicit quantize and dequantize operators, which ``onnx-int8`` is lowered from. Of a target whose integers torch
    has no kernels for, the second alone: it is the artifact, and computes what the integers mean in float arithmetic.

    Args:
        prepared: the observed or fake-quantized model on the CPU, in eval mode; its weights' ranges are settled.
        example: ``float32 (N, C, H, W)``, N >= 2.
        target: what the model was prepared for.
        folder: where to write.

    Raises:
        NotApplicableError: torch.ao found nothing to quantize in this model.
    """
    settle_weights(prepared, example)
    backend_config = target.backend_config()
    if not target.packed:
        form = reference_form(prepared, example, backend_config)
        return write_reference(form, example, target, folder, "torch has no kernels for them")
    use_int8_kernels()
    with forgotten(prepared):
        converted = convert_fx(copy.deepcopy(prepared), backend_config=backend_config)
    layers = quantized_layers(converted)
    if not layers:
        raise NotApplicableError(_NOTHING)
    form = reference_form(prepared, example, backend_config)
    repack(converted, round_biases(form))
    pad_integers(converted, example)
    embed_padding(converted)
    put_groups_together(converted, example)
    program = reference_program(form, example)
    _reshape_views(converted)
    clamp_packed(converted, program.graph, example)
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


def write_reference(form: fx.GraphModule, example: torch.Tensor, target: Target, folder: Path, why: str) -> Product:
    """Write a reference form as the artifact itself, where there is no packed program.

    Args:
        form: see `optimize.quantization.lowering.qdq.explicit_form`.
        example: ``float32 (N, C, H, W)``, N >= 2.
        target: whose integers it has.
        folder: where to write.
        why: there is no packed program, for the card.

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
            f"{layers} quantized layers, {target.described}; {why}: this program computes what they mean in float "
            "arithmetic, and its speed is not theirs",
        ),
    )


def _reshape_views(converted: fx.GraphModule) -> None:
    """Write views as reshapes, in place: what torch's integer kernels give lies channels last (2.11 to 2.14).

    A view of it as rows, which the network can take of its own tensors, would be refused.
    """
    for node in converted.graph.nodes:
        sizes = all(isinstance(size, int | fx.Node | tuple | list) for size in node.args[1:])  # and no type
        if node.op == "call_method" and node.target == "view" and sizes and not node.kwargs:
            node.target = "reshape"
    converted.recompile()


def _left_in_float(converted: fx.GraphModule) -> Iterator[str]:
    """A note of the layers with weights that no int8 kernel computes, if there are any."""
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
    """How many submodules of a converted model hold packed int8 weights."""
    return sum(
        type(layer).__module__.startswith("torch.ao.nn")
        and callable(getattr(layer, "_weight_bias", None))
        and not isinstance(layer, LinearPackedParams)  # the inside of a quantized linear layer
        for layer in module.modules()
    )
