"""Subclasses of torch's layers from other libraries, rewritten as torch's own layers that can be folded.

timm's `BatchNormAct2d` is a batch norm with an activation inside. Its `StdConv2d` is a convolution with a computed
weight. `fuse` and torch.ao know neither. In a trace both are function calls on constants. They are written as torch
modules again, with the same numbers in eval mode.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from optimize.tracing.constants import NotConstantError, constant_value
from optimize.tracing.proxies import SpokenFor, without_proxies

_OWN = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    nn.Linear,
)
#: The functions that layers call, with torch's class for each.
_CONVOLUTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    functional.conv1d: nn.Conv1d,
    functional.conv2d: nn.Conv2d,
    functional.conv3d: nn.Conv3d,
}
_CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONVOLUTION_DEFAULTS = (None, None, None, 1, 0, 1, 1)


#: Layers of torch that consist of other layers of torch.
OF_LAYERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


class LayerProxy(SpokenFor):
    """A value in the graph about which nothing is known."""

    def stands_for(self, asks: str) -> type:
        """See `SpokenFor`. Only torch's own code may ask, because it knows proxies.

        Raises:
            TraceError: other code asks. The answer "no tensor" would silently send it down another branch.
        """
        if not asks.startswith("torch."):
            raise TraceError("it checks the type of a tensor")
        return type(self)

    @property
    def device(self) -> fx.proxy.Attribute:
        """As of a tensor."""
        return LayerDevice(self, "device")


class LayerDevice(fx.proxy.Attribute):
    """A tensor's device in the graph, about which nothing is known."""

    @property
    def index(self) -> Any:
        """As of a device.

        Raises:
            TraceError: always. The index may be None, and a proxy never is. A forward would silently take another
                branch.
        """
        raise TraceError("it checks the device of a tensor")

    def __str__(self) -> str:
        """As of a device.

        Raises:
            TraceError: always, for the same reason as `index`.
        """
        raise TraceError("it checks the device of a tensor")


