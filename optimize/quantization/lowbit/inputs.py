"""Quantizes the inputs of layers to few integers: torch.ao fake-quantize modules, and their places in a graph."""

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
    """``levels`` integers from 0, with the zero point ``zero_point``: ``(integer - zero_point) × scale``."""

    scale: float
    zero_point: int
    levels: int


class InputQuantizer(FakeQuantizeBase):
    """An activation's fake-quantize module, with 2**bits integers.

    Activations that are never negative have zero point 0. The zero point of others is found once, when training starts.
    """

    dtype = torch.quint8
    qscheme = torch.per_tensor_affine

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.quant_min, self.quant_max = 0, grid.levels - 1
        self.zero = grid.zero_point

    @property
    def above(self) -> int:
        """Number of integers for positive values (the paper's Qp)."""
        return self.quant_max - self.zero

    @property
    def grid(self) -> Grid:
        """Its current grid."""
        return Grid(self.step(), self.zero, self.quant_max + 1)

    @abstractmethod
    def step(self) -> float:
        """Return the scale."""

    @abstractmethod
    def quantized(self, given: torch.Tensor) -> torch.Tensor:
        """Return ``given`` on the grid, with the gradients of training, in its dtype, computed in float32."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return ``given`` ``(N, …)`` on its grid, or unchanged while fake quantization is disabled."""
        if not self.fake_quant_enabled[0]:
            return given
        return self.quantized(given)

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point."""
        return torch.tensor([self.step()]), torch.tensor([self.zero])


class LsqInput(InputQuantizer):
    """Learned step size (Esser et al.

    2020, arXiv:1902.08153). See `LsqWeight`; N is the number of features of one image.
    """

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
    """PACT (Choi et al. 2018, arXiv:1805.06085, section 3): a learned upper end, with the gradient of values beyond it.

    ``dy/dalpha`` is 1 where ``x >= alpha`` and 0 below (their equation after 2). A network's ReLU already ends at 0.
    With negative values, the lower end moves along. The paper's penalty on alpha is left out.
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

    The paper's bound is 1, for networks that are trained with it from the start. Here it is the calibrated one.
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


#: The classes by name.
INPUT_QUANTIZERS: dict[ActivationQuantizerName, type[InputQuantizer]] = {
    "lsq": LsqInput,
    "pact": PactInput,
    "dorefa": DorefaInput,
}


def put_before(module: fx.GraphModule, wanted: Mapping[str, Key], make: Callable[[Key], nn.Module]) -> dict[str, Key]:
    """Let layers read through new modules, in place. Layers that read one tensor in the same way share a module.

    An existing observer of torch.ao is replaced if nobody else reads through it, so that the tensor is rounded once.
    Otherwise the new module follows it.

    Args:
        module: traced, or prepared.
        wanted: a key for each layer's module.
        make: makes a module from its key.

    Returns:
        The keys by the names of the new modules.
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
    """Tell whether an observer is used for one tensor only, and clamps nothing (see `relu6`)."""
    own: Any = module.get_submodule(str(watcher.target))
    places = [node for node in module.graph.nodes if node.op == "call_module"]
    shared = sum(module.get_submodule(str(node.target)) is own for node in places) > 1
    return not shared and not own._forward_pre_hooks
