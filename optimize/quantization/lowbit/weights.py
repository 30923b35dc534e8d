"""Quantizes weights to few integers: torch.ao fake-quantize modules, one class for each method of the literature.

Each gives ``integers × scale`` on its own grid, with a scale for each output channel (or one for all). The gradients
are those of its paper. All work on the trained weight before a norm is folded into it. The norm's factor becomes part
of the scale, and the integers stay.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from optimize.quantization.lowbit.straight import Integers, instead, rounded, stepped
from optimize.quantization.ranges import Granularity, WeightRange
from serve.runtime.device.cpu_integers import WEIGHT_MAX

#: The smallest scale. Below it, a scale would not be a normal, positive number.
LEAST_SCALE = float(torch.finfo(torch.float32).eps)

WeightQuantizerName = Literal["lsq", "dorefa", "twn", "ttq", "xnor", "balanced"]


@dataclass(frozen=True)
class Codes:
    """A weight on its grid.

    Attributes:
        integers: whole numbers in float32, in the weight's shape.
        scale: positive, in a shape that broadcasts with it: ``(C, 1, …)`` or ``(1, 1, …)``.
        low: the least integer of the grid.
        high: the largest integer of the grid.
    """

    integers: torch.Tensor
    scale: torch.Tensor
    low: int
    high: int

    @property
    def bits(self) -> int:
        """Number of bits for the grid's integers in two's complement."""
        return max(self.high.bit_length(), (-self.low - 1).bit_length()) + 1

    @property
    def value(self) -> torch.Tensor:
        """The values of the integers."""
        return self.integers * self.scale


class WeightQuantizer(FakeQuantizeBase):
    """A weight's fake-quantize module.

    Attributes:
        quant_min: least integer.
        quant_max: largest integer.
    """

    dtype = torch.qint8
    qscheme = torch.per_channel_symmetric
    ch_axis = 0

    def __init__(self, low: int, high: int) -> None:
        super().__init__()
        self.quant_min, self.quant_max = low, high

    @abstractmethod
    def codes(self, weight: torch.Tensor) -> Codes:
        """Return the weight ``(C, …)`` on its grid, without gradients."""

    def on_grid(self, integers: torch.Tensor, scale: torch.Tensor) -> Codes:
        """Return integers of this grid with a scale."""
        return Codes(integers, scale, self.quant_min, self.quant_max)

    @abstractmethod
    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the quantized weight as float32, with the gradients of training."""

    def start(self, weight: torch.Tensor) -> None:
        """Initialise the learned parameters from a weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight on its grid, or unchanged while fake quantization is disabled."""
        if not self.fake_quant_enabled[0]:
            return weight
        return self.quantized(weight.float()).to(weight.dtype)  # the grid is that of float32, also under autocast

    def calculate_qparams(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Unknown without the weight. See `codes`."""
        raise NotImplementedError("the scale of a weight depends on the weight; use codes(weight)")


class LsqWeight(WeightQuantizer):
    """Learned step size (Esser et al. 2020, arXiv:1902.08153, equations 1 to 3): 2**bits integers, a trained step.

    See `stepped`. ``g = 1 / sqrt(N Qp)``, where N is the number of weights that share the step. Training starts at the
    step of the least squared error. The paper's ``2 E|v| / sqrt(Qp)`` is about twice as coarse at 4 bits.
    """

    def __init__(self, bits: int, channels: int, granularity: Granularity = "per-channel") -> None:
        super().__init__(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        self.step = nn.Parameter(torch.ones(channels if granularity == "per-channel" else 1))
        self._whole = granularity == "per-tensor"

    def start(self, weight: torch.Tensor) -> None:
        """Set the step to the one of 128 with the least squared error."""
        least = WeightRange(
            "mse",
            self._whole,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
        ).to(weight.device)
        least(weight)
        scale, _ = least.calculate_qparams()
        self.step.data.copy_(scale[: len(self.step)])

    def codes(self, weight: torch.Tensor) -> Codes:
        """See `WeightQuantizer`."""
        scale = _shaped(self.step.detach().clamp(min=LEAST_SCALE), weight)
        # Multiply by the inverse, as torch's kernel does: a tie then falls to the same side.
        integers = (weight.detach() * (1 / scale)).round().clamp(self.quant_min, self.quant_max)
        return self.on_grid(integers, scale)

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """See `WeightQuantizer`."""
        self.step.data.clamp_(min=LEAST_SCALE)
        factor = 1 / math.sqrt(weight.numel() / len(self.step) * self.quant_max)
        return stepped(weight, self.step, Integers(self.quant_min, self.quant_max), factor)


class DorefaWeight(WeightQuantizer):
    """DoReFa-Net (Zhou et al. 2016, arXiv:1606.06160, equation 9): the layer's ``tanh(w)`` on 2**bits odd integers.

    ``2 quantize_k(tanh(w) / (2 max|tanh(w)|) + 1/2) - 1``, times ``max|tanh(w)|``. The factor keeps the size of a
    trained layer, which the paper leaves to the norm behind it. Odd integers start at -(2**bits - 1) and need one more
    bit.
    """

    def __init__(self, bits: int, channels: int, granularity: Granularity = "per-channel") -> None:
        levels = (1 << bits) - 1
        super().__init__(-levels, levels)
        self._levels = levels

    def codes(self, weight: torch.Tensor) -> Codes:
        """See `WeightQuantizer`."""
        bent = weight.detach().tanh()
        most = bent.abs().max().clamp(min=LEAST_SCALE)
        integers = 2 * (self._levels * (bent / (2 * most) + 0.5)).round() - self._levels
        return self.on_grid(integers, _shaped(most[None] / self._levels, weight))

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """See `WeightQuantizer`. Rounding passes its gradient on, and all other steps have their own."""
        bent = weight.tanh()
        most = bent.detach().abs().max().clamp(min=LEAST_SCALE)
        integers = 2 * rounded(self._levels * (bent / (2 * bent.abs().max().clamp(min=LEAST_SCALE)) + 0.5))
        return (integers - self._levels) * (most / self._levels)


class TwnWeight(WeightQuantizer):
    """Ternary weight networks (Li and Liu 2016, arXiv:1605.04711, section 2.2): -1, 0 and 1 times a scale.

    The threshold is ``0.7 E|w|``, and the scale is the mean magnitude above it, both for each output channel (or for
    the layer). The weight gets the gradient of its quantized value.
    """

    def __init__(self, bits: int, channels: int, granularity: Granularity = "per-channel") -> None:
        super().__init__(-1, 1)
        self._whole = granularity == "per-tensor"

    def codes(self, weight: torch.Tensor) -> Codes:
        """See `WeightQuantizer`."""
        magnitudes = weight.detach().abs()
        kept = magnitudes > 0.7 * _mean(magnitudes, self._whole)
        count = _mean(kept.float(), self._whole).clamp(min=LEAST_SCALE)
        scale = (_mean(magnitudes * kept, self._whole) / count).clamp(min=LEAST_SCALE)
        return self.on_grid(weight.detach().sign() * kept, scale)

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """See `WeightQuantizer`."""
        return instead(weight, self.codes(weight).value)


class TtqWeight(WeightQuantizer):
    """Trained ternary quantization (Zhu et al. 2017, arXiv:1612.01064, section 3): -Wn, 0 and Wp, both learned.

    The threshold is ``0.05 max|w|`` of the layer. A scale gets the sum of the gradients of its weights. A weight gets
    its own gradient times its scale, or unchanged where it became 0. Two scales are no grid of integers. So the smaller
    one is rounded to a multiple of a 63rd of the larger, in training too. Int8 then computes exactly what was trained,
    on any x86 CPU.
    """

    def __init__(self, bits: int, channels: int, granularity: Granularity = "per-channel") -> None:
        super().__init__(-WEIGHT_MAX, WEIGHT_MAX)
        self.scales = nn.Parameter(torch.ones(2))  # Wp, Wn

    def start(self, weight: torch.Tensor) -> None:
        """Set each scale to the mean magnitude of its weights."""
        for place, side in enumerate((weight, -weight)):
            of_it = side[side > self._threshold(weight)]
            self.scales.data[place] = of_it.mean() if of_it.numel() else LEAST_SCALE

    def codes(self, weight: torch.Tensor) -> Codes:
        """See `WeightQuantizer`."""
        scales = self.scales.detach().abs().clamp(min=LEAST_SCALE)
        step = scales.max() / WEIGHT_MAX
        up, down = (scales / step).round().clamp(min=1)
        threshold = self._threshold(weight)
        integers = up * (weight.detach() > threshold) - down * (weight.detach() < -threshold)
        return self.on_grid(integers, _shaped(step[None], weight))

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """See `WeightQuantizer`."""
        self.scales.data.abs_().clamp_(min=LEAST_SCALE)
        found: torch.Tensor = _Ternary.apply(weight, self.scales, self.codes(weight).value)
        return found

    @staticmethod
    def _threshold(weight: torch.Tensor) -> torch.Tensor:
        return 0.05 * weight.detach().abs().max()


class _Ternary(torch.autograd.Function):
    """The gradients of `TtqWeight`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, scales: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scales, value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,) = gradients
        scales, value = ctx.saved_tensors
        up, down = value > 0, value < 0
        own = torch.stack([gradient[up].sum(), -gradient[down].sum()])
        factor = torch.ones_like(value).masked_fill(up, scales[0].item()).masked_fill(down, scales[1].item())
        return gradient * factor, own, None


