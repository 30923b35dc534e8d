"""Tracing a forward that computes with sizes, or branches on them: all but those of the batch are numbers.

torch.fx gives a proxy for ``x.shape[-1]``, with which a forward can neither branch, nor count, nor call what wants an
integer. An artifact takes images of one size, so what of a shape does not depend on how many images there are is known:
a forward is run on three batches beside its tracing, and sizes that are equal in all are numbers in it.
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

#: How many images each has. A lone one is the last: some networks cannot take it, and are traced by the others.
_BATCHES = (2, 3, 1)
#: What of a tensor is the same whatever is in it.
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
    """A tensor's shape: integers, and proxies of sizes that depend on the batch."""

    __slots__ = ()

    def __getitem__(self, which: Any) -> Any:
        """A size, or some of them."""
        found = super().__getitem__(which)
        return Shape(found) if isinstance(which, slice) else found

    def numel(self) -> Any:
        """How many numbers a tensor of this shape has."""
        return math.prod(self)


class ShapedProxy(SpokenFor):
    """A value in the graph, whose sizes are integers where they do not depend on the batch."""

    tracer: ShapedTracer
    _is_param = _is_buffer = False  # which torch asks of whatever is a tensor

    def stands_for(self, asks: str) -> type:
        """See `SpokenFor`: a tensor, where it gives one."""
        return torch.Tensor if self.tracer.is_tensor(self.node) else type(self)

    @property
    def device(self) -> fx.proxy.Attribute:
        """As of a tensor; what runs the graph may be elsewhere, so that only its kind is known."""
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
        """The type that it had of the example: what asks it as ``dtype`` may be run in another."""
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
        """As of a tensor, where it does not depend on the batch."""
        found = self.tracer.found(self.node)
        if isinstance(found[0], torch.Tensor | tuple | list) and _alike(found, len):
            return len(found[0])
        return int(super().__len__())

    def __iter__(self) -> Iterator[Any]:
        """Over what a call gave that gives a tuple, or over a tensor's rows."""
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
        """Of a size, or of what is told of one, where it does not depend on the batch."""
        return int(self.tracer.number(self))

    def __float__(self) -> float:
        """See `__int__`."""
        return float(self.tracer.number(self))

    def __setitem__(self, which: Any, value: Any) -> None:
        """As of a tensor: this is the tensor with the value in it from here on."""
        self.node = self.tracer.write(self, which, value)


class Device(fx.proxy.Attribute):
    """A tensor's device in the graph; a forward that asks for its kind goes as it does on a CPU."""

    type, index = "cpu", None

    def __eq__(self, other: object) -> bool:
        """As of a CPU; others that are asked for in the graph are one, too."""
        return isinstance(other, Device) or torch.device("cpu") == other

    def __ne__(self, other: object) -> bool:
        """See `__eq__`."""
        return not self == other

    __hash__ = fx.proxy.Attribute.__hash__

    def __str__(self) -> str:
        """As of a device."""
        return self.type


class ShapedTracer(LayerTracer):
    """See the module.

    Args:
        example: an input ``(N, C, H, W)``; only its shape and type matter.
        whole: see `LayerTracer`.
        kept: likewise.
    """

    def __init__(self, example: torch.Tensor, whole: bool = False, kept: Container[str] = ()) -> None:
        super().__init__(whole, kept)
        self._batches = tuple(example[:1].repeat(count, *[1] * (example.dim() - 1)) for count in _BATCHES)
        self._found: dict[fx.Node, tuple[Any, ...]] = {}
        self._runs = len(_BATCHES)  # of which what a node gives is known
        self._twin: nn.Module | None = None
        self._running = False
        self._overwritten: set[fx.Node] = set()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """See `fx.Tracer`."""
        self._twin = copy.deepcopy(root).eval()  # in training, norms would take note of the examples
        with taken_by_torch():
            traced = super().trace(root, concrete_args)
        # A pickled graph module is traced again by its graph's tracer, which has no example then, nor needs one.
        graph = fx.Graph(tracer_cls=LayerTracer)
        graph.output(graph.graph_copy(traced, {}))
        return graph

    def found(self, node: fx.Node) -> tuple[Any, ...]:
        """What a node gives of each batch."""
        if node not in self._found and node.op == "get_attr":
            assert isinstance(self.root, nn.Module)
            with self._aside():
                value = attribute(self.root, str(node.target))
            self._found[node] = (value,) * len(_BATCHES)
        return self._found[node][: self._runs]

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a node gives a tensor, as far as is known."""
        return node.op == "get_attr" or isinstance(self._found.get(node, (None,))[0], torch.Tensor)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """See `fx.Tracer`."""
        return ShapedProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        """See `fx.Tracer`."""
        if isinstance(a, fx.Proxy):
            return a.node  # before it is asked whether it is a tensor
        return super().create_arg(tuple(a) if isinstance(a, Shape) else a)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        """See `fx.Tracer`.

        Raises:
            TraceError: it reads what was written into by another name, and would be as it was before.
        """
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        if not self._overwritten.isdisjoint(node.all_input_nodes):
            raise TraceError("it writes into a tensor and reads it by another name")
        return node

    def write(self, tensor: ShapedProxy, which: Any, value: Any) -> fx.Node:
        """The node that gives what ``tensor`` is after ``tensor[which] = value``.

        What lay in the same memory has changed, too, and in the graph it has not: from here on nobody may read it.

        Raises:
            TraceError: it cannot be said as a concatenation, see `written`.
        """
        found = self.found(tensor.node)
        if not isinstance(found[0], torch.Tensor):
            raise TraceError("it writes into something that is no tensor")
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
        """What a node gives of each batch, without the lone image where the network cannot take one."""
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
        """For what is run beside the tracing: it goes through modules that report to this tracer."""
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
        """See `fx.Tracer`: which way a forward goes, where that depends on sizes, and not on what is in a tensor."""
        return bool(self.number(obj, "symbolically traced variables cannot be used as inputs to control flow"))

    def number(self, proxy: fx.Proxy, otherwise: str = "it makes a number of what is not one for all images") -> Any:
        """A number that is the same for each batch, and for whatever is in the images.

        Raises:
            TraceError: there is none, which is said.
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
        """Whether a value depends on no more of any tensor than what is the same for all images."""
        if isinstance(self.found(node)[0], torch.Tensor):
            return False
        asked = node.args[1] if node.target is getattr else node.target
        if asked in _ASKED_OF_TENSORS:
            return True
        return all(self._known(used) for used in node.all_input_nodes)


def _alike(values: Iterable[Any], asked: Callable[[Any], Any] = lambda value: value) -> bool:
    """Whether what is asked of each is the same."""
    first, *others = map(asked, values)
    return all(other == first for other in others)
