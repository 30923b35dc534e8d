"""The second front end: torchao's PT2E inserts quantizers into a program of `torch.export`, guided by our quantizer.

It makes the same decisions as the FX front end (`optimize.quantization.convert`): the same tensors are quantized, by
observers of the same kind with the same range. The result is a reference form as `optimize.quantization.lowering.qdq`
makes it. All later steps are shared. There is no program for torch's packed kernels.

torchao's own quantizer for x86 is not used. It matches by source partitions, which contain all calls of a module. It
fails where a network calls one ReLU twice, as torchvision's ResNets do (torchao 0.18: "Input partition has more than
one output node").
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.ao.quantization.observer import ObserverBase

from optimize.quantization.choices import Chosen
from optimize.quantization.graph.explicit_quantizers import quantizing
from optimize.quantization.graph.nodes import called_module, holds_watcher
from optimize.quantization.lowering.qdq import explicit_form
from optimize.quantization.lowering.uneven_padding import CONVOLUTIONS, zeros_in_program
from optimize.quantization.observer_choice import Observer
from optimize.quantization.placement.between_layers import before_layers, fixed, integers_at
from optimize.quantization.placement.global_pools import GlobalPool
from optimize.quantization.prepared_table import UNOBSERVED_BY_PT2E, Preparing
from optimize.quantization.ranges import Granularity, WeightObserver, cut, weight_observer
from optimize.quantization.targets import Target
from optimize.tracing.aten_program import program_of
from optimize.tracing.constants import attribute
from optimize.tracing.zero_padding import of_places

_ATEN = torch.ops.aten

#: Layers with weights. Transposed convolutions stay in float, as in FX.
_WEIGHTED = frozenset(
    {
        *(getattr(_ATEN, f"conv{rank}d").default for rank in (1, 2, 3)),
        *(getattr(_ATEN, f"conv{rank}d").padding for rank in (1, 2, 3)),
        _ATEN.linear.default,
    }
)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
#: Activations that are fused with the layer in front, so that nothing between them is quantized.
_RELUS = frozenset({_ATEN.relu.default, _ATEN.relu_.default})
_BOUNDED = frozenset(
    {_ATEN.relu6.default, _ATEN.hardtanh.default, _ATEN.hardtanh_.default, _ATEN.clamp.default, _ATEN.clamp_.default}
)
_PAIRS = frozenset({_ATEN.add.Tensor, _ATEN.add_.Tensor, _ATEN.mul.Tensor, _ATEN.mul_.Tensor})
_PRODUCTS = frozenset({_ATEN.matmul.default, _ATEN.bmm.default})
#: Operators that return their input's values, or means of them, in the same scale.
_SAME_SCALE = frozenset(
    {
        *(_ATEN.max_pool2d.default, _ATEN.avg_pool2d.default, _ATEN.adaptive_avg_pool2d.default, _ATEN.mean.dim),
        *(_ATEN.flatten.using_ints, _ATEN.view.default, _ATEN.reshape.default, _ATEN.permute.default),
        *(_ATEN.transpose.int, _ATEN.unsqueeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
        *(_ATEN.contiguous.default, _ATEN.dropout.default, _ATEN.pixel_shuffle.default),
    }
)
_ANNOTATION = "quantization_annotation"


def installed() -> bool:
    """Tell whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


@dataclass(frozen=True)
class Watching:
    """The observers for a program.

    Attributes:
        activation: makes a new observer of an activation, by the observer's name.
        observer: the default observer of activations.
        weight: gives by layer name the rule for the range of its weight, and the number of scales.
        chosen: layers in float, and layers with their own observer.
    """

    activation: Callable[[Observer], ObserverBase]
    observer: Observer
    weight: Callable[[str], tuple[WeightObserver, Granularity]]
    chosen: Chosen


