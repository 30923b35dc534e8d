"""Spares torch's ONNX exporter the decomposition of a program, which takes a third to three quarters of an export.

``torch.onnx.export`` (2.11 to 2.14) traces each program again with symbolic sizes. It does so to decompose operators
without a translation and to remove in-place writes. In most networks these are batch norms and activations. Here they
are written as the tracing would write them. A program with other such operators is traced as before.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch._ops import OpOverload

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx._internal.exporter._registration import ONNXRegistry

_ATEN = torch.ops.aten
_NORM = _ATEN._native_batch_norm_legit_no_training.default
#: Composite operators that return new memory. The schemas of others do not say it: a dropout in eval mode returns its
#: input itself.
_NEW_MEMORY = frozenset(
    {
        *(_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv2d.padding, _ATEN.conv3d.default),
        *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.batch_norm.default),
        *(_ATEN.layer_norm.default, _ATEN.group_norm.default, _ATEN.instance_norm.default),
    }
)
_RESHAPING = frozenset({_ATEN.flatten.using_ints, _ATEN.reshape.default, _ATEN.unflatten.int})
_CONTIGUOUS: Final[dict[str, Any]] = {"memory_format": torch.contiguous_format}
#: Operators that do nothing in eval mode.
_DROPOUTS = frozenset({_ATEN.dropout.default, _ATEN.dropout_.default, _ATEN.feature_dropout.default})


@contextlib.contextmanager
def decomposed_where_needed() -> Iterator[None]:
    """Let each ``torch.onnx.export`` in the block decompose a program only if it must. One thread at a time."""
    from torch.onnx._internal.exporter import _decomp, _fx_passes

    own = _fx_passes.decompose_with_registry

    def decompose(exported_program: ExportedProgram, registry: ONNXRegistry) -> ExportedProgram:
        translated = frozenset(_decomp.get_onnx_implemented_overloads(registry))
        if not write_out(exported_program.graph, translated):
            return own(exported_program, registry)
        exported_program.graph_module.recompile()
        return exported_program

    _fx_passes.decompose_with_registry = decompose
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry = own


@dataclass(frozen=True)
class _Way:
    """How to write an operator as the tracing would: a test of the call, and a function that rewrites it in place."""

    may: Callable[[fx.Node], bool]
    write: Callable[[fx.Node], None]


def write_out(graph: fx.Graph, translated: Collection[Any]) -> bool:
    """Write an exported program's graph as a new trace would, in place, or leave it unchanged.

    Args:
        graph: with its nodes' values in ``meta["val"]``, as `torch.export` notes them.
        translated: the operators that the exporter translates.

    Returns:
        Whether it was written. It is not if something in it must be traced.
    """
    if not all(_can_be_written(node, translated) for node in graph.nodes):
        return False
    for node in list(graph.nodes):
        if (way := _WAYS.get(node.target)) is not None:
            way.write(node)
        elif _writes(node):
            node.target = _functional(node.target)
    graph.eliminate_dead_code()  # sizes that nobody reads any more
    return True


def _can_be_written(node: fx.Node, translated: Collection[Any]) -> bool:
    """Tell whether the exporter translates a node as it is, or as `write_out` writes it."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return True
    if "val" not in node.meta:
        return False
    if (way := _WAYS.get(target)) is not None:
        return way.may(node)
    if _writes(node):
        return _functional(target) in translated and _is_new(node.args[0])
    # The tracing keeps composite operators that have a translation and return new tensors.
    decomposed = isinstance(target, OpOverload) and _views(target) and target._can_decompose()
    return target in translated and not decomposed


def _is_answer(node: fx.Node) -> bool:
    """Tell whether the node is an output of the program, which refers to it by name."""
    return any(user.op == "output" for user in node.users)


def _drop(node: fx.Node) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]  # of a dropout, a tensor
    node.graph.erase_node(node)


