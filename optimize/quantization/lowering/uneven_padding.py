"""Folds uneven zero padding into convolutions, in an ONNX graph and in torch's packed program.

Even padding became a convolution's own when the network was traced (`optimize.tracing.zero_padding`). What remains is
"same" padding with stride two, and padding in programs that were made in another way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.ao.nn.quantized as nnq
from torch import fx
from torch.nn import functional

from optimize.errors import PassError
from optimize.quantization.graph.explicit_quantizers import moved, quantizing
from optimize.quantization.lowering.integer_biases import with_integers
from optimize.quantization.lowering.narrow_ranges import quantized_parameters
from optimize.quantization.rewrites.wide_patches import is_misread
from optimize.tracing.node_values import value_of
from optimize.tracing.zero_padding import around, of_places

_ATEN = torch.ops.aten
#: Convolutions in programs, and their number of axes.
CONVOLUTIONS: Final[Mapping[Any, int]] = {
    operator.default: axes for axes, operator in ((1, _ATEN.conv1d), (2, _ATEN.conv2d), (3, _ATEN.conv3d))
}
_PACKED: Final = (nnq.Conv1d, nnq.Conv2d, nnq.Conv3d)
_DEFAULTS: Final = ("constant", None)
_MODE: Final = 2  # position of the mode in `aten.pad`, and of the value in the other operator


@dataclass(frozen=True)
class Padding:
    """The padding of a convolution's input as a call of ``pad``: its operator, and the arguments after the input."""

    target: Any
    settings: tuple[Any, ...]


def take_padding(module: fx.GraphModule) -> dict[fx.Node, Padding]:
    """Remove zero padding that is quantized in front of a convolution, in place, until `put_padding`.

    Behind a quantizer, zeros are the zero point, with which a quantized convolution pads. So the images are quantized
    first and padded afterwards. ``pad(x) → quantize → dequantize → convolution`` becomes ``x → quantize → dequantize →
    pad → convolution``. Torch's exporter (onnxscript 0.7.2, ``FuseConvPad``) writes the last two nodes as one. A
    quantizer that would repeat the previous one is left out. In between, the graph has no padding, and rewrites of
    quantized layers find their layers. Only the noted shapes do not match.

    Padding that something else reads stays, unless the convolution reads integers that exist anyway. Padding around
    values that were rounded with another scale also stays. ONNX Runtime (1.31, ``DoubleQDQPairsRemover``) merges two
    pairs in a row, and was seen to give other integers.

    Args:
        module: of a program, with ``aten`` operators and explicit quantizers.

    Returns:
        The convolutions, and the padding to give back to each.
    """
    taken = dict[fx.Node, Padding]()
    known = dict[fx.Node, fx.Node]()
    for node in list(module.graph.nodes):
        pad = _quantized_zeros(node)
        if pad is None:
            continue
        given: Any = node.args[0]
        images: Any = pad.args[0]
        if given not in known:
            again = _is_again(images, given)
            if not again and (quantizing(moved(images)) or not _only_layers(pad)):
                continue
            known[given] = images if again else _requantized(module.graph, images, given)
        node.args = (known[given], *node.args[1:])
        taken[node] = Padding(pad.target, pad.args[1:])
    module.graph.eliminate_dead_code()
    module.recompile()
    return taken


def put_padding(module: fx.GraphModule, taken: Mapping[fx.Node, Padding]) -> None:
    """Put padding right in front of the convolutions from which `take_padding` removed it, in place.

    Raises:
        PassError: one of these convolutions is no longer in the graph.
    """
    nodes = {*module.graph.nodes}
    for node, padding in taken.items():
        if node not in nodes:
            raise PassError(f"{node.name}: a padded convolution was rewritten and would lose its padding")
        with module.graph.inserting_before(node):
            padded = module.graph.call_function(padding.target, (node.args[0], *padding.settings))
        node.args = (padded, *node.args[1:])
    module.recompile()


def _quantized_zeros(node: fx.Node) -> fx.Node | None:
    """Return the padding of a quantized convolution's input if a quantizer follows it, or None."""
    axes = CONVOLUTIONS.get(node.target) if node.op == "call_function" else None
    given: Any = node.args[0] if axes else None
    if axes is None or quantizing(given) != "dequantize_per_tensor":
        return None
    quantizer: Any = given.args[0]
    if quantizing(quantizer) != "quantize_per_tensor" or not _is_one_pair(quantizer, given):
        return None
    pad = quantizer.args[0]
    return pad if of_places(zeros_in_program(pad), axes) is not None else None


def zeros_in_program(node: fx.Node) -> tuple[int, ...] | None:
    """Return the same as `optimize.tracing.zero_padding.zeros_around`, for a program's operators."""
    if node.target is _ATEN.pad.default:
        given: tuple[Any, ...] = node.args
        mode, value = (*given, *_DEFAULTS[len(given) - _MODE :])[_MODE:]
    elif node.target is _ATEN.constant_pad_nd.default:
        mode, value = "constant", node.args[_MODE] if len(node.args) > _MODE else 0
    else:
        return None
    sides: Any = node.args[1]
    whole = all(isinstance(side, int) and side >= 0 for side in sides)
    return tuple(sides) if mode == "constant" and value in (None, 0) and whole and not node.kwargs else None