class XnorWeight(WeightQuantizer):
    """XNOR-Net's binary weights (Rastegari et al. 2016, arXiv:1603.05279, equations 6 and 11): the sign times mean |w|.

    The mean is over an output channel (or the layer), and 0 counts as positive. The sign passes the gradient of weights
    within [-1, 1], and the mean has its own: ``dC/dw = g mean|w| 1{|w| <= 1} + sign(w) sum(g sign) / n``.
    """

    def __init__(self, bits: int, channels: int, granularity: Granularity = "per-channel") -> None:
        super().__init__(-1, 1)
        self._whole = granularity == "per-tensor"

    def codes(self, weight: torch.Tensor) -> Codes:
        """See `WeightQuantizer`."""
        own = weight.detach()
        return self.on_grid(_signs(own), _mean(own.abs(), self._whole).clamp(min=LEAST_SCALE))

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """See `WeightQuantizer`."""
        signs = instead(weight.clamp(-1, 1), _signs(weight.detach()))
        return signs * _mean(weight.abs(), self._whole).clamp(min=LEAST_SCALE)


class BalancedWeight(WeightQuantizer):
    """IR-Net's balanced binary weights (Qin et al. 2020, arXiv:1909.10788, section 3.2): the sign of ``w - mean(w)``.

    About half of an output channel's weights become 1, so that they carry as much information as bits can. The scale is
    the mean magnitude around the mean, so that a trained layer keeps its size. The paper uses a power of two of the
    standardised weight. The gradient passes unchanged, while the paper's estimator changes with the epoch.
    """

    def __init__(self, bits: int, channels: int, granularity: Granularity = "per-channel") -> None:
        super().__init__(-1, 1)
        self._whole = granularity == "per-tensor"

    def codes(self, weight: torch.Tensor) -> Codes:
        """See `WeightQuantizer`."""
        centred = weight.detach() - _mean(weight.detach(), whole=False)
        return self.on_grid(_signs(centred), _mean(centred.abs(), self._whole).clamp(min=LEAST_SCALE))

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """See `WeightQuantizer`."""
        return instead(weight - _mean(weight, whole=False), self.codes(weight).value)


#: The classes by name. Their arguments are ``(bits, channels, granularity)``.
WEIGHT_QUANTIZERS: dict[WeightQuantizerName, Callable[[int, int, Granularity], WeightQuantizer]] = {
    "lsq": LsqWeight,
    "dorefa": DorefaWeight,
    "twn": TwnWeight,
    "ttq": TtqWeight,
    "xnor": XnorWeight,
    "balanced": BalancedWeight,
}


def _shaped(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``(C,)`` as ``(C, 1, …)``."""
    return scale.view(-1, *(1,) * (weight.ndim - 1))


def _mean(values: torch.Tensor, whole: bool) -> torch.Tensor:
    """Return the mean of each output channel, or of all, in a shape that broadcasts with the weight."""
    return _shaped(values.mean()[None] if whole else values.flatten(1).mean(1), values)


def _signs(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values >= 0, 1.0, -1.0)
