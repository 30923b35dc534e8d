"""Observers by name, as torch.ao's, so that they compose with a `QConfigMapping`: which range a tensor is given.

Those that clip look at a histogram of all that was seen, not at the extremes.
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

#: What the names mean, for settings' descriptions.
MEANING = (
    "minmax (all that was seen), moving-average (the mean over batches of each batch's extremes, all batches of 32 "
    "weighing the same), histogram (torch's search for the least squared error), entropy (least Kullback-Leibler "
    "divergence), percentile (from the 0.01th to the 99.99th), mse (least squared error of all ranges on a grid)"
)

#: Bins on each side of 0. The largest value seen lies in the upper half of them.
_BINS = 8192
#: Values that are counted at once. torch.histc counts in the type of the values (2.11 to 2.14): float32 has no odd
#: number beyond, and a ReLU's zeros are more than that where images are large.
_EXACT = 1 << 24
#: Percent of the values that `PercentileObserver` keeps below the upper end, and above the lower.
PERCENTILE = 99.99
#: Ranges that `MseObserver` tries in each of its searches.
_TRIED = 128


class CountingObserver(UniformQuantizationObserverBase):
    """Counts all values in bins whose width is a power of two, so that a wider range joins bins without rounding.

    What it finds does not depend on the order of batches. Per tensor; values that are not finite are left out.

    Attributes:
        counts: ``float64 (2 * 8192,)``, from the most negative; 0 is the lower edge of bin 8192.
        exponent: the bins reach from ``-2**exponent`` to ``2**exponent``; None before anything was seen.
        min_val: the least value seen, ``inf`` before.
        max_val: the largest value seen, ``-inf`` before.
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
        # Each side for itself: over both, the smallest would be rounded to the other side. What is out of reach is left
        # out by `histc`; 0 is on both sides.
        below, above = (torch.histc(side, _BINS, 0, end).to(self.counts) for side in (-values, values))
        below[0] -= (values == 0).sum()
        self.counts += torch.cat([below.flip(0), above])

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The least and the largest value that keep their place; beyond is clipped."""
        if self.exponent is None or self.min_val == self.max_val:
            return self.min_val, self.max_val
        width = 2.0**self.exponent / _BINS
        low, high = self.choose(self.counts.cpu(), width, self.min_val.item(), self.max_val.item())
        return self.min_val.new_tensor(low), self.max_val.new_tensor(high)

    def choose(self, counts: torch.Tensor, width: float, least: float, most: float) -> tuple[float, float]:
        """The range for these counts of bins of this width, within the extremes; each observer's own."""
        raise NotImplementedError

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Scale and zero point, each ``(1,)``, of the chosen range, widened to hold 0."""
        return self._calculate_qparams(*self.range())

    def reset_min_max_vals(self) -> None:
        """Forget all that was seen."""
        self.counts.zero_()
        self.min_val.fill_(float("inf"))
        self.max_val.fill_(float("-inf"))
        self.exponent = None

    def _reach(self, most: float) -> None:
        """Widen the bins until the largest magnitude lies below their end."""
        # most < 2**needed; the floor keeps widths from vanishing. Zeros lie within any bins: a batch of nothing else is
        # no reason for coarser ones.
        needed = max(math.frexp(most)[1], -100) if most else -100
        if self.exponent is None:
            self.exponent = needed
        # After as many halvings as there are bins' bits, all lies in the two bins around 0.
        for _ in range(min(needed - self.exponent, _BINS.bit_length())):
            below, above = self.counts.view(2, _BINS)
            empty = self.counts.new_zeros(_BINS // 2)
            joined = (empty, below.view(-1, 2).sum(1), above.view(-1, 2).sum(1), empty)
            self.counts.copy_(torch.cat(joined))
        self.exponent = max(self.exponent, needed)


class PercentileObserver(CountingObserver):
    """From the 0.01th to the 99.99th percentile of all values, each read to a fraction of a bin."""

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
    """Of all ranges on a grid the one whose integers have the least squared error over all values.

    First both ends shrink together, then each alone, twice. A bin's values stand for its centre.
    """

    def choose(self, counts: torch.Tensor, width: float, least: float, most: float) -> tuple[float, float]:
        """See `CountingObserver.choose`."""
        used = counts > 0
        values = ((torch.arange(len(counts), dtype=torch.float64) - _BINS + 0.5) * width)[used]
        # 0 is what a ReLU gives most often, and it is exact.
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
        """The one of the ranges ``(low[i], high[i])`` with the least error; the widest of equals."""
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
    """The threshold of magnitude whose integers tell least away: least Kullback-Leibler divergence.

    After S. Migacz, 8-bit Inference with TensorRT (GTC 2017), slides 38 to 40: of a histogram of magnitudes of at most
    2048 bins, each beginning, with the rest heaped on its last bin, is compared with itself in as many levels as there
    are integers, each level spread over those of its bins that are not empty. The bin of 0 counts as its neighbour
    does, as in NVIDIA's pytorch-quantization 2.1 (``calib/histogram.py``): 0 is exact under every threshold.
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
        """Integers that magnitudes are spread over: all, or one side's where there are negative values, too."""
        integers = self.quant_max - self.quant_min + 1
        symmetric = self.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
        return int(integers if least >= 0 and not symmetric else (integers + 1) // 2)


def _divergence(magnitudes: torch.Tensor, end: int, levels: int) -> torch.Tensor:
    """KL divergence in nats of the first ``end`` bins, the rest on the last, from their form in ``levels`` levels."""
    inside = magnitudes[:end]
    clipped = inside.clone()
    clipped[-1] += magnitudes[end:].sum()
    level = torch.arange(end) * levels // end
    filled = (inside > 0).to(inside)
    total = inside.new_zeros(levels).index_add_(0, level, inside)
    bins = inside.new_zeros(levels).index_add_(0, level, filled)
    spread = (total / bins.clamp(min=1))[level] * filled
    if clipped[-1] > 0 and spread[-1] == 0:  # what is clipped would have no probability
        return inside.new_tensor(float("inf"))
    p, q = clipped / clipped.sum().clamp(min=1), spread / spread.sum().clamp(min=1)
    present = p > 0
    return (p[present] * (p[present] / q[present]).log()).sum()


#: One scale for each output channel of a layer's weight, or one in all.
Granularity = Literal["per-channel", "per-tensor"]
WeightObserver = Literal["minmax", "percentile", "mse"]


class WeightRange(PerChannelMinMaxObserver):
    """Of a weight, symmetric ranges, which may end before the largest value; the last tensor counts.

    One scale in all is written as equal scales of all channels, which every kernel and graph takes.

    Args:
        kind: where a range ends.
        whole: whether all channels have one.
        settings: as `PerChannelMinMaxObserver`'s.
    """

    def __init__(self, kind: WeightObserver = "minmax", whole: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.kind, self.whole = kind, whole

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Find the ranges of ``seen``, whose axis 0 are channels, and pass it on."""
        rows = seen.detach().float().flatten(1)
        most = self._ends(rows.flatten()[None] if self.whole else rows).expand(len(rows)).contiguous()
        self.min_val, self.max_val = -most, most
        return seen

    def _ends(self, rows: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each row that keeps its place, ``(rows,)``."""
        most = rows.abs().amax(1)
        if self.kind == "percentile":
            kept = math.ceil(rows.shape[1] * PERCENTILE / 100)
            return rows.abs().kthvalue(kept, dim=1).values
        return self._least_error(rows, most) if self.kind == "mse" else most

    def _least_error(self, rows: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        """Of 128 shares of each row's largest magnitude the one with the least squared error."""
        levels = (self.quant_max - self.quant_min) / 2
        best, least = most, torch.full_like(most, float("inf"))
        for number in range(_TRIED, 0, -1):
            ends = most * number / _TRIED
            scale = (ends / levels).clamp(min=float(self.eps))[:, None]
            error = (((rows / scale).round().clamp(self.quant_min, self.quant_max) * scale - rows) ** 2).sum(1)
            best, least = torch.where(error < least, ends, best), torch.minimum(error, least)
        return best


def weight_observer(kind: WeightObserver, granularity: Granularity, low: int, high: int) -> Any:
    """What makes observers of weights, symmetric in ``[low, high]``, for a `QConfig`."""
    return WeightRange.with_args(
        kind=kind,
        whole=granularity == "per-tensor",
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
        quant_min=low,
        quant_max=high,
    )


def cut(weight: torch.Tensor, kind: WeightObserver, granularity: Granularity, most: int) -> torch.Tensor:
    """A weight, channels first, without what lies beyond the range that an observer of this kind gives it.

    Args:
        weight: ``float32 (C, …)``.
        kind: how the range is found.
        granularity: of how many scales.
        most: largest integer.
    """
    observer = weight_observer(kind, granularity, -most, most)().to(weight.device)
    observer(weight.detach())
    scale, _ = observer.calculate_qparams()
    ends = scale.view(-1, *[1] * (weight.ndim - 1))
    return weight.clamp(observer.quant_min * ends, observer.quant_max * ends)


#: The observer of each name.
OBSERVERS: dict[str, type[ObserverBase]] = {
    "minmax": MinMaxObserver,
    "moving-average": MeanMinMaxObserver,
    "histogram": HistogramObserver,
    "entropy": EntropyObserver,
    "percentile": PercentileObserver,
    "mse": MseObserver,
}