def _is_one_pair(quantizer: fx.Node, dequantizer: fx.Node) -> bool:
    """Tell whether both have the same scale, type and zero point, and the zero point is one of the integers."""
    _, _, zero, low, high, *_ = args = quantizer.args
    assert isinstance(zero, int)
    assert isinstance(low, int)
    assert isinstance(high, int)
    return args[1:6] == dequantizer.args[1:6] and low <= zero <= high


def _is_again(images: fx.Node, given: fx.Node) -> bool:
    """Tell whether images were dequantized from exactly the integers to which they would be quantized."""
    return quantizing(images) == "dequantize_per_tensor" and images.args[1:6] == given.args[1:6]


def _only_layers(pad: fx.Node) -> bool:
    """Tell whether all readers of padding are quantized convolutions."""
    pairs = [(quantizer, given) for quantizer in pad.users for given in quantizer.users]
    if any(quantizing(quantizer) != "quantize_per_tensor" for quantizer in pad.users):
        return False
    return all(
        quantizing(given) == "dequantize_per_tensor" and all(_quantized_zeros(reader) is pad for reader in given.users)
        for _, given in pairs
    )


def _requantized(graph: fx.Graph, images: fx.Node, given: fx.Node) -> fx.Node:
    """Return images without padding, quantized and dequantized like the padded ones."""
    quantizer: Any = given.args[0]
    with graph.inserting_before(quantizer):
        integers = graph.call_function(quantizer.target, (images, *quantizer.args[1:]), dict(quantizer.kwargs))
        again = graph.call_function(given.target, (integers, *given.args[1:]), dict(given.kwargs))  # type: ignore[arg-type]
    if "val" in images.meta:
        with images.meta["val"].fake_mode:
            value_of(again)
    return again


def pad_integers(converted: fx.GraphModule, example: torch.Tensor) -> int:
    """Pad integers where torch.ao (2.11 to 2.14) dequantizes them to pad and quantizes them again, in place.

    Args:
        converted: torch's packed model.
        example: an input, ``float32 (N, C, H, W)``.

    Returns:
        The number of pads changed.
    """
    found = [node for node in converted.graph.nodes if around(converted, node) is not None and _is_dequantized(node)]
    if not found:
        return 0
    parameters = quantized_parameters(converted, example)
    count = 0
    for node in found:
        integers = node.all_input_nodes[0].all_input_nodes[0]
        own = parameters.get(integers)
        if own is None or any(parameters.get(reader) != own for reader in node.users):
            continue
        node.replace_input_with(node.all_input_nodes[0], integers)
        for reader in list(node.users):
            reader.replace_all_uses_with(node)
            converted.graph.erase_node(reader)
        count += 1
    converted.graph.eliminate_dead_code()
    converted.recompile()
    return count


def _is_dequantized(node: fx.Node) -> bool:
    """Tell whether a node reads dequantized integers, and all its readers quantize."""
    (given,) = node.all_input_nodes
    readers = [reader.target for reader in node.users]
    return given.op == "call_method" and given.target == "dequantize" and {*readers} == {torch.quantize_per_tensor}


def embed_padding(converted: fx.GraphModule) -> int:
    """Let packed convolutions with padding that is uneven by one pad evenly, in place. The sums stay the same.

    Torch's kernels only know even padding. The side with one zero less gets that zero, and the kernel gets a row or
    column of zeros there. Measured with torch 2.14 on two cores, a separate pad takes 0.1 to 0.4 ms, more than the
    wider kernel costs. With stride two and 64 to 128 channels of 56 x 56, the pad and a 3 x 3 kernel take 0.54 ms, and
    a 4 x 4 kernel 0.30 ms. A kernel that is wider by two no longer gains (0.64 and 0.79), and the pad stays.

    Args:
        converted: torch's packed model. These layers get their weights packed again.

    Returns:
        The number of layers with wider kernels.
    """
    names = Counter(str(node.target) for node in converted.graph.nodes if node.op == "call_module")
    count = 0
    for node in list(converted.graph.nodes):
        layer: Any = converted.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(layer, _PACKED) or names[str(node.target)] > 1:
            continue
        reader, given = node, node.args[0]
        if given.target is torch.quantize_per_tensor and len(given.users) == 1:
            reader, given = given, given.args[0]
        ends = of_places(around(converted, given), len(layer.kernel_size))
        if ends is None or not _embed(layer, ends):
            continue
        reader.replace_input_with(given, given.all_input_nodes[0])
        count += 1
    converted.graph.eliminate_dead_code()
    converted.recompile()
    return count


def _embed(layer: Any, ends: Sequence[tuple[int, int]]) -> bool:
    """Give a packed convolution the padding, and a wider kernel where it is uneven. False: it cannot be done."""
    axes = len(ends)
    own, dilation = layer.padding[-axes:], layer.dilation[-axes:]
    uneven = [behind - before for before, behind in ends]
    if layer.padding_mode != "zeros" or any(
        abs(more) > (step == 1) for more, step in zip(uneven, dilation, strict=True)
    ):
        return False
    weight, bias = layer._weight_bias()
    integers = weight.int_repr()
    sides = [side for more in reversed(uneven) for side in (max(more, 0), max(-more, 0))]
    wide = functional.pad(integers, sides)
    if any(uneven) and is_misread(layer.in_channels, wide.shape[-1], layer.groups):
        return False
    layer.kernel_size = tuple(wide.shape[2:])
    layer.padding = tuple(side + max(before_behind) for side, before_behind in zip(own, ends, strict=True))
    layer.set_weight_bias(with_integers(weight, wide), bias)
    return True
