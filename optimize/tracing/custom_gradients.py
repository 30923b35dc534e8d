"""Gradients of functions' own (`torch.autograd.Function`), which the graph of a network does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from optimize.tracing.trace import graph_as_is

#: What gradients may differ by, of the largest, and be the same.
_SAME = 1e-4


def lost_gradients(module: nn.Module, example: torch.Tensor) -> tuple[str, ...]:
    """A note of the functions whose gradient of their own is lost where the graph of a network is trained.

    None where it is that of what their ``forward`` computes, as that of an activation which saves memory is.

    Args:
        module: as it is written, in eval mode.
        example: ``(N, C, H, W)``.
    """
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    with torch.enable_grad():
        answer = module(example.clone())
        names = dict.fromkeys(function.__name__ for function in _functions(answer) if not _is_torchs(function))
        if not names or _alike(_gradients(answer, weights), _of_graph(module, weights, example)):
            return ()
    return (f"trained without the gradient of their own of {', '.join(names)}: with that of what they compute",)


def _functions(answer: torch.Tensor) -> Iterator[Any]:
    """The functions of Python's that an answer was computed by, as far as a gradient goes through them."""
    waiting, seen = [answer.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        if (function := getattr(node, "_forward_cls", None)) is not None:
            yield function


def _of_graph(module: nn.Module, weights: Sequence[torch.Tensor], example: torch.Tensor) -> torch.Tensor | None:
    """As `_gradients`, of what functions compute; None where torch has none."""
    graph = fx.GraphModule(module, graph_as_is(module, example))
    try:
        return _gradients(graph(example.clone()), weights)
    except RuntimeError:  # such as of a leaf that it writes into
        return None


def _gradients(answer: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    found = torch.autograd.grad(answer.square().sum(), weights, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def _is_torchs(function: type) -> bool:
    """Whether a function is of torch's own, as that of activation checkpointing."""
    return function.__module__.startswith("torch.")


def _alike(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and bool((one - other).abs().max() <= _SAME * one.abs().max())
