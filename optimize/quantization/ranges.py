"""Observers by name, compatible with torch.ao's `QConfigMapping`. An observer finds the range of a tensor.

Observers that clip use a histogram of all values, not only the extremes.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch.ao.quantization.observer import (
    HistogramObserver,
    MinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    UniformQuantizationObserverBase,
)

from optimize.quantization.observers import MeanMinMaxObserver

#: The meaning of the names, for settings' descriptions.
MEANING = (
    "minmax (all that was seen), moving-average (the mean over batches of each batch's extremes, with equal "
    "weights for batches of 32), histogram (torch's search for the least squared error), entropy (least "
    "Kullback-Leibler divergence), percentile (from the 0.01th to the 99.99th), mse (least squared error of all "
    "ranges on a grid)"
)

#: Bins on each side of 0. The largest value seen is in the upper half of them.
_BINS = 8192
#: Number of values counted at once. torch.histc (2.11 to 2.14) counts in the dtype of the values. Above this, float32
#: has no odd numbers, and large images have more zeros behind a ReLU.
_EXACT = 1 << 24
#: Percentage of values that `PercentileObserver` keeps below the upper end, and above the lower end.
PERCENTILE = 99.99
#: Number of ranges that `MseObserver` tries in each search.
_TRIED = 128


class CountingObserver(UniformQuantizationObserverBase):
    """Counts all values in bins whose width is a power of two, so that a wider range joins bins without rounding.

    The result does not depend on the order of batches. It is per tensor. Infinite values and NaN are left out.

    Attributes:
        counts: ``float64 (2 * 8192,)``, from the most negative bin; 0 is the lower edge of bin 8192.
        exponent: the bins reach from ``-2**exponent`` to ``2**exponent``. None: nothing was seen yet.
        min_val: the least value seen, at first ``inf``.
        max_val: the largest value seen, at first ``-inf``.
    """

    counts: torch.Tensor
    min_val: torch.Tensor
    max_val: torch.Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_buffer("counts", torch.zeros(2 * _BINS, dtype=torch.float64))
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))
        self.exponent: int | None = None

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Count the values of ``seen``, of any shape, and pass it on."""
        values = seen.detach().float()
        if values.numel() and not torch.stack(torch.aminmax(values)).isfinite().all():
            values = values[values.isfinite()]
        if not values.numel():
            return seen
        low, high = torch.aminmax(values)
        self.min_val.copy_(torch.minimum(self.min_val, low))
        self.max_val.copy_(torch.maximum(self.max_val, high))
        self._reach(max(-low.item(), high.item()))
        assert self.exponent is not None
        for part in torch.split(values.flatten(), _EXACT):
            self._count(part, 2.0**self.exponent)
        return seen

    def _count(self, values: torch.Tensor, end: float) -> None:
        # Count each side alone: in one histogram, the smallest values would be rounded to the other side. `histc`
        # ignores values out of range. A 0 is counted on both sides.
        below, above = (torch.histc(side, _BINS, 0, end).to(self.counts) for side in (-values, values))
        below[0] -= (values == 0).sum()
        self.counts += torch.cat([below.flip(0), above])

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the least and the largest value that are kept. Values beyond are clipped."""
        if self.exponent is None or self.min_val == self.max_val:
            return self.min_val, self.max_val
        width = 2.0**self.exponent / _BINS
        low, high = self.choose(self.counts.cpu(), width, self.min_val.item(), self.max_val.item())
        return self.min_val.new_tensor(low), self.max_val.new_tensor(high)

    def choose(self, counts: torch.Tensor, width: float, least: float, most: float) -> tuple[float, float]:
        """Return the range for counts of bins of this width, within the extremes. Each observer has its own rule."""
        raise NotImplementedError

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Return scale and zero point, each ``(1,)``, of the chosen range, widened to contain 0."""
        return self._calculate_qparams(*self.range())

    def reset_min_max_vals(self) -> None:
        """Forget all values."""
        self.counts.zero_()
        self.min_val.fill_(float("inf"))
        self.max_val.fill_(float("-inf"))
        self.exponent = None

    def _reach(self, most: float) -> None:
        """Widen the bins until the largest magnitude is below their end."""
        # most < 2**needed. The floor keeps widths from vanishing. Zeros fit into any bins: a batch of zeros is no
        # reason for coarser ones.
        needed = max(math.frexp(most)[1], -100) if most else -100
        if self.exponent is None:
            self.exponent = needed
        # After as many halvings as the bins' index has bits, all values are in the two bins around 0.
        for _ in range(min(needed - self.exponent, _BINS.bit_length())):
            below, above = self.counts.view(2, _BINS)
            empty = self.counts.new_zeros(_BINS // 2)
            joined = (empty, below.view(-1, 2).sum(1), above.view(-1, 2).sum(1), empty)
            self.counts.copy_(torch.cat(joined))
        self.exponent = max(self.exponent, needed)


class PercentileObserver(CountingObserver):
    """The range from the 0.01th to the 99.99th percentile of all values, each to a fraction of a bin."""

    def choose(self, counts: torch.Tensor, width: float, least: float, most: float) -> tuple[float, float]:
        """See `CountingObserver.choose`."""
        below = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        share = (100 - PERCENTILE) / 100
        ends = []
        for rank in (share * below[-1], (1 - share) * below[-1]):
            bin_ = min(int(torch.searchsorted(below, rank, right=True)), len(counts)) - 1
            inside = ((rank - below[bin_]) / counts[bin_].clamp(min=1)).item()
            ends.append(min(max((bin_ - _BINS + inside) * width, least), most))
        return ends[0], ends[1]


class MseObserver(CountingObserver):
    """The range of a grid whose integers have the least squared error over all values.

    Both ends shrink together first, then each alone, twice. A bin counts as values at its centre.
    """

    def choose(self, counts: torch.Tensor, width: float, least: float, most: float) -> tuple[float, float]:
        """See `CountingObserver.choose`."""
        used = counts > 0
        values = ((torch.arange(len(counts), dtype=torch.float64) - _BINS + 0.5) * width)[used]
        # 0 is the most frequent value behind a ReLU, and it is exact.
        values[values == 0.5 * width] = 0.0
        shares = torch.arange(1, _TRIED + 1, dtype=torch.float64) / _TRIED
        low, high = torch.tensor(min(least, 0.0)), torch.tensor(max(most, 0.0))
        tries = [(low * shares, high * shares)]
        best = self._best(values, counts[used], *tries[0])
        for _ in range(2):
            best = self._best(values, counts[used], best[0].expand(_TRIED), high * shares)
            best = self._best(values, counts[used], low * shares, best[1].expand(_TRIED))
        return best[0].item(), best[1].item()

    def _best(
        self, values: torch.Tensor, counts: torch.Tensor, low: torch.Tensor, high: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range ``(low[i], high[i])`` with the least error. Among equals it is the widest."""
        scale, zero = (part.double().to(low.device) for part in self._calculate_qparams(low.float(), high.float()))
        error = torch.stack([self._error(values, counts, s, z) for s, z in zip(scale, zero, strict=True)])
        chosen = len(error) - 1 - int(error.flip(0).argmin())
        return low[chosen], high[chosen]

    def _error(
        self, values: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
    ) -> torch.Tensor:
        integers = ((values / scale).round() + zero).clamp(self.quant_min, self.quant_max)
        return (counts * ((integers - zero) * scale - values) ** 2).sum()


class EntropyObserver(CountingObserver):
    """The magnitude threshold whose integers lose the least information: least Kullback-Leibler divergence.

    Source: S. Migacz, 8-bit Inference with TensorRT (GTC 2017), slides 38 to 40. It uses a histogram of magnitudes with
    at most 2048 bins. For each threshold, the bins below it, with all counts beyond it added to the last one, are
    compared with their quantized form. That form has one level for each integer. Each level is spread over its
    non-empty bins. The bin of 0 gets the count of its neighbour, as in NVIDIA's pytorch-quantization 2.1
    (``calib/histogram.py``), because 0 is exact under every threshold.
    """

    def choose(self, counts: torch.Tensor, width: float, least: float, most: float) -> tuple[float, float]:
        """See `CountingObserver.choose`."""
        magnitudes = counts[_BINS:] + counts[:_BINS].flip(0)
        magnitudes, width = magnitudes.view(-1, 4).sum(1), 4 * width  # 2048, the upper half of them in use
        used = int(magnitudes.nonzero().max()) + 1
        levels = self._levels(least)
        magnitudes = magnitudes[:used].clone()
        if used <= levels:
            return least, most
        magnitudes[0] = magnitudes[1]
        divergence = torch.stack([_divergence(magnitudes, end, levels) for end in range(levels, used + 1)])
        threshold = (levels + int(divergence.argmin())) * width
        return max(least, -threshold), min(most, threshold)

    def _levels(self, least: float) -> int:
        """Return the number of integers for magnitudes: all, or one side's if there are negative values."""
        integers = self.quant_max - self.quant_min + 1
        symmetric = self.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
        return int(integers if least >= 0 and not symmetric else (integers + 1) // 2)


def _divergence(magnitudes: torch.Tensor, end: int, levels: int) -> torch.Tensor:
    """Return the KL divergence in nats between the first ``end`` bins and their form in ``levels`` levels.

    Counts of the other bins are added to the last bin.
    """
    inside = magnitudes[:end]
    clipped = inside.clone()
    clipped[-1] += magnitudes[end:].sum()
    level = torch.arange(end) * levels // end
    filled = (inside > 0).to(inside)
    total = inside.new_zeros(levels).index_add_(0, level, inside)
    bins = inside.new_zeros(levels).index_add_(0, level, filled)
    spread = (total / bins.clamp(min=1))[level] * filled
    if clipped[-1] > 0 and spread[-1] == 0:  # clipped values would have no probability
        return inside.new_tensor(float("inf"))
    p, q = clipped / clipped.sum().clamp(min=1), spread / spread.sum().clamp(min=1)
    present = p > 0
    return (p[present] * (p[present] / q[present]).log()).sum()


#: One scale for each output channel of a layer's weight, or one for all.
Granularity = Literal["per-channel", "per-tensor"]
WeightObserver = Literal["minmax", "percentile", "mse"]


class WeightRange(PerChannelMinMaxObserver):
    """Finds symmetric ranges of a weight, which may end before the largest value. Only the last tensor counts.

    One scale for all is stored as equal scales of all channels. Every kernel and graph accepts that.

    Args:
        kind: the rule for the end of a range.
        whole: whether all channels share one range.
        settings: as `PerChannelMinMaxObserver`'s.
    """

    def __init__(self, kind: WeightObserver = "minmax", whole: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.kind, self.whole = kind, whole

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Find the ranges of ``seen``, whose axis 0 is channels, and pass it on."""
        rows = seen.detach().float().flatten(1)
        most = self._ends(rows.flatten()[None] if self.whole else rows).expand(len(rows)).contiguous()
        self.min_val, self.max_val = -most, most
        return seen

    def _ends(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each row that is kept, ``(rows,)``."""
        most = rows.abs().amax(1)
        if self.kind == "percentile":
            kept = math.ceil(rows.shape[1] * PERCENTILE / 100)
            return rows.abs().kthvalue(kept, dim=1).values
        return self._least_error(rows, most) if self.kind == "mse" else most

    def _least_error(self, rows: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        """Return for each row the one of 128 shares of its largest magnitude with the least squared error."""
        levels = (self.quant_max - self.quant_min) / 2
        best, least = most, torch.full_like(most, float("inf"))
        for number in range(_TRIED, 0, -1):
            ends = most * number / _TRIED
            scale = (ends / levels).clamp(min=float(self.eps))[:, None]
            error = (((rows / scale).round().clamp(self.quant_min, self.quant_max) * scale - rows) ** 2).sum(1)
            best, least = torch.where(error < least, ends, best), torch.minimum(error, least)
        return best


def weight_observer(kind: WeightObserver, granularity: Granularity, low: int, high: int) -> Any:
    """Return a factory of weight observers, symmetric in ``[low, high]``, for a `QConfig`."""
    return WeightRange.with_args(
        kind=kind,
        whole=granularity == "per-tensor",
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        quant_min=low,
        quant_max=high,
    )


def cut(weight: torch.Tensor, kind: WeightObserver, granularity: Granularity, most: int) -> torch.Tensor:
    """Return a weight, channels first, clipped to the range that an observer of this kind finds.

    Args:
        weight: ``float32 (C, …)``.
        kind: the rule for the range.
        granularity: the number of scales.
        most: largest integer.
    """
    observer = weight_observer(kind, granularity, -most, most)().to(weight.device)
    observer(weight.detach())
    scale, _ = observer.calculate_qparams()
    ends = scale.view(-1, *[1] * (weight.ndim - 1))
    return weight.clamp(observer.quant_min * ends, observer.quant_max * ends)


#: The observers by name.
OBSERVERS: dict[str, type[ObserverBase]] = {
    "minmax": MinMaxObserver,
    "moving-average": MeanMinMaxObserver,
    "histogram": HistogramObserver,
    "entropy": EntropyObserver,
    "percentile": PercentileObserver,
    "mse": MseObserver,
}
