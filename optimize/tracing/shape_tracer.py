"""Traces a forward that computes with sizes or branches on them. All sizes but the batch size become numbers.

torch.fx gives a proxy for ``x.shape[-1]``. A forward cannot branch on it, count with it, or pass it where an integer is
needed. An artifact takes images of one size, so every size that does not depend on the batch is known. The forward runs
on three batches while it is traced, and sizes that are equal in all three become numbers.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from optimize.tracing.constants import attribute
from optimize.tracing.foreign_layers import LayerTracer
from optimize.tracing.proxies import SpokenFor, taken_by_torch
from optimize.tracing.slice_writes import in_its_memory, written

#: Sizes of the batches. The single image is last: some networks cannot take it, and are traced with the other two.
_BATCHES = (2, 3, 1)
#: Properties of a tensor that do not depend on its values.
_ASKED_OF_TENSORS = (
    "shape",
    "size",
    "ndim",
    "dim",
    "numel",
    "dtype",
    "is_floating_point",
    "is_cuda",
    "is_nested",
    "requires_grad",
)


class Shape(tuple[Any, ...]):
    """A tensor's shape: integers, and proxies for sizes that depend on the batch."""

    __slots__ = ()

    def __getitem__(self, which: Any) -> Any:
        """Return one size, or several as a shape."""
        found = super().__getitem__(which)
        return Shape(found) if isinstance(which, slice) else found

    def numel(self) -> Any:
        """Return the number of elements of a tensor of this shape."""
        return math.prod(self)


class ShapedProxy(SpokenFor):
    """A value in the graph whose sizes are integers where they do not depend on the batch."""

    tracer: ShapedTracer
    _is_param = _is_buffer = False  # torch reads these on every tensor

    def stands_for(self, asks: str) -> type:
        """See `SpokenFor`: a tensor, if the node gives one."""
        return torch.Tensor if self.tracer.is_tensor(self.node) else type(self)

    @property
    def device(self) -> fx.proxy.Attribute:
        """As of a tensor. Only the kind is known, because the graph may run on another device."""
        return Device(self, "device")

    def get_device(self) -> int:
        """As of a tensor on a CPU."""
        return -1

    @property
    def shape(self) -> Any:
        """As of a tensor."""
        found = self.tracer.found(self.node)
        if not isinstance(found[0], torch.Tensor) or not _alike(found, torch.Tensor.dim):
            return super().__getattr__("shape")
        return Shape(
            sizes[0] if len(set(sizes)) == 1 else self.tracer.create_proxy("call_method", "size", (self, axis), {})
            for axis, sizes in enumerate(zip(*(value.shape for value in found), strict=True))
        )

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def found_dtype(self) -> torch.dtype:
        """The dtype with the example. The graph may run in another one, which ``dtype`` reads at run time."""
        dtype: torch.dtype = self.tracer.found(self.node)[0].dtype
        return dtype

    @property
    def ndim(self) -> Any:
        """As of a tensor."""
        return self.dim()

    def dim(self) -> Any:
        """As of a tensor."""
        found = self.tracer.found(self.node)
        if isinstance(found[0], torch.Tensor) and _alike(found, torch.Tensor.dim):
            return found[0].dim()
        return self.tracer.create_proxy("call_method", "dim", (self,), {})

    def __len__(self) -> int:
        """As of a tensor, if the length does not depend on the batch."""
        found = self.tracer.found(self.node)
        if isinstance(found[0], torch.Tensor | tuple | list) and _alike(found, len):
            return len(found[0])
        return int(super().__len__())

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the tuple that a call returned, or over a tensor's rows."""
        found = self.tracer.found(self.node)
        if isinstance(found[0], torch.Tensor | tuple | list) and _alike(found, len):
            return iter(
                [
                    self.tracer.create_proxy("call_function", operator.getitem, (self, index), {})
                    for index in range(len(found[0]))
                ]
            )
        return super().__iter__()

    def __int__(self) -> int:
        """Return a size, or a number computed from sizes, if it does not depend on the batch."""
        return int(self.tracer.number(self))

    def __float__(self) -> float:
        """See `__int__`."""
        return float(self.tracer.number(self))

    def __setitem__(self, which: Any, value: Any) -> None:
        """As of a tensor. From here on the proxy stands for the tensor with the value written to it."""
        self.node = self.tracer.write(self, which, value)


class Device(fx.proxy.Attribute):
    """A tensor's device in the graph. A forward that asks for its kind hears that it is a CPU."""

    type, index = "cpu", None

    def __eq__(self, other: object) -> bool:
        """As of a CPU device. All devices in the graph are equal to it."""
        return isinstance(other, Device) or torch.device("cpu") == other

    def __ne__(self, other: object) -> bool:
        """See `__eq__`."""
        return not self == other

    __hash__ = fx.proxy.Attribute.__hash__

    def __str__(self) -> str:
        """As of a device."""
        return self.type


