"""``expand``: adds parallel branches to plain 3x3 convolutions for training. ``merge`` folds them again.

The result computes the same as its parent. The norm of each new branch starts with a weight of 0, as the last norm of a
residual branch does in Goyal et al. 2017, arXiv:1706.02677, section 5.1. Training moves it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import fx, nn

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.export.program import write_program, write_weights
from optimize.passes.base import Pass, gradients_lost, register, zeros_are_meant
from optimize.store.artifact import Artifact, Product
from optimize.store.training_history import History
from optimize.tracing.branches import blocks
from optimize.tracing.equivalence import require_alike
from optimize.tracing.naming import free_name
from optimize.tracing.trace import calls, trace
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from serve.common.config import Config

Kind = Literal["repvgg", "acnet"]


class Expand(Config):
    """Settings of ``expand``."""

    branches: Kind = Field(
        default="repvgg",
        description="branches to add to each 3x3 convolution: repvgg (1x1, and a norm if the shape stays the same) "
        "or acnet (1x3 and 3x1)",
    )
    train: TrainingConfig | None = Field(
        default=None,
        description="settings for training the expanded network, as for the baseline; by default it is not trained",
    )
    tolerance: float = Field(
        default=1e-4,
        gt=0,
        description="largest allowed difference of any logit to the parent's, relative to the parent's largest logit, "
        "before it is trained",
    )


def expand_module(module: nn.Module, branches: Kind, example: torch.Tensor | None = None) -> tuple[fx.GraphModule, int]:
    """Return the traced module with branches beside its 3x3 convolutions, and the number of those convolutions.

    New layers are named after the convolution, with ``_1x1``, ``_1x3`` or ``_3x1`` appended. Their norms add ``_norm``.
    A norm alone adds ``_identity``. A number follows if the name is taken. Convolutions that have branches already get
    none. Neither do those that are called twice.
    """
    traced = trace(module, example)
    parallel = {branch.convolution for block in blocks(traced) for branch in block.branches}
    called = calls(traced)
    count = 0
    for node in list(traced.graph.nodes):
        layer = _plain(traced, node, called)
        if layer is not None and str(node.target) not in parallel:
            _put_beside(traced, node, layer, branches, called)
            count += 1
    traced.graph.lint()
    traced.recompile()
    return traced.eval(), count


def _put_beside(
    module: fx.GraphModule, node: fx.Node, layer: nn.Conv2d, branches: Kind, called: Mapping[int, int]
) -> None:
    """Add branches from the input of a convolution to its output, or to the output of its norm."""
    name, given = str(node.target), node.all_input_nodes[0]
    end = _norm_behind(module, node, called)
    users, total = list(end.users), end
    shapes = ((1, 1),) if branches == "repvgg" else ((1, 3), (3, 1))
    keeps_shape = layer.in_channels == layer.out_channels and set(layer.stride) == {1}
    for shape in (*shapes, None) if branches == "repvgg" and keeps_shape else shapes:
        own = free_name(module, f"{name}_identity" if shape is None else f"{name}_{shape[0]}x{shape[1]}")
        norm = own if shape is None else free_name(module, f"{own}_norm")
        read, after = given, total
        if shape is not None:
            module.add_submodule(own, _beside(layer, shape))
            with module.graph.inserting_after(after):
                read = after = module.graph.call_module(own, (given,))
        module.add_submodule(norm, _silent_norm(layer))
        with module.graph.inserting_after(after):
            branch = module.graph.call_module(norm, (read,))
        with module.graph.inserting_after(branch):
            total = module.graph.call_function(operator.add, (total, branch))
    for user in users:
        user.replace_input_with(end, total)


def _plain(module: fx.GraphModule, node: fx.Node, called: Mapping[int, int]) -> nn.Conv2d | None:
    """Return the layer of a node if it is a 3x3 convolution with a border of one zero that is called once."""
    if node.op != "call_module":
        return None
    layer = module.get_submodule(str(node.target))
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros" or nn.utils.parametrize.is_parametrized(layer):
        return None
    plain = (layer.kernel_size, layer.dilation) == ((3, 3), (1, 1)) and layer.padding in ((1, 1), "same")
    return layer if plain and called[id(layer)] == 1 else None


def _norm_behind(module: fx.GraphModule, node: fx.Node, called: Mapping[int, int]) -> fx.Node:
    """The batch norm that alone sees what a convolution gives, or the convolution."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    if user is None or user.op != "call_module":
        return node
    layer = module.get_submodule(str(user.target))
    return user if type(layer) is nn.BatchNorm2d and called[id(layer)] == 1 else node


def _beside(layer: nn.Conv2d, shape: tuple[int, int]) -> nn.Conv2d:
    """A convolution of another shape that reads around the same places, initialised as torch does."""
    padding = (shape[0] // 2, shape[1] // 2)
    beside = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        shape,
        layer.stride,  # type: ignore[arg-type]
        padding,
        groups=layer.groups,
        bias=False,
    )
    return beside.to(layer.weight.dtype)


def _silent_norm(layer: nn.Conv2d) -> nn.BatchNorm2d:
    """A norm that gives 0 until its weight moves."""
    norm = nn.BatchNorm2d(layer.out_channels).to(layer.weight.dtype)
    nn.init.zeros_(norm.weight)
    return norm


def _apply(parent: Artifact, config: Expand, context: Context, folder: Path) -> Product:
    example = context.example(16)
    module, count = expand_module(parent.module(), config.branches, example)
    if not count:
        raise NotApplicableError("expand found no plain 3x3 convolution with a padding of 1")
    with torch.no_grad():
        expected, actual = parent.module()(example), module(example)
    require_alike(actual, expected, config.tolerance, "expand")
    trained: tuple[str, ...] = ()
    training: tuple[History, ...] = ()
    if config.train is not None:
        result = train(module, context, config.train, from_start=True, keep_zeros=zeros_are_meant(parent))
        trained = (result.kept, *result.notes, *gradients_lost(parent, module, example))
        training = (result.history,)
    module.cpu()
    write_weights(module, folder)
    file, file_format = write_program(module, example, folder)
    beside = f"{count} 3x3 convolutions have branches beside them ({config.branches})"
    notes = (f"{beside}, trained", *trained) if trained else (f"{beside}, which add 0 until they are trained",)
    structure = {"branches": config.branches}
    return Product(file, file_format, parent.card.precision, notes=notes, structure=structure, training=training)


def _resize(module: nn.Module, example: torch.Tensor, structure: Mapping[str, Any]) -> nn.Module:
    return expand_module(module, structure["branches"], example)[0]


EXPAND = register(
    Pass(
        name="expand",
        summary="add branches to 3x3 convolutions, to train with and to merge later",
        config=Expand,
        accepts=frozenset({"module"}),
        yields="module",
        apply=_apply,
        resize=_resize,
        data="training",
    )
)
