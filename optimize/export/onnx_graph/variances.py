"""Rewrites variances and standard deviations of an exported program as means.

The exporter (torch 2.11 to 2.14) restores their axes of size one, and those of the means returned beside them, by an
Expand to the number of images. With it OpenVINO 2026.4.1 lost the bias of a quantized convolution; see
`optimize.export.onnx_graph.engine_rewrites.write_out_copies`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from optimize.export.onnx_graph.engine_rewrites import put_for

_ATEN = torch.ops.aten
#: The rewritten operators.
DEVIATIONS = tuple(
    overload
    for name in ("var", "std", "var_mean", "std_mean")
    for overload in (getattr(_ATEN, name).default, getattr(_ATEN, name).dim, getattr(_ATEN, name).correction)
)


def write_out_deviations(module: fx.GraphModule) -> None:
    """Write variances and deviations over some axes as means, in place."""
    for node in list(module.graph.nodes):
        if node.target not in DEVIATIONS:
            continue
        name = node.target._schema.name
        with module.graph.inserting_before(node):
            found = _written(node, name)
        if found is None:
            continue
        if not name.endswith("_mean"):
            put_for(found[0], node)
            continue
        for reader in [reader for reader in node.users if reader.users]:
            which: Any = reader.args[1]
            put_for(found[which], reader)
    module.graph.eliminate_dead_code()
    module.recompile()


def _written(node: fx.Node, name: str) -> tuple[fx.Node, fx.Node] | None:
    """Return the variance or deviation, and the mean. None: it is over all axes, or its size depends on the batch."""
    assert isinstance(node.target, torch._ops.OpOverload)
    parameters = [argument.name for argument in node.target._schema.arguments]
    given: dict[str, Any] = {**dict(zip(parameters, node.args, strict=False)), **node.kwargs}
    axes, keeps = given.get("dim"), given.get("keepdim", False)
    freedom = given.get("correction", int(given.get("unbiased", True)))
    freedom = 1 if freedom is None else freedom
    count = math.prod(given["self"].meta["val"].shape[axis] for axis in axes or ())
    if not axes or not isinstance(count, int) or count <= freedom:
        return None
    call = node.graph.call_function
    mean = call(_ATEN.mean.dim, (given["self"], axes, True))
    away = call(_ATEN.sub.Tensor, (given["self"], mean))
    found = call(_ATEN.mean.dim, (call(_ATEN.mul.Tensor, (away, away)), axes, keeps))
    if freedom:
        found = call(_ATEN.mul.Tensor, (found, count / (count - freedom)))
    if "std" in name:
        found = call(_ATEN.sqrt.default, (found,))
    return found, mean if keeps else call(_ATEN.mean.dim, (given["self"], axes))