def _is_cast(node: fx.Node) -> bool:
    """Tell whether a node only changes the dtype of its input."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    return len(node.args) == 2 and not node.kwargs and given.meta["val"].dtype != node.meta["val"].dtype


def _write_cast(node: fx.Node) -> None:
    node.target, node.args, node.kwargs = _ATEN._to_copy.default, node.args[:1], {"dtype": node.args[1]}


def _has_running_statistics(norm: fx.Node) -> bool:
    return len(norm.args) == 9 and not norm.args[5] and None not in norm.args[3:5]


def _write_norm(node: fx.Node) -> None:
    """Write a batch norm with running statistics as the operator that the exporter translates."""
    tensors, (momentum, epsilon) = node.args[:5], node.args[6:8]
    given: list[Any] = [tensor.meta.get("val") if isinstance(tensor, fx.Node) else tensor for tensor in tensors]
    with node.graph.inserting_before(node):
        norm = node.graph.call_function(_NORM, (*tensors, momentum, epsilon))
        answer = node.graph.call_function(operator.getitem, (norm, 0))
    norm.meta = node.meta | {"val": _NORM(*given, momentum, epsilon)}
    answer.meta = dict(node.meta)
    node.replace_all_uses_with(answer)
    node.graph.erase_node(node)


def _write_view(node: fx.Node) -> None:
    """Write a change of shape as a view, and copy first if the memory has another order."""
    given, sizes = node.args[0], _sizes(node)
    assert isinstance(given, fx.Node)
    try:
        given.meta["val"].view(sizes)
    except (RuntimeError, ValueError):  # of a tensor, and of torch 2.14's FakeTensor
        with node.graph.inserting_before(node):
            copied = node.graph.call_function(_ATEN.clone.default, (given,), _CONTIGUOUS)
        copied.meta = given.meta | {"val": given.meta["val"].clone(**_CONTIGUOUS)}
        given = copied
    node.target, node.args, node.kwargs = _ATEN.view.default, (given, sizes), {}


def _sizes(node: fx.Node) -> list[int]:
    """Return the shape of a node, with −1 for each size that depends on the batch."""
    return [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]


def _write_copy(node: fx.Node) -> None:
    node.target, node.kwargs = _ATEN.clone.default, dict(_CONTIGUOUS)


def _write_transpose(node: fx.Node) -> None:
    node.target = _ATEN.transpose.int


def _size_and_axis(chunk: fx.Node) -> tuple[Any, Any]:
    """Return the size of each part of a tensor but the last, and the axis."""
    axis: Any = chunk.args[2] if len(chunk.args) > 2 else 0
    return chunk.meta["val"][0].shape[axis], axis


def _write_split(node: fx.Node) -> None:
    node.target, node.args = _ATEN.split.Tensor, (node.args[0], *_size_and_axis(node))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _views(target: OpOverload) -> bool:
    return any(answer.alias_info is not None for answer in target._schema.returns)


def _functional(target: Any) -> Any:
    """Return the operator that computes the same as an in-place operator, or None if torch has none."""
    name: str = target._schema.name.split("::")[1]
    if target.namespace != "aten" or not name.endswith("_"):
        return None
    found: OpOverload | None = getattr(getattr(_ATEN, name[:-1], None), target._overloadname, None)
    same = found is not None and [argument.name for argument in found._schema.arguments] == [
        argument.name for argument in target._schema.arguments
    ]
    return found if same else None


def _is_new(given: Any) -> bool:
    """Tell whether a tensor has one reader and its own memory, if nothing is written in place."""
    if not isinstance(given, fx.Node) or len(given.users) != 1:
        return False
    if given.target is operator.getitem:
        given = given.args[0]
    if not isinstance(given, fx.Node) or not isinstance(given.target, OpOverload) or given.target in _DROPOUTS:
        return False  # a dropout returns its input
    if _writes(given):
        return True
    return not _views(given.target) and (given.target in _NEW_MEMORY or not given.target._can_decompose())


_WAYS: Final[dict[Any, _Way]] = {
    **dict.fromkeys(_DROPOUTS, _Way(lambda node: node.args[2] is False and not _is_answer(node), _drop)),
    **dict.fromkeys(_RESHAPING, _Way(lambda node: _sizes(node).count(-1) <= 1, _write_view)),
    _ATEN.batch_norm.default: _Way(lambda node: _has_running_statistics(node) and not _is_answer(node), _write_norm),
    _ATEN._assert_tensor_metadata.default: _Way(lambda node: True, lambda node: node.graph.erase_node(node)),
    _ATEN.to.dtype: _Way(_is_cast, _write_cast),
    _ATEN.contiguous.default: _Way(lambda node: len(node.args) == 1 and not node.kwargs, _write_copy),
    _ATEN.swapaxes.default: _Way(lambda node: True, _write_transpose),
    _ATEN.chunk.default: _Way(lambda node: isinstance(_size_and_axis(node)[0], int), _write_split),
}
