"""What torch's ONNX exporter need not decompose, which takes half of an export's time or more.

``torch.onnx.export`` (2.11 to 2.14) has each program traced anew, with symbolic sizes, to decompose what it knows no
translation of and to write out what happens in place. Of most networks that is their batch norms and activations, which
are written here as the tracing would write them; a program in which something else is left is traced as ever.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch._ops import OpOverload

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx._internal.exporter._registration import ONNXRegistry

_ATEN = torch.ops.aten
_NORM = _ATEN._native_batch_norm_legit_no_training.default
#: Composite operators whose answers lie in memory of their own. Of others their schema does not say it: a dropout in
#: evaluation gives the very tensor that it is given.
_NEW_MEMORY = frozenset(
    {
        *(_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv2d.padding, _ATEN.conv3d.default),
        *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.batch_norm.default),
        *(_ATEN.layer_norm.default, _ATEN.group_norm.default, _ATEN.instance_norm.default),
    }
)
_RESHAPING = frozenset({_ATEN.flatten.using_ints, _ATEN.reshape.default, _ATEN.unflatten.int})
_CONTIGUOUS: Final[dict[str, Any]] = {"memory_format": torch.contiguous_format}
#: Of these, in evaluation, nothing is left.
_DROPOUTS = frozenset({_ATEN.dropout.default, _ATEN.dropout_.default, _ATEN.feature_dropout.default})


@contextlib.contextmanager
def decomposed_where_needed() -> Iterator[None]:
    """Let each ``torch.onnx.export`` of the block decompose a program only if it must; one thread at a time."""
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


def write_out(graph: fx.Graph, translated: Collection[Any]) -> bool:
    """Write an exported program's graph as tracing it anew would write it, in place, or leave it as it is.

    Args:
        graph: with what its nodes give in ``meta["val"]``, as `torch.export` notes it.
        translated: the operators that the exporter translates.

    Returns:
        Whether it was written; it is not where something in it must be traced.
    """
    if not all(_can_be_written(node, translated) for node in graph.nodes):
        return False
    for node in list(graph.nodes):
        if node.target in _DROPOUTS:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is _ATEN.batch_norm.default:
            _write_norm(graph, node)
        elif node.target in _RESHAPING:
            _write_view(graph, node)
        elif node.target is _ATEN.contiguous.default:
            node.target, node.kwargs = _ATEN.clone.default, dict(_CONTIGUOUS)
        elif node.target is _ATEN.swapaxes.default:
            node.target = _ATEN.transpose.int
        elif node.target is _ATEN.chunk.default:
            axis = node.args[2] if len(node.args) > 2 else 0
            node.target, node.args = _ATEN.split.Tensor, (node.args[0], _size_of_part(node), axis)
        elif _writes(node):
            node.target = _functional(node.target)
    graph.eliminate_dead_code()  # sizes that were asked for
    return True


def _can_be_written(node: fx.Node, translated: Collection[Any]) -> bool:
    """Whether the exporter translates a node as it is, or as `write_out` writes it if it does with all others."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return True
    if "val" not in node.meta:
        return False
    if target in _DROPOUTS:
        ready = node.args[2] is False and not _is_answer(node)
    elif target is _ATEN.batch_norm.default:
        ready = len(node.args) == 9 and not node.args[5] and None not in node.args[3:5] and not _is_answer(node)
    elif target in _RESHAPING:
        ready = _sizes(node).count(-1) <= 1
    elif target is _ATEN.contiguous.default:
        ready = len(node.args) == 1 and not node.kwargs
    elif target is _ATEN.chunk.default:
        ready = isinstance(_size_of_part(node), int)
    elif _writes(node):
        ready = _functional(target) in translated and _is_new(node.args[0])
    else:  # of composite operators the tracing keeps those that are translated and give new tensors
        decomposed = isinstance(target, OpOverload) and _views(target) and target._can_decompose()
        ready = target is _ATEN.swapaxes.default or (target in translated and not decomposed)
    return ready


def _is_answer(node: fx.Node) -> bool:
    """Whether the program gives what a node gives, by the node's name."""
    return any(user.op == "output" for user in node.users)


def _write_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Write a batch norm of running statistics as the operator that the exporter translates."""
    tensors, (momentum, epsilon) = node.args[:5], node.args[6:8]
    given: list[Any] = [tensor.meta.get("val") if isinstance(tensor, fx.Node) else tensor for tensor in tensors]
    with graph.inserting_before(node):
        norm = graph.call_function(_NORM, (*tensors, momentum, epsilon))
        answer = graph.call_function(operator.getitem, (norm, 0))
    norm.meta = node.meta | {"val": _NORM(*given, momentum, epsilon)}
    answer.meta = dict(node.meta)
    node.replace_all_uses_with(answer)
    graph.erase_node(node)


def _write_view(graph: fx.Graph, node: fx.Node) -> None:
    """Write a change of shape as a view, of a copy where the memory has another order."""
    given, sizes = node.args[0], _sizes(node)
    assert isinstance(given, fx.Node)
    try:
        given.meta["val"].view(sizes)
    except (RuntimeError, ValueError):  # of a tensor, and of torch 2.14's FakeTensor
        with graph.inserting_before(node):
            copied = graph.call_function(_ATEN.clone.default, (given,), _CONTIGUOUS)
        copied.meta = given.meta | {"val": given.meta["val"].clone(**_CONTIGUOUS)}
        given = copied
    node.target, node.args, node.kwargs = _ATEN.view.default, (given, sizes), {}


def _sizes(node: fx.Node) -> list[int]:
    """The shape that a node gives, with −1 for each size that depends on the batch."""
    return [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]


def _size_of_part(chunk: fx.Node) -> Any:
    """How much each part of a tensor but the last has."""
    return chunk.meta["val"][0].shape[chunk.args[2] if len(chunk.args) > 2 else 0]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _views(target: OpOverload) -> bool:
    return any(answer.alias_info is not None for answer in target._schema.returns)


def _functional(target: Any) -> Any:
    """What computes the same as an operator that writes into what it is given; None where torch has none."""
    name: str = target._schema.name.split("::")[1]
    if target.namespace != "aten" or not name.endswith("_"):
        return None
    found: OpOverload | None = getattr(getattr(_ATEN, name[:-1], None), target._overloadname, None)
    same = found is not None and [argument.name for argument in found._schema.arguments] == [
        argument.name for argument in target._schema.arguments
    ]
    return found if same else None


def _is_new(given: Any) -> bool:
    """Whether one node alone reads a tensor, in memory of its own as far as nothing is written in place."""
    if not isinstance(given, fx.Node) or len(given.users) != 1:
        return False
    if given.target is operator.getitem:
        given = given.args[0]
    if not isinstance(given, fx.Node) or not isinstance(given.target, OpOverload) or given.target in _DROPOUTS:
        return False  # what a dropout gives is what it is given
    if _writes(given):
        return True
    return not _views(given.target) and (given.target in _NEW_MEMORY or not given.target._can_decompose())
