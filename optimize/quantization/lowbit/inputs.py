"""How what a layer reads becomes few integers: torch.ao fake-quantize modules, and their places in a graph."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from optimize.quantization.graph.nodes import is_watcher
from optimize.quantization.lowbit.straight import Integers, stepped
from optimize.quantization.lowbit.weights import LEAST_SCALE
from optimize.tracing.naming import free_name

ActivationQuantizerName = Literal["lsq", "pact", "dorefa"]

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Grid:
    """``levels`` integers from 0, of which ``zero_point`` stands for 0.0: ``(integer - zero_point) × scale``."""

    scale: float
    zero_point: int
    levels: int


class InputQuantizer(FakeQuantizeBase):
    """An activation's fake-quantize module, with 2**bits integers.

    What is never negative has zero-point 0. The zero-point of what is, is found once, when training starts, and kept.
    """

    dtype = torch.quint8
    qscheme = torch.per_tensor_affine

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.quant_min, self.quant_max = 0, grid.levels - 1
        self.zero = grid.zero_point

    @property
    def above(self) -> int:
        """How many integers stand for positive numbers (the paper's Qp)."""
        return self.quant_max - self.zero

    @property
    def grid(self) -> Grid:
        """Its grid as it is now."""
        return Grid(self.step(), self.zero, self.quant_max + 1)

    @abstractmethod
    def step(self) -> float:
        """The scale."""

    @abstractmethod
    def quantized(self, given: torch.Tensor) -> torch.Tensor:
        """``given`` on the grid, with the gradients of training; of its dtype, computed in float32."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """``given`` ``(N, …)`` on its grid; as it is while fake quantization is disabled."""
        if not self.fake_quant_enabled[0]:
            return given
        return self.quantized(given)

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero-point."""
        return torch.tensor([self.step()]), torch.tensor([self.zero])


class LsqInput(InputQuantizer):
    """Learned step size (Esser et al. 2020, arXiv:1902.08153): see `LsqWeight`; N is the features of one image."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.learned = nn.Parameter(torch.tensor([grid.scale]))

    def step(self) -> float:
        """See `InputQuantizer`."""
        return max(float(self.learned.detach()), LEAST_SCALE)

    def quantized(self, given: torch.Tensor) -> torch.Tensor:
        """See `InputQuantizer`."""
        self.learned.data.clamp_(min=LEAST_SCALE)
        factor = 1 / math.sqrt(max(given[0].numel() * self.above, 1))
        return stepped(given, self.learned, Integers(0, self.quant_max, self.zero), factor)


class PactInput(InputQuantizer):
    """PACT (Choi et al. 2018, arXiv:1805.06085, section 3): a learned end, whose gradient is that of what lies beyond.

    ``dy/dalpha`` is 1 where ``x >= alpha`` and 0 below (their equation after 2); a network's ReLU already ends at 0. Of
    what has negative numbers the other end moves along. The paper's penalty on alpha is left out.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.alpha = nn.Parameter(torch.tensor([grid.scale * max(self.above, 1)]))

    def step(self) -> float:
        """See `InputQuantizer`."""
        return max(float(self.alpha.detach()) / max(self.above, 1), LEAST_SCALE)

    def quantized(self, given: torch.Tensor) -> torch.Tensor:
        """See `InputQuantizer`."""
        found: torch.Tensor = _Pact.apply(given.float(), self.alpha, self.grid)
        return found.to(given.dtype)


class _Pact(torch.autograd.Function):
    """The gradients of `PactInput`."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, alpha: torch.Tensor, grid: Grid) -> torch.Tensor:
        ctx.save_for_backward(given, alpha)
        ctx.below = -grid.zero_point / max(grid.levels - 1 - grid.zero_point, 1)
        return torch.fake_quantize_per_tensor_affine(given, grid.scale, grid.zero_point, 0, grid.levels - 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,) = gradients
        given, alpha = ctx.saved_tensors
        over, under = given >= alpha, given < alpha * ctx.below
        own = gradient[over].sum() + ctx.below * gradient[under].sum()
        return gradient.masked_fill(over | under, 0), own[None], None


class DorefaInput(InputQuantizer):
    """DoReFa-Net (Zhou et al. 2016, arXiv:1606.06160, section 2.4): a bounded activation on a fixed grid.

    The paper's bound is 1, for networks that are trained with it from the start; here it is what calibration found.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._grid = grid

    def step(self) -> float:
        """See `InputQuantizer`."""
        return self._grid.scale

    def quantized(self, given: torch.Tensor) -> torch.Tensor:
        """See `InputQuantizer`."""
        found = torch.fake_quantize_per_tensor_affine(given.float(), self._grid.scale, self.zero, 0, self.quant_max)
        return found.to(given.dtype)


#: The class of each name.
INPUT_QUANTIZERS: dict[ActivationQuantizerName, type[InputQuantizer]] = {
    "lsq": LsqInput,
    "pact": PactInput,
    "dorefa": DorefaInput,
}


def put_before(module: fx.GraphModule, wanted: Mapping[str, Key], make: Callable[[Key], nn.Module]) -> dict[str, Key]:
    """Let layers read through modules of their own, in place; those that read one tensor alike share one.

    A watcher that torch.ao put there is replaced where nobody else reads through it, so that the tensor is rounded
    once; else the new one stands behind it.

    Args:
        module: traced, or prepared.
        wanted: by layer what it shall read through.
        make: makes one.

    Returns:
        What was wanted by the name of the module that does it.
    """
    readers: defaultdict[tuple[fx.Node, Key], list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if node.op == "call_module" and str(node.target) in wanted:
            readers[node.all_input_nodes[0], wanted[str(node.target)]].append(node)
    placed: dict[str, Key] = {}
    for (given, key), nodes in readers.items():
        made = make(key)
        if is_watcher(module, given) and set(given.users) == set(nodes) and _replaceable(module, given):
            module.set_submodule(str(given.target), made)
            placed[str(given.target)] = key
            continue
        name = free_name(module, f"{nodes[0].target}_input")
        module.add_submodule(name, made)
        with module.graph.inserting_before(nodes[0]):
            between = module.graph.call_module(name, (given,))
        for node in nodes:
            node.replace_input_with(given, between)
        placed[name] = key
    module.graph.lint()
    module.recompile()
    return placed


def _replaceable(module: fx.GraphModule, watcher: fx.Node) -> bool:
    """Whether a watcher watches one tensor alone, and cuts nothing off (see `relu6`)."""
    own: Any = module.get_submodule(str(watcher.target))
    places = [node for node in module.graph.nodes if node.op == "call_module"]
    shared = sum(module.get_submodule(str(node.target)) is own for node in places) > 1
    return not shared and not own._forward_pre_hooks