class ShapedTracer(LayerTracer):
    """Traces a forward with known sizes, see the module.

    Args:
        example: an input ``(N, C, H, W)``. Only its shape and dtype matter.
        whole: see `LayerTracer`.
        kept: see `LayerTracer`.
    """

    def __init__(self, example: torch.Tensor, whole: bool = False, kept: Container[str] = ()) -> None:
        super().__init__(whole, kept)
        self._batches = tuple(example[:1].repeat(count, *[1] * (example.dim() - 1)) for count in _BATCHES)
        self._found: dict[fx.Node, tuple[Any, ...]] = {}
        self._runs = len(_BATCHES)  # number of batches for which values are known
        self._twin: nn.Module | None = None
        self._running = False
        self._overwritten: set[fx.Node] = set()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """See `fx.Tracer`."""
        self._twin = copy.deepcopy(root).eval()  # in training mode, norms would update their statistics
        with taken_by_torch():
            traced = super().trace(root, concrete_args)
        # A pickled graph module is traced again by its graph's tracer class, which then has no example and needs none.
        graph = fx.Graph(tracer_cls=LayerTracer)
        graph.output(graph.graph_copy(traced, {}))
        return graph

    def found(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the values of a node, one for each batch."""
        if node not in self._found and node.op == "get_attr":
            assert isinstance(self.root, nn.Module)
            with self._aside():
                value = attribute(self.root, str(node.target))
            self._found[node] = (value,) * len(_BATCHES)
        return self._found[node][: self._runs]

    def is_tensor(self, node: fx.Node) -> bool:
        """Tell whether a node is known to give a tensor."""
        return node.op == "get_attr" or isinstance(self._found.get(node, (None,))[0], torch.Tensor)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """See `fx.Tracer`."""
        return ShapedProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """See `fx.Tracer`."""
        if isinstance(a, fx.Proxy):
            return a.node  # before anything asks whether it is a tensor
        return super().create_arg(tuple(a) if isinstance(a, Shape) else a)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        """See `fx.Tracer`.

        Raises:
            TraceError: the node reads a tensor by an old name after it was written to, and would get the old values.
        """
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        if not self._overwritten.isdisjoint(node.all_input_nodes):
            raise TraceError("it writes into a tensor and reads it through another name")
        return node

    def write(self, tensor: ShapedProxy, which: Any, value: Any) -> fx.Node:
        """Return the node of ``tensor`` after ``tensor[which] = value``.

        Other tensors in the same memory have changed too, but not in the graph. From here on, reading them is an error.

        Raises:
            TraceError: the write is no concatenation, see `written`.
        """
        found = self.found(tensor.node)
        if not isinstance(found[0], torch.Tensor):
            raise TraceError("it writes into something that is not a tensor")
        new: fx.Node = written(tensor, which, value, self._asked).node  # type: ignore[arg-type, attr-defined]
        changed = in_its_memory(found[0], ((node, values[0]) for node, values in self._found.items()))
        self._overwritten |= changed - {new}
        return new

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        """See `fx.Tracer`."""
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        node = proxy.node
        if node.op == "placeholder":
            self._found[node] = tuple(batch.clone() for batch in self._batches)
        elif node.op != "get_attr":
            with self._aside(), torch.no_grad():
                self._found[node] = tuple(self._each(node))
        return proxy

    def _each(self, node: fx.Node) -> Iterator[Any]:
        """Yield the values of a node for each batch. The single image is left out if the network cannot take it."""
        for which in range(self._runs):
            try:
                yield self._computed(node, which)
            except Exception:  # a forward may raise anything
                if _BATCHES[which] > 1:
                    raise
                self._runs = which

    def _asked(self, value: Any) -> tuple[Any, ...]:
        return self.found(value.node) if isinstance(value, fx.Proxy) else (value,) * self._runs

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Mark calls that run beside the tracing. They go through modules that report to this tracer."""
        before, self._running = self._running, True
        try:
            yield
        finally:
            self._running = before

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `fx.Tracer`."""
        return forward(*args, **kwargs) if self._running else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """See `fx.Tracer`."""
        return attr_val if self._running else super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """See `fx.Tracer`. A branch may depend on sizes, but not on the values of a tensor."""
        return bool(self.number(obj, "symbolically traced variables cannot be used as inputs to control flow"))

    def number(
        self, proxy: fx.Proxy, otherwise: str = "it converts a value to a number that differs between images"
    ) -> Any:
        """Return a number that is the same for all batches and does not depend on the values of the images.

        Raises:
            TraceError: there is no such number. Its message is ``otherwise``.
        """
        values = self.found(proxy.node)
        if isinstance(values[0], bool | int | float) and _alike(values) and self._known(proxy.node):
            return values[0]
        raise TraceError(otherwise)

    def _computed(self, node: fx.Node, which: int) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda used: self.found(used)[which])
        if node.op == "output":
            return None
        if node.op == "call_module":
            assert self._twin is not None
            return self._twin.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        called: Callable[..., Any] = node.target  # type: ignore[assignment]
        return called(*args, **kwargs)

    def _known(self, node: fx.Node) -> bool:
        """Tell whether a value depends only on properties of tensors that are the same for all images."""
        if isinstance(self.found(node)[0], torch.Tensor):
            return False
        asked = node.args[1] if node.target is getattr else node.target
        if asked in _ASKED_OF_TENSORS:
            return True
        return all(self._known(used) for used in node.all_input_nodes)


def _alike(values: Iterable[Any], asked: Callable[[Any], Any] = lambda value: value) -> bool:
    """Tell whether a function gives the same result for all values."""
    first, *others = map(asked, values)
    return all(other == first for other in others)
