"""Rounds biases to multiples of their products' scale, so that every engine adds the same.

A product of integers has the scale ``input × weight``, and integer kernels sum products in int32. ONNX Runtime (1.31)
rounds a float bias to the integers of such a sum. Torch and OpenVINO add it in float. So the network's own biases are
rounded once, and no engine has anything left to round. That changes them by at most half a product's scale, the finest
difference that the layer's integers can make.

Pruning or a norm can leave a channel with tiny weights beside its bias. Its products then have so fine a scale that its
bias does not fit into 32 bits. ONNX Runtime wraps it around, and answers with the other end of the range. Such weights
get a coarser scale, as in TensorFlow Lite's and ONNX Runtime's own quantizers (microsoft/onnxruntime pull request
22020). They lose about a 2^30th of the bias.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from torch import fx

from optimize.export.sparsity import packed_kind, unpacked
from optimize.tracing.constants import constant_value

_ATEN = torch.ops.aten
_OPS = torch.ops.quantized

#: Layers whose bias is their third argument.
WEIGHTED = frozenset(
    {
        *(getattr(_ATEN, f"conv{rank}d").default for rank in (1, 2, 3)),
        *(getattr(_ATEN, f"conv{rank}d").padding for rank in (1, 2, 3)),
        _ATEN.linear.default,
    }
)

_INPUT = torch.ops.quantized_decomposed.dequantize_per_tensor
_WEIGHT = torch.ops.quantized_decomposed.dequantize_per_channel

#: The largest bias, in integers: half of the range of 32 bits. The sum of products has the other half.
MOST = 1 << 30


@dataclass(frozen=True)
class Weighted:
    """Weight and bias of a layer: it multiplies by ``weight × scales[channel]``, and adds ``bias``.

    Attributes:
        weight: ``int8``, output channels first.
        scales: ``(C,)``.
        bias: ``(C,)``, multiples of the products' scale, as floats.
        widened: whether the weights of any channel got another scale.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor
    widened: bool


_PADS = (torch.ops.aten.pad.default, torch.ops.aten.constant_pad_nd.default)

#: Layers by the former integers and scales of their weights. Equal ones are in the program's order.
Layers = Mapping[bytes, deque[Weighted]]