def prepare_program(
    module: fx.GraphModule, watching: Watching, example: torch.Tensor, target: Target
) -> fx.GraphModule:
    """Export a traced network and insert observers, for calibration.

    Args:
        module: see `trace_calls`. It is in eval mode.
        watching: the observers.
        example: an input, ``float32 (N, C, H, W)``, N >= 2. N becomes dynamic.
        target: the target of the kernels. It has packed ones.
    """
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    whole = copy.deepcopy(module)
    UNOBSERVED_BY_PT2E.run(whole, Preparing(example, target))
    _cut_weights(whole, watching, target.weight_max)
    program = program_of(whole, example).module()
    prepared: fx.GraphModule = prepare_pt2e(program, _TargetQuantizer(watching, target.weight_max))
    return prepared


def program_form(prepared: fx.GraphModule, example: torch.Tensor) -> fx.GraphModule:
    """Return the reference form of a calibrated program, with weights folded to int8. See `explicit_form`.

    Args:
        prepared: as `prepare_program` gives it, on the CPU. It is not changed.
        example: an input, ``float32 (N, C, H, W)``, N >= 2.
    """
    form = explicit_form(simulated_program(prepared), example)
    _drop_bounds(form)
    return form


def simulated_program(prepared: fx.GraphModule) -> fx.GraphModule:
    """Return a calibrated program with explicit quantizers: float arithmetic that rounds as its integers will."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    # Weights are folded later, by the code that folds those of the FX front end.
    converted: fx.GraphModule = convert_pt2e(copy.deepcopy(prepared), fold_quantize=False)
    return converted


def watched_layers(prepared: fx.GraphModule) -> Iterator[str]:
    """Yield for each observer the name of the layer whose output it sees, directly or behind an activation.

    The name is '' if no layer computed it.
    """
    seen: set[str] = set()
    for node in prepared.graph.nodes:
        if not holds_watcher(prepared, node) or node.target in seen:
            continue
        seen.add(str(node.target))
        before = node.args[0]
        while _activates(before):
            before = before.args[0]
        if before.op == "call_function":
            yield _module_of(before) if before.target in _WEIGHTED else ""


def weighted_layers(prepared: fx.GraphModule) -> Iterator[str]:
    """Yield the names of the layers whose weights have an observer."""
    for node in prepared.graph.nodes:
        if node.target in _WEIGHTED and holds_watcher(prepared, node.args[1]):
            yield _module_of(node)


def left_in_float(prepared: fx.GraphModule) -> tuple[str, ...]:
    """Return a note of the layers whose weights have no observer, if there are any."""
    left = [
        _module_of(node) or node.name
        for node in prepared.graph.nodes
        if node.target in _WEIGHTED and not holds_watcher(prepared, node.args[1])
    ]
    if not left:
        return ()
    return (f"{len(left)} layers left in float: {', '.join(left[:4])}{' …' if len(left) > 4 else ''}",)


def _cut_weights(module: fx.GraphModule, watching: Watching, most: int) -> None:
    """Clip weights to their ranges, in place, as `choose_weights` does after FX."""
    for node in module.graph.nodes:
        layer = called_module(module, node)
        if isinstance(layer, _LAYERS) and not watching.chosen.in_float(str(node.target)):
            kind, granularity = watching.weight(str(node.target))
            if kind != "minmax":
                layer.weight.data = cut(layer.weight.data, kind, granularity, most)


class _TargetQuantizer:
    """A quantizer for torchao's PT2E, for the integers of a target. It need not derive from torchao's ``Quantizer``.

    It visits each node of the graph once, in order. `_integers` are the nodes whose output is quantized.
    """

    def __init__(self, watching: Watching, most: int) -> None:
        self._watching = watching
        self._most = most
        self._activations: dict[Observer, Any] = {}
        self._integers: set[fx.Node] = set()

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Do nothing: attention was written out in the traced network."""
        return model

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Annotate which inputs of each node are quantized, whether its output is, and how."""
        layers = {node: self._is_quantized(model, node) for node in model.graph.nodes if node.target in _WEIGHTED}
        in_integers = integers_at(model.graph, layers)
        _, early = before_layers(model, lambda node: _has_learned(model, node))
        for node in model.graph.nodes:
            if node.op != "call_function" or node in early or node in self._integers or not in_integers(node):
                continue
            if node.target in _WEIGHTED:
                self._layer(node)
            elif node.target in _PAIRS:
                self._pair(node)
            elif node.target in _PRODUCTS:
                self._annotate(node, dict.fromkeys(node.all_input_nodes, self._activation()))
            elif node.target is _ATEN.cat.default:
                self._joined(node)
            elif (
                (node.target in _SAME_SCALE or _pads(node))
                and node.args[0] in self._integers
                and not _in_global_pool(node)
            ):
                given = node.args[0]
                self._annotate(node, {given: self._activation()}, _shared(given, node))
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Do nothing: the result is linted."""

    def prepare_obs_or_fq_callback(self, model: fx.GraphModule, watchers: Mapping[Any, nn.Module]) -> None:
        """Do nothing: the observers are right as they are."""

    def _is_quantized(self, model: fx.GraphModule, node: fx.Node) -> bool:
        """Tell whether a layer is quantized: it has a learned weight and was not chosen to stay in float."""
        weight: Any = node.args[1]
        own = weight.op == "get_attr" and _has_learned(model, node)
        return own and not self._watching.chosen.in_float(_module_of(node))

    def _layer(self, node: fx.Node) -> None:
        """Annotate a layer with its activation: input, weight and the activation's output."""
        name = _module_of(node)
        _, granularity = self._watching.weight(name)  # for weights that were not clipped
        weight = _spec(weight_observer("minmax", granularity, -self._most, self._most))
        inputs = {node.args[0]: self._activation(), node.args[1]: weight}
        self._with_activation(node, inputs, self._activation(self._watching.chosen.observer(name)))

    def _pair(self, node: fx.Node) -> None:
        """Annotate a sum or a product of two activations, if one of them is quantized already."""
        inputs = node.all_input_nodes
        constant = any(given.op == "get_attr" for given in inputs)
        if len(inputs) != 2 or constant or node.kwargs or not any(given in self._integers for given in inputs):
            return
        self._with_activation(node, dict.fromkeys(inputs, self._activation()), self._activation())

    def _joined(self, node: fx.Node) -> None:
        """Annotate a concatenation: all of it has one scale."""
        first, *others = node.all_input_nodes
        if all(given in self._integers for given in (first, *others)):
            shared = _shared(first, node)
            self._annotate(node, {first: self._activation(), **dict.fromkeys(others, shared)}, shared)

    def _with_activation(self, node: fx.Node, inputs: Mapping[Any, Any], output: Any) -> None:
        last = node
        while (behind := _only_reader(last)) is not None and _activates(behind):
            last = behind
        if last is node:
            self._annotate(node, inputs, output)
        else:
            self._annotate(node, inputs)
            self._annotate(last, {}, output)

    def _annotate(self, node: fx.Node, inputs: Mapping[Any, Any], output: Any = None) -> None:
        from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

        node.meta[_ANNOTATION] = QuantizationAnnotation(dict(inputs), output, _annotated=True)
        if output is not None:
            self._integers.add(node)

    def _activation(self, name: Observer | None = None) -> Any:
        wanted = name or self._watching.observer
        if wanted not in self._activations:
            self._activations[wanted] = _spec(lambda: self._watching.activation(wanted))
        return self._activations[wanted]