class LayerTracer(fx.Tracer):
    """Traces into subclasses of torch's layers where that is possible, and keeps the others as one call.

    A forward runs on a proxy of its first input, the images. Every other input takes its default, such as timm's
    ``attn_mask=None``. A proxy in its place is not None, and would silently send a forward down another branch.

    Args:
        whole: whether torch's transformers also stay one call.
        kept: names of modules that always stay one call.

    Attributes:
        failed: name of the innermost module in which tracing failed. None: only the network itself failed.
    """

    def __init__(self, whole: bool = False, kept: Container[str] = ()) -> None:
        super().__init__()
        self.whole, self.kept = whole, kept
        self.failed: str | None = None

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """See `fx.Tracer`. Tracing runs without gradients.

        A function with its own gradient saves proxies for the backward pass, and C code would expect tensors there.
        """
        with torch.no_grad():
            return super().trace(root, concrete_args)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """See `fx.Tracer`."""
        parameters = inspect.signature(inspect.unwrap(root_fn)).parameters
        function, arguments = super().create_args_for_root(root_fn, is_module, concrete_args)
        images, *others = (node for node in self.graph.nodes if node.op == "placeholder")
        images.args = ()
        settled: dict[fx.Node, Any] = {}
        for node in others:
            if (default := _default(parameters, str(node.target))) is not inspect.Parameter.empty:
                settled[node] = default
                self.graph.erase_node(node)
        return function, [
            settled.get(argument.node, argument) if isinstance(argument, fx.Proxy) else argument
            for argument in arguments
        ]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """See `fx.Tracer`."""
        return LayerProxy(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `fx.Tracer`. A layer that the forward creates, ``nn.Softmax(dim=1)(x)``, is traced into.

        Raises:
            TraceError: the layer is TorchScript.
        """
        if isinstance(m, torch.jit.ScriptModule):
            raise TraceError("one of its layers is TorchScript, whose Python source is not available")
        try:
            name = self.path_of_module(m)
        except NameError:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or name
            raise

    def is_leaf_module(self, layer: nn.Module, name: str) -> bool:
        """See `fx.Tracer`. Torch's transformers are traced into by default, down to their layers."""
        if type(layer) in OF_LAYERS:
            return self.whole
        if name in self.kept or super().is_leaf_module(layer, name):
            return True
        return isinstance(layer, _OWN) and (plain_type(layer) is not None or not _traceable(layer))


def _default(parameters: Mapping[str, inspect.Parameter], name: str) -> Any:
    """Return the value of an input that is not given. ``*args`` and ``**kwargs`` are empty."""
    if name.startswith("*"):
        return {} if name.startswith("**") else ()
    return parameters[name].default


def plain_type(layer: nn.Module) -> type[nn.Module] | None:
    """Return the torch class that computes the same as ``layer``, an instance of a subclass; None if there is none."""
    for own in _OWN:
        if isinstance(layer, own) and type(layer) is not own:
            methods = ("forward", "_conv_forward", "__call__")
            if any(getattr(type(layer), name, None) is not getattr(own, name, None) for name in methods):
                return None
            # A computed (parametrised) weight and a hook's work are not in the code of the class.
            return None if layer._modules or is_hooked(layer) else own
    return None


def as_plain_layers(graph_module: fx.GraphModule) -> None:
    """Write subclasses of torch's layers as torch's own where they compute the same in eval mode.

    Args:
        graph_module: traced by `LayerTracer` in eval mode. Changed in place. Its tensors stay unchanged.
    """
    for node in list(graph_module.graph.nodes):
        if node.op == "call_module":
            layer = graph_module.get_submodule(str(node.target))
            # Norms have an identity in place of a dropout. It would separate the norm from its activation.
            if type(layer) is nn.Identity and not is_hooked(layer):
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph_module.graph.erase_node(node)
            elif (own := plain_type(layer)) is not None:
                graph_module.set_submodule(str(node.target), _retyped(layer, own))
    _drop_assertions(graph_module.graph)
    for node in list(graph_module.graph.nodes):
        if node.op == "call_function":
            if node.target in _CONVOLUTIONS:
                _lift(graph_module, node, as_convolution)
            elif node.target is functional.batch_norm:
                _lift(graph_module, node, _norm)
    graph_module.delete_all_unused_submodules()
    graph_module.graph.lint()
    graph_module.recompile()


def is_hooked(layer: nn.Module) -> bool:
    """Tell whether a hook may change the inputs or outputs of a layer."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks)


def _traceable(layer: nn.Module) -> bool:
    """Tell whether a layer can be traced. The patches of `optimize.tracing.trace` are active here."""
    try:
        with without_proxies(layer):
            fx.Tracer.trace(LayerTracer(), layer)
    except Exception:  # noqa: BLE001 - a forward on proxies may raise anything
        return False
    return True


_L = TypeVar("_L", bound=nn.Module)


def _retyped(layer: nn.Module, own: type[_L]) -> _L:
    """Return a layer of class ``own`` with the tensors and settings of ``layer``."""
    twin: Any = copy.copy(layer)
    for name in ("_parameters", "_buffers", "_modules"):
        setattr(twin, name, dict(getattr(layer, name)))
    twin.__class__ = own
    return twin  # type: ignore[no-any-return]


def _drop_assertions(graph: fx.Graph) -> None:
    """Remove shape checks. They would be further readers of a convolution's output, beside the norm."""
    for node in list(graph.nodes):
        if node.target is torch._assert:
            graph.erase_node(node)
    for node in reversed(graph.nodes):
        if not node.users and node.target in (getattr, operator.eq, operator.getitem, "dim", "size"):
            graph.erase_node(node)


def _lift(
    graph_module: fx.GraphModule, node: fx.Node, build: Callable[[fx.GraphModule, fx.Node], nn.Module | None]
) -> None:
    """Replace a function's call by a module that computes the same, if its arguments are constants."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack or not (inspect.isclass(stack[-1][1]) and issubclass(stack[-1][1], _OWN)):
        return  # the model calls the function itself, and may share the weights
    path = stack[-1][0]
    try:
        with torch.no_grad():
            layer = build(graph_module, node)
    except NotConstantError:
        return
    if layer is None:
        return
    name = f"{path}.{'norm' if isinstance(layer, _BatchNorm) else 'convolution'}"
    if any(name == other for other, _ in graph_module.named_modules()):
        return  # this is a second call
    graph_module.add_submodule(name, layer.eval())
    read = node.args[0] if node.args else node.kwargs["input"]
    with graph_module.graph.inserting_before(node):
        node.replace_all_uses_with(graph_module.graph.call_module(name, (read,)))
    _erase(graph_module, node)


def _erase(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Erase a node, the constants that only it used, and the tensors that nobody reads afterwards."""
    graph = graph_module.graph
    waiting = [node]
    before: set[fx.Node] = set()
    while waiting:
        inputs = [used for used in waiting.pop().all_input_nodes if used.op != "placeholder" and used not in before]
        before.update(inputs)
        waiting += inputs
    graph.erase_node(node)
    for used in reversed(list(graph.nodes)):
        if used not in before or used.users or used.op == "call_module":
            continue
        graph.erase_node(used)
        if used.op == "get_attr" and all(other.target != used.target for other in graph.nodes):
            owner, _, leaf = str(used.target).rpartition(".")
            delattr(graph_module.get_submodule(owner), leaf)


def _constant(graph_module: fx.GraphModule, argument: Any) -> Any:
    # The output of a module does not count: it may have a state, as spectral norm has in training.
    return constant_value(graph_module, argument, layers=False)


def as_convolution(graph_module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """Return a functional convolution with constant weights as a layer, or None if the function is no convolution.

    Raises:
        NotConstantError: its weight depends on the images.
    """
    if node.target not in _CONVOLUTIONS:
        return None
    values: dict[str, Any] = dict(zip(_CONVOLUTION_ARGUMENTS, _CONVOLUTION_DEFAULTS, strict=True))
    given = {**dict(zip(_CONVOLUTION_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    values.update({name: _constant(graph_module, value) for name, value in given.items() if name != "input"})
    weight, bias = values.pop("weight"), values.pop("bias")
    values.pop("input")
    assert callable(node.target)
    layer: Any = _CONVOLUTIONS[node.target](
        weight.shape[1] * values["groups"], weight.shape[0], tuple(weight.shape[2:]), bias=bias is not None, **values
    )
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer  # type: ignore[no-any-return]


def _norm(graph_module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    call = inspect.signature(functional.batch_norm).bind(*node.args, **node.kwargs)
    call.apply_defaults()
    values = {name: _constant(graph_module, value) for name, value in call.arguments.items() if name != "input"}
    if values["training"] or values["running_mean"] is None:
        return None
    (_, kind) = list(node.meta["nn_module_stack"].values())[-1]
    own: Any = next((own for own in _OWN if issubclass(kind, own) and issubclass(own, _BatchNorm)), None)
    if own is None:
        return None
    affine = values["weight"] is not None
    layer: Any = own(len(values["running_mean"]), values["eps"], values["momentum"], affine=affine)
    layer.running_mean, layer.running_var = (values[name].detach().clone() for name in ("running_mean", "running_var"))
    if affine:
        layer.weight = nn.Parameter(values["weight"].detach().clone())
        bias = values["bias"]
        layer.bias = nn.Parameter(torch.zeros_like(layer.weight) if bias is None else bias.detach().clone())
    return layer  # type: ignore[no-any-return]


def left_whole(graph_module: fx.GraphModule) -> list[type[nn.Module]]:
    """Return the classes of layers that could be neither traced nor written as torch's own, sorted by name."""
    called = (node.target for node in graph_module.graph.nodes if node.op == "call_module")
    kinds = {type(graph_module.get_submodule(str(target))) for target in called}
    foreign = {kind for kind in kinds if kind is nn.Sequential or kind.__module__.partition(".")[0] != "torch"}
    return sorted(foreign, key=lambda kind: kind.__qualname__)
