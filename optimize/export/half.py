"""Checks whether 16 bits can hold a network: its weights, its layers' outputs, and its answers on real images."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimize.errors import NotApplicableError, PassError
from serve.runtime.outputs import as_outputs


def check_half(module: nn.Module, dtype: torch.dtype, images: torch.Tensor) -> None:
    """Refuse a network whose weights, layer outputs or answers exceed ``dtype``.

    The arithmetic is emulated, because CPUs without FP16 instructions are a hundred times slower in FP16. Every
    operator computes in float32, as GPUs accumulate, and its result is rounded to ``dtype``.

    Args:
        module: float32, in eval mode, on the CPU. It is not changed.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        images: a few real, normalised images, ``float32 (N, C, H, W)``.

    Raises:
        NotApplicableError: a weight or a layer's output on these images is finite and beyond the largest number of
            ``dtype`` (65504 for FP16). The message names it with its value.
        PassError: an answer is not finite.
    """
    name, largest = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    for key, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and tensor.abs().max() > largest:
            raise NotApplicableError(f"weight {key} holds {tensor.abs().max():.3g}, more than {name}'s {largest:.6g}")
    emulated = copy.deepcopy(module).to(dtype).float()
    rounding = _Rounding(dtype)
    with _names(emulated, rounding.names), torch.no_grad(), rounding:
        outputs = as_outputs(emulated(images.to(dtype).float()))
    for key, value in rounding.largest.items():
        if value > largest:
            raise NotApplicableError(
                f"{key or 'the model'} reaches {value:.3g} on training images, more than {name}'s {largest:.6g}"
            )
    unbounded = torch.stack([(~output.isfinite()).flatten(1).any(1) for output in outputs]).any(0)
    if count := int(unbounded.sum()):
        raise PassError(f"in {name} the outputs of {count} of {len(images)} training images are not finite")


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the result of every operator.

    ``largest`` is the largest finite magnitude before rounding, by the innermost module that called the operator.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.names: list[str] = [""]
        self.largest: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:  # its content has no meaning yet
            return result
        # Norms and attention also return statistics, which their half kernels keep in float32. The first of a tuple is
        # enough.
        for tensor in tree_leaves(result[0] if isinstance(result, tuple) else result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and tensor.numel():
                self._round(tensor)
        return result

    def _round(self, tensor: torch.Tensor) -> None:
        value, name = max(abs(float(end)) for end in tensor.aminmax()), self.names[-1]
        if not math.isfinite(value):
            value = float(torch.where(tensor.isfinite(), tensor, 0.0).abs().max())
        self.largest[name] = max(value, self.largest.get(name, 0.0))
        # In place, because the result of an in-place operator is its input. A view shows values that are rounded
        # already, and rounding again does not change them. A view that repeats values (`expand`) cannot be written to.
        if 0 not in tensor.stride():
            tensor.copy_(tensor.to(self.dtype))


@contextmanager
def _names(module: nn.Module, stack: list[str]) -> Iterator[None]:
    """Keep the name of the running module on top of ``stack``."""

    def entered(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda layer, given: stack.append(name)

    def left(layer: nn.Module, given: Any, result: Any) -> None:
        stack.pop()

    handles = []
    for name, layer in module.named_modules():
        handles += [layer.register_forward_pre_hook(entered(name)), layer.register_forward_hook(left)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