def _pads(node: fx.Node) -> bool:
    """Tell whether a node is zero padding that only convolutions read. FX gives it the scale of its input, too."""
    zeros, readers = zeros_in_program(node), [reader.target for reader in node.users]
    return bool(readers) and all(
        reader in CONVOLUTIONS and of_places(zeros, CONVOLUTIONS[reader]) is not None for reader in readers
    )


def _spec(make: Callable[[], ObserverBase]) -> Any:
    """Return torchao's specification for a tensor with new observers of this kind."""
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    kind: Any = make()
    per_channel = kind.qscheme in (torch.per_channel_symmetric, torch.per_channel_affine)
    return QuantizationSpec(
        dtype=torch.uint8 if kind.dtype is torch.quint8 else torch.int8,
        observer_or_fake_quant_ctr=_Maker(make),
        quant_min=kind.quant_min,
        quant_max=kind.quant_max,
        qscheme=kind.qscheme,
        ch_axis=0 if per_channel else None,
    )


class _Maker:
    """The factory that torchao calls for a new observer. Its arguments are known already."""

    __name__ = "observer"  # torchao recognises per-channel observers by this name

    def __init__(self, make: Callable[[], ObserverBase]) -> None:
        self._make = make

    def with_args(self, **_: Any) -> Callable[[], nn.Module]:
        """As of torchao's observers."""
        return lambda: _watcher(self._make())


