"""Custom gradients (`torch.autograd.Function`), which the graph of a network does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from optimize.tracing.trace import graph_as_is
from serve.runtime.outputs import first_output

#: Largest difference of equal gradients, relative to the largest gradient.
_SAME = 1e-4


def lost_gradients(module: nn.Module, example: torch.Tensor) -> tuple[str, ...]:
    """Return a note on functions whose custom gradient is lost when the graph of a network is trained.

    There is no note if the custom gradient equals the gradient of ``forward``. That is so for activations that only
    save memory.

    Args:
        module: the original module, in eval mode.
        example: an input ``(N, C, H, W)``.
    """
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    with torch.enable_grad():
        answer = first_output(module(example.clone()))  # the only output that is trained
        names = dict.fromkeys(function.__name__ for function in _functions(answer) if not _is_torchs(function))
        if not names or _alike(_gradients(answer, weights), _of_graph(module, weights, example)):
            return ()
    return (
        f"trained without the custom gradients of {', '.join(names)}: the gradient of their forward computation is "
        "used",
    )


def _functions(answer: torch.Tensor) -> Iterator[Any]:
    """Yield the Python functions that computed an answer, as far as a gradient flows through them."""
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
    """Return the `_gradients` of the graph, without custom gradients, or None if torch has none."""
    graph = fx.GraphModule(module, graph_as_is(module, example))
    try:
        return _gradients(first_output(graph(example.clone())), weights)
    except RuntimeError:  # for example an in-place write into a leaf
        return None


def _gradients(answer: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    found = torch.autograd.grad(answer.square().sum(), weights, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found])


def _is_torchs(function: type) -> bool:
    """Tell whether a function is torch's own, as that of activation checkpointing."""
    return function.__module__.startswith("torch.")


def _alike(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and bool((one - other).abs().max() <= _SAME * one.abs().max())