def dequantizers(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the dequantizers of input and weight of a layer with a bias. None: another node, or a float layer."""
    if node.target not in WEIGHTED or len(node.args) < 3 or node.args[2] is None:
        return None
    given, weight = node.args[:2]
    if isinstance(given, fx.Node) and given.target in _PADS:  # zero padding, whose products are 0
        given = given.args[0]
    if not isinstance(given, fx.Node) or not isinstance(weight, fx.Node):
        return None
    return (given, weight) if _packet(given) is _INPUT and _packet(weight) is _WEIGHT else None


def round_biases(module: fx.GraphModule) -> Layers:
    """Round the biases of a reference form (see `optimize.quantization.lowering.qdq`), in place, as new constants.

    Returns:
        The new weights and biases of these layers, for `repack`.
    """
    layers: defaultdict[bytes, deque[Weighted]] = defaultdict(deque)
    for number, (node, given, dequantized) in enumerate(_layers(module.graph)):
        scale, bias = given.args[1], node.args[2]
        if not isinstance(bias, fx.Node) or bias.op != "get_attr":
            continue
        assert isinstance(scale, float)
        weight, scales = (constant_value(module, argument) for argument in dequantized.args[:2])
        now = whole(weight, scales, constant_value(module, bias), scale)
        layers[_digest(weight, scales)].append(now)
        with module.graph.inserting_before(node):
            # Constants of this layer alone: another layer may add the same bias to products of another scale.
            node.update_arg(2, _constant(module, f"whole_bias_{number}", now.bias))
            if now.widened:
                wide = (
                    _constant(module, f"wide_weight_{number}", now.weight),
                    _constant(module, f"wide_scale_{number}", now.scales),
                )
                assert callable(dequantized.target)
                settings = (*wide, *dequantized.args[2:])
                node.update_arg(1, module.graph.call_function(dequantized.target, settings, dict(dequantized.kwargs)))
    module.graph.eliminate_dead_code()
    module.recompile()
    return layers


def _layers(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """Return every layer with a bias whose input and weight are integers, with their dequantizers."""
    return [(node, *found) for node in graph.nodes if (found := dequantizers(node))]


def whole(weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, given: float) -> Weighted:
    """Return a layer whose bias is rounded to integers of its products' scale, at most `MOST`.

    Args:
        weight: ``int8``, output channels first.
        scales: ``(C,)``.
        bias: ``(C,)``, floats.
        given: scale of the layer's input.
    """
    step = torch.tensor(given, dtype=torch.float32).double()
    own = bias.detach().double()
    least = (own.abs() / (step * MOST)).to(scales.dtype)
    narrow = scales < least
    now = torch.where(narrow, least, scales)
    ratio = (scales.double() / now.double()).reshape(-1, *(1,) * (weight.dim() - 1))
    integers = (weight.double() * ratio).round().to(weight.dtype)
    products = step * now.double()
    return Weighted(integers, now, ((own / products).round() * products).to(bias.dtype), bool(narrow.any()))


def repack(converted: fx.GraphModule, layers: Layers) -> int:
    """Give packed layers the weights and biases of the reference form, and return the number of layers.

    Args:
        converted: torch's packed model, made from the same prepared model. Its layers get their weights packed again.
        layers: the result of `round_biases`.
    """
    waiting = {digest: deque(equal) for digest, equal in layers.items()}
    count = 0
    for owner, name, packed in packed_layers(converted):
        weight, own = weight_bias(packed)
        if own is None or weight.qscheme() != torch.per_channel_affine:
            continue
        equal = waiting.get(_digest(weight.int_repr(), weight.q_per_channel_scales()))
        if not equal:
            continue
        now = equal.popleft()
        if now.widened:
            zeros, axis = weight.q_per_channel_zero_points(), weight.q_per_channel_axis()
            weight = torch._make_per_channel_quantized_tensor(now.weight, now.scales, zeros, axis)
        put_back(owner, name, packed, weight, now.bias)
        count += 1
    return count


def packed_layers(converted: fx.GraphModule) -> Iterator[tuple[Any, str, Any]]:
    """Yield packed layers in the graph's order: owner, name and packed value.

    For a module, the name is '' and the value is ``(weight, bias)``. For a constant, they are its own.
    """
    seen: set[str] = set()
    for node in converted.graph.nodes:
        if node.op not in ("call_module", "get_attr") or str(node.target) in seen:
            continue
        seen.add(str(node.target))
        if node.op == "call_module":
            layer: Any = converted.get_submodule(str(node.target))
            if callable(getattr(layer, "_weight_bias", None)):
                yield layer, "", layer._weight_bias()
            continue
        path, _, name = str(node.target).rpartition(".")
        owner = converted.get_submodule(path)
        if isinstance(getattr(owner, name), torch.ScriptObject):
            yield owner, name, getattr(owner, name)


def weight_bias(packed: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of a packed layer, from a value of `packed_layers`."""
    return unpacked(packed) if isinstance(packed, torch.ScriptObject) else packed


def put_back(
    owner: Any, name: str, packed: Any, weight: torch.Tensor, bias: torch.Tensor | None, *, groups: int | None = None
) -> None:
    """Give a packed layer of `packed_layers` another weight and bias.

    ``groups`` also changes the number of groups, unless it is None.
    """
    if not name:
        if groups is not None:
            owner.groups = groups
        owner.set_weight_bias(weight, bias)
        return
    kind = packed_kind(packed)
    settings = () if kind == "linear" else ("stride", "padding", "dilation", "groups")
    values = [getattr(_OPS, f"{kind}_{setting}")(packed) for setting in settings]
    if groups is not None:
        values[-1] = groups
    setattr(owner, name, getattr(_OPS, f"{kind}_prepack")(weight, bias, *values))


def with_integers(weight: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
    """Return a quantized weight with other integers and the same scales, per output channel or per tensor."""
    if weight.qscheme() == torch.per_tensor_affine:
        return torch._make_per_tensor_quantized_tensor(integers, weight.q_scale(), weight.q_zero_point())
    zeros, axis = weight.q_per_channel_zero_points(), weight.q_per_channel_axis()
    return torch._make_per_channel_quantized_tensor(integers, weight.q_per_channel_scales(), zeros, axis)


def _constant(module: fx.GraphModule, name: str, value: torch.Tensor) -> fx.Node:
    module.register_buffer(name, value)
    return module.graph.get_attr(name)


def _packet(node: Any) -> Any:
    target = node.target if isinstance(node, fx.Node) else None
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else None


def _digest(integers: torch.Tensor, scales: torch.Tensor) -> bytes:
    return integers.contiguous().numpy().tobytes() + scales.float().numpy().tobytes()