def _watcher(observer: Any) -> nn.Module:
    """Wrap an observer of torch.ao in a class that torchao (0.18) accepts: one with its own base class."""
    from torchao.quantization.pt2e.observer import ObserverBase as Base

    class Watcher(Base):  # type: ignore[misc]  # torchao brings no types
        def __init__(self) -> None:
            super().__init__(observer.dtype)
            self.observer = observer
            self.qscheme, self.ch_axis = observer.qscheme, getattr(observer, "ch_axis", 0)
            self.quant_min, self.quant_max = observer.quant_min, observer.quant_max

        def forward(self, seen: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.observer(seen)
            return found

        def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
            scale, zero_point = self.observer.calculate_qparams()
            return scale, zero_point

    return Watcher()


def _shared(given: fx.Node, node: fx.Node) -> Any:
    from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

    return SharedQuantizationSpec((given, node))


def _has_learned(model: fx.GraphModule, node: fx.Node) -> bool:
    """Tell the same as `learned` in a program, where a layer is an operator and its weights are inputs."""
    inputs = node.all_input_nodes
    weights = [given for given in inputs if given.op == "get_attr"]
    if any(isinstance(attribute(model, str(weight.target)), nn.Parameter) for weight in weights):
        return True
    return node.target in _PRODUCTS and not any(fixed(model, given) for given in inputs)


def _module_of(node: fx.Node) -> str:
    """Return the module of the traced network that computed a node, or '' if there is none."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _in_global_pool(node: fx.Node) -> bool:
    """Tell whether a node belongs to the pool that stays in float.

    See `optimize.quantization.placement.global_pools`.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return any(GlobalPool.__name__ in str(kind) for _, kind in stack.values())


def _only_reader(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activates(node: fx.Node) -> bool:
    """Tell whether a node is a ReLU, without a bound, with one bound, or with one for each channel as in `equalize`."""
    if node.target in _RELUS:
        return True
    if node.target is _ATEN.minimum.default:
        return isinstance(node.args[1], fx.Node) and node.args[1].op == "get_attr"
    return node.target in _BOUNDED and _bounds(node) is not None


def _bounds(node: fx.Node) -> float | None:
    """Return the upper bound of a ReLU6, or of a clamp that starts at 0."""
    if node.target is _ATEN.relu6.default:
        return 6.0
    low, high = [*node.args[1:], *node.kwargs.values(), None, None][:2]
    return float(high) if low == 0 and isinstance(high, int | float) else None


def _drop_bounds(form: fx.GraphModule) -> None:
    """Write a ReLU for each ReLU6 whose bound is the end of the integers behind it, in place. They are equal then.

    `optimize.quantization.placement.relu6` does the same before FX, so that engines fuse it with the layer.
    """
    for node in list(form.graph.nodes):
        if node.target not in _BOUNDED or (bound := _bounds(node)) is None:
            continue
        if not all(_ends(user, bound) for user in node.users):
            continue
        with form.graph.inserting_before(node):
            node.replace_all_uses_with(form.graph.call_function(_ATEN.relu.default, (node.args[0],)))
        form.graph.erase_node(node)
    form.recompile()


def _ends(node: fx.Node, bound: float) -> bool:
    """Tell whether a quantizer gives its largest integer for the bound, and thus for all values above it."""
    if quantizing(node) != "quantize_per_tensor":
        return False
    _, scale, zero_point, _, high, _ = node.args
    assert isinstance(scale, float)
    assert isinstance(zero_point, int)
    assert isinstance(high, int)
    return bound == math.inf or round(bound / scale) + zero_point >= high
