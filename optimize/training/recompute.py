"""Activation checkpointing (Chen et al. 2016, arXiv:1604.06174): a step drops the activations within blocks.

The backward computes them again. Everything that a block reads besides its inputs is restored for that, and its changes
are undone. So batch norms and observers see each batch once, and random layers draw the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from optimize.training.blocks import block_names, segmented
from optimize.training.randomness import random_states, restore_random_states
from serve.runtime.errors import UserError

#: Blocks that leave more than this share of the memory are not worth their time.
_WORTH = 0.8


class Replay:
    """Restores modules within a block to their state at creation, and afterwards to their state before the block.

    Args:
        modules: the modules. Their buffers are exchanged and not written to, because a backward may need them.
        device: the device, whose random generators are restored too.
    """

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._layers = [layer for module in modules for layer in module.modules() if layer._buffers]
        self._buffers = [_copied(layer) for layer in self._layers]
        self._random = random_states(device)
        self._after: list[dict[str, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        self._present = random_states(self._device)
        self._after = [layer._buffers for layer in self._layers]
        for layer, buffers in zip(self._layers, self._buffers, strict=True):
            layer._buffers = buffers
        restore_random_states(self._random, self._device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer, buffers in zip(self._layers, self._after, strict=True):
            layer._buffers = buffers
        restore_random_states(self._present, self._device)


@contextmanager
def checkpointed(
    module: nn.Module, example: Callable[[], torch.Tensor], images: int, device: torch.device
) -> Iterator[None]:
    """Train ``module`` with less memory within the block. Its answers and gradients stay the same.

    Args:
        module: in training mode.
        example: returns at least four normalised images, ``(N, C, H, W)``, to find its blocks with.
        images: the number of images that are computed together.
        device: the module's device.

    Raises:
        UserError: it has no blocks that would save memory.
    """
    with Replay([module], device):  # trials here leave no trace
        given = example().to(device)
        if isinstance(module, fx.GraphModule):
            found = segmented(module, given, images)
            whole, blocks = found.module, [found.module.get_submodule(name) for name in found.names]
        else:
            found = block_names(module, given, images)
            whole, blocks = module, [module.get_submodule(name) for name in found.names]
    if not blocks or found.left > _WORTH:
        raise UserError(
            "activation_checkpointing: this network has no blocks whose recomputation saves enough memory; the "
            f"best would leave {found.left:.0%} of it: train without"
        )
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_instead(block, _again(block, block.forward, device)))
        if whole is not module:
            stack.enter_context(_instead(module, whole.forward))
        yield


def _again(block: nn.Module, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a forward whose activations are computed again in the backward."""

    def forgetting(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)

        def contexts() -> tuple[contextlib.AbstractContextManager[None], Replay]:
            return contextlib.nullcontext(), Replay([block], device)

        return checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named)

    return forgetting


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give ``module`` another forward within the block."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _copied(layer: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in layer._buffers.items()}
