"""Weights with which a network's answers depend on its images: torchvision's, or random ones that keep their signal.

With a library's own initialisation, images differ less and less from each other, layer by layer, as what all share
grows with each ReLU: in a random MobileNet their logits differ by less than a step of 8 bits, and its int8 answers mean
nothing. Where every layer is centred instead, so that half of its values are cut off, small differences grow, those of
rounding too, and drown the images in a deep network.

So every layer is shifted and scaled over real images until its output has variance 1 (LSUV: Mishkin and Matas 2016,
arXiv:1511.06422) and a mean in each channel between those two; of some means the one with which a network whose weights
and answers are rounded to 8 bits is nearest to itself. Norms get these images' statistics, and the head is fitted to
their labels by ridge regression, on what it reads with and without rounding. How much signal there is afterwards is
measured: see `Signal`.

Where that loses the images all the same, layers are drawn again with smooth kernels. Large images are smooth, and
rounding is not: of a kernel whose weights happen to cancel, and of any channel in which images hardly differ, a norm
makes noise as large as all else. MaxViT-T, at 224 pixels, has 8 dB with smooth kernels and norms that make no channel
larger than others than it is (16 images; 1 dB without, in one of a quarter of its width).

In a deep transformer nothing is as large as the rounding of the residual stream, once for each branch that is added to
it. In integers for TensorRT a ViT of 32 blocks, 96 wide, had 2.5 dB, and 12.6 without that rounding. So there branches
end with mean 0, which leaves the stream's 8 bits to what differs, and small, as in GPT-2 (Radford et al. 2019, section
2.3), which lets the stream carry the image through; and the head is fitted against that rounding, too: 10.9 dB.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.zoo.record import CLEAR_DB, Signal
from benchmarks.zoo.stream import RoundedSums, deep_branch_ends
from optimize.errors import PassError

_WEIGHTED = (nn.Conv2d, nn.Linear)
_NORMS = (_BatchNorm, nn.LayerNorm)
#: Means that are tried, in deviations. A ReLU makes two inputs' differences larger against what it gives by
#: P(z > 0) / Var(ReLU(z)), z of N(m, 1): 1.47 times at m = 0, 1.12 at m = 1, 1.05 at 1.5, 1.02 at 2; but the larger m,
#: the more of its range is what all images share.
_MEANS = (0.6, 1.0, 1.4)
#: Those that are tried with smooth kernels, where less is lost in a ReLU: 0.3 left MaxViT-T 8.2 dB, 0 left it 6.6.
_SMOOTH_MEANS = (0.3, 0.6)
#: Share of a smooth kernel's power that differs from place to place in it.
_ROUGH = 0.02
#: Noise that the head is fitted against at least, as a share of its features' power; more where rounding makes more: of
#: more features than images, a head finds in those few images directions in which rounding happens to be small.
_NOISE = 0.01
#: Power of rounding for TensorRT against that of `_rounding`: half the numbers, of a map that has none below 0.
_SYMMETRIC = 4
#: What torchvision and timm call the factors of residual branches, which start near 0.
_BRANCH_FACTORS = ("layer_scale", "gamma", "gamma_1", "gamma_2")
#: What they call tokens and positions that are parameters. They start at 0 or near it, a fiftieth of what patches are
#: after their layer here: less than half a step of the sum's integers, and a norm makes as much of it as of the others.
_TOKENS = ("class_token", "cls_token", "dist_token", "reg_token", "pos_embedding", "pos_embed")


def initialise(module: nn.Module, images: torch.Tensor, seed: int = 0, *, widest: int = 127) -> float:
    """Draw weights that keep their signal through the depth of a network, in place.

    Args:
        module: in any mode, as its library builds it; afterwards in eval mode.
        images: ``float32 (N, C, H, W)``, normalised, real; N of 16 to 32 are enough.
        seed: of the draw.
        widest: largest integer of a weight; see `_rounding`.

    Returns:
        The mean that was chosen.
    """
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] in _BRANCH_FACTORS:
            parameter.data.fill_(0.5)
    ends = deep_branch_ends(module)
    kept: dict[_Way, float] = {}
    for ways in ([_Way(mean) for mean in _MEANS], [_Way(mean, smooth=True) for mean in _SMOOTH_MEANS]):
        for way in ways:
            _settle(module, images, way, seed, ends)
            head = _last_layer(module, images)
            exact = _read_by(module, head, images)
            with _rounding(module, sums=bool(ends), widest=widest):
                kept[way] = _above_db(exact, _read_by(module, head, images))
        best = max(kept, key=lambda way: kept[way])
        if kept[best] >= CLEAR_DB:
            break
    _settle(module, images, best, seed, ends)
    return best.mean


@dataclass(frozen=True)
class _Way:
    """How layers are drawn: the mean that they give, and whether kernels are smooth."""

    mean: float
    smooth: bool = False


def _above_db(exact: torch.Tensor, lossy: torch.Tensor) -> float:
    """How far the differences between images, in ``(N, D)``, are above those to ``lossy``."""
    lost = (lossy - exact).square().sum().clamp_min(1e-12)
    return 10 * math.log10(float((exact - exact.mean(0)).square().sum().clamp_min(1e-12) / lost))


def _smooth(layer: nn.Conv2d, generator: torch.Generator) -> None:
    """Give most of each kernel's power to what its places have in common, which is never near 0."""
    weight = layer.weight.data
    sign = torch.randn(*weight.shape[:2], 1, 1, generator=generator).sign()
    weight.mul_(_ROUGH**0.5).add_(sign * ((1 - _ROUGH) / weight[0].numel()) ** 0.5)


def _unraised(layer: _BatchNorm, given: tuple[torch.Tensor]) -> None:
    """Let a norm leave a channel as much smaller than others as it finds it; called before it takes its statistics."""
    variance = given[0].var([axis for axis in range(given[0].ndim) if axis != 1])
    layer.weight.data *= (variance / variance.mean().clamp_min(1e-12)).clamp_max(1).sqrt()


def _settle(module: nn.Module, images: torch.Tensor, way: _Way, seed: int, ends: Sequence[nn.Module]) -> None:
    """Draw all weights, and give each layer's output its mean and variance 1.

    What a deep transformer's branches end with (``ends``) has mean 0, and all together variance 1.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, _WEIGHTED):
            layer.weight.data.normal_(0, layer.weight[0].numel() ** -0.5, generator=generator)
            if way.smooth and isinstance(layer, nn.Conv2d) and layer.kernel_size > layer.stride:  # no patches' layer
                _smooth(layer, generator)
            if layer.bias is not None:
                layer.bias.data.zero_()
        elif isinstance(layer, _BatchNorm):
            layer.momentum = None  # the mean over what is seen
            layer.reset_running_stats()
            if layer.affine:
                layer.weight.data.uniform_(0.8, 1.2, generator=generator)
                layer.bias.data.normal_(way.mean, 0.1, generator=generator)
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[2] in _TOKENS:
            parameter.data.normal_(0, 1, generator=generator)
    module.eval()
    for layer in module.modules():
        layer.train(isinstance(layer, _BatchNorm))
    inner = functools.partial(_standardised, middle=way.mean)
    last = functools.partial(_as_branch, deviation=max(len(ends), 1) ** -0.5)
    layers = [layer for layer in module.modules() if layer not in ends]
    norms = [layer for layer in layers if isinstance(layer, _BatchNorm) and layer.affine and way.smooth]
    with (
        _hooked(norms, _unraised, before=True),
        _hooked([layer for layer in layers if isinstance(layer, _WEIGHTED)], inner),
        _hooked(set(ends), last),
        torch.no_grad(),
    ):
        module(images)
    module.eval()


def _standardised(
    layer: nn.Module, given: Any, output: torch.Tensor, middle: float, wanted: float = 1.0
) -> torch.Tensor:
    """A layer's output with this deviation and, where it has a bias, this mean in each channel; it now gives it.

    Not what a squeeze and excitation makes of pooled maps: images differ by a hundredth in these, and centred by
    channel nothing but that would be left, and the rounding of all the rest.
    """
    assert isinstance(layer, _WEIGHTED)
    channel = 1 if isinstance(layer, nn.Conv2d) else output.ndim - 1
    others = [axis for axis in range(output.ndim) if axis != channel]
    centred = layer.bias is not None and not _reads_pooled(layer, given)
    mean = output.mean(others, keepdim=True) if centred else output.new_zeros(())
    deviation = (output - mean).square().mean().sqrt() / wanted
    # Of a layer that sees the same in all images, such as a table of positions, or nothing but what is lost in float32:
    # the colours of grey images, as CSATv2 takes them apart.
    if not deviation > 1e-4:
        return output
    layer.weight.data /= deviation
    if not centred or layer.bias is None:
        return output / deviation
    layer.bias.data.sub_(mean.flatten()).div_(deviation).add_(middle)
    return (output - mean) / deviation + middle


def _as_branch(layer: nn.Module, given: Any, output: Any, deviation: float) -> Any:
    """What ends a branch, with mean 0 in each channel and this deviation; the layer now gives it.

    A ViT's attention keeps variance 1: its class token sees the image through it alone. Smaller, the ViT of the first
    lines had 7.2 dB.
    """
    if isinstance(layer, nn.MultiheadAttention):  # it calls its projection as a function, not as a layer
        return (_standardised(layer.out_proj, given, output[0], middle=0.0), *output[1:])
    return _standardised(layer, given, output, middle=0.0, wanted=deviation)


@contextmanager
def _rounding(module: nn.Module, sums: bool, widest: int) -> Iterator[None]:
    """Let each layer have weights of 8 bits, or of 7 (up to ``widest`` steps from 0), and give numbers of 8.

    A channel's weights are of 255 numbers, symmetric and at equal distances, or of 127 where a CPU without VNNI is to
    compute with them; a norm that is folded into them later scales them alike. What a layer gives is of 256, at equal
    distances from its least to its largest; not where it has no bias and there are norms: those are folded into it, and
    give what is rounded. Pooled maps, which a squeeze and excitation reads, are of 256 too.

    All three count. The error of a weight is the same at all places, and no pool averages it out as it does that of
    what a layer gives: in a small MaxViT, whose squeeze and excitation makes much of little differences between pooled
    maps, rounding the first convolution's weights alone leaves 8 dB. And as images differ by a hundredth of what such
    maps are, an EfficientNet-B3 had 20 dB with exact ones, and 1 dB in int8.

    With ``sums``, those of two tensors of one shape are rounded, too, as each in a residual stream is.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, _NORMS)]
    layers = [layer for layer in module.modules() if isinstance(layer, _WEIGHTED)]
    kept = [layer.weight.data for layer in layers]

    def rounded(layer: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
        return _in_bits(output)

    def read(layer: nn.Module, given: Any) -> Any:
        return (_in_bits(given[0]),) if _reads_pooled(layer, given) else given

    try:
        for layer, weight in zip(layers, kept, strict=True):
            others = tuple(range(1, weight.ndim))
            step = (weight.abs().amax(others, keepdim=True) / widest).clamp_min(1e-12)
            layer.weight.data = (weight / step).round() * step
        with (
            RoundedSums(_in_bits) if sums else nullcontext(),
            _hooked(layers, read, before=True),
            _hooked(norms, rounded),
            _hooked([layer for layer in layers if not norms or layer.bias is not None], rounded),
        ):
            yield
    finally:
        for layer, weight in zip(layers, kept, strict=True):
            layer.weight.data = weight


def _reads_pooled(layer: nn.Module, given: Any) -> bool:
    """Whether a layer is one of a squeeze and excitation, called with this."""
    return isinstance(layer, nn.Conv2d) and given[0].shape[-2:] == (1, 1)


def _in_bits(values: torch.Tensor) -> torch.Tensor:
    """The nearest of 256 numbers at equal distances, from the least of the values to the largest."""
    low, high = values.aminmax()
    step = ((high - low) / 255).clamp_min(1e-12)
    return ((values - low) / step).round() * step + low


@contextmanager
def _hooked(layers: Iterable[nn.Module], hook: Callable[..., Any], *, before: bool = False) -> Iterator[None]:
    """Have layers call a hook behind, or ``before``, what they compute."""
    handles = [
        layer.register_forward_pre_hook(hook) if before else layer.register_forward_hook(hook) for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fit_head(
    module: nn.Module,
    shown: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]],
    judged: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]],
    *,
    widest: int = 127,
) -> Signal:
    """Fit the last layer to labels, by ridge regression, and see what the network is worth with it.

    Args:
        module: in eval mode; its last layer with weights gives the logits (after a pool, where it is a convolution).
        shown: batches of images ``float32 (N, C, H, W)`` and labels ``int64 (N,)`` to fit on.
        judged: others, to judge by.
        widest: largest integer of a weight; see `_rounding`.

    Raises:
        PassError: what it reads is infinite or NaN.
    """
    head = _last_layer(module, next(shown())[0])
    assert isinstance(head, _WEIGHTED)
    branches = len(deep_branch_ends(module))
    features: list[torch.Tensor] = []
    rounded: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    for images, wanted in shown():
        features.append(_read_by(module, head, images))
        with _rounding(module, sums=branches > 0, widest=widest):
            rounded.append(_read_by(module, head, images))
        labels.append(wanted)
    exact, lossy = torch.cat(features).double(), torch.cat(rounded).double()
    if not (exact.isfinite().all() and lossy.isfinite().all()):
        raise PassError("what the head reads of these images is no number")
    x, y = torch.cat([exact, lossy]), torch.cat(labels + labels)
    classes = head.weight.shape[0]
    lost = float((lossy - exact).square().mean() / x.square().mean().clamp_min(1e-12))
    weight, centre = _ridge(x, nn.functional.one_hot(y, classes).double(), max(_NOISE, _SYMMETRIC * lost))
    answers = (x - centre) @ weight
    weight = weight * (3 / answers.std().clamp_min(1e-12))
    bias = -(centre @ weight)
    if isinstance(head, nn.Conv2d):  # SqueezeNet's, with a ReLU behind it that is not to cut anything off
        bias = bias + 12
    head.weight.data.copy_(weight.T.reshape(head.weight.shape).float())
    if head.bias is not None:
        head.bias.data.copy_(bias.float())
    right = total = 0
    with torch.no_grad():
        for images, wanted in judged():
            right += int((module(images).argmax(1) == wanted).sum())
            total += len(wanted)
    share = float(x.var(0).sum() / x.square().mean(0).sum().clamp_min(1e-12))
    return Signal(
        image_share=share,
        rounding_db=_above_db(exact, lossy),
        top1=right / total,
        images=total,
        weights_rounded=True,
        pooled_rounded=True,
        branches=branches,
        widest=widest,
    )


def _ridge(x: torch.Tensor, y: torch.Tensor, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``(D, classes)`` that tell centred ``y`` from centred ``x``, and the centre of ``x``.

    ``noise`` is a share of the power of ``x`` that may be added to any direction of it.
    """
    centre = x.mean(0)
    centred, wanted = x - centre, y - y.mean(0)
    penalty = (noise * len(x) * x.square().mean()).clamp_min(1e-12)
    gram = centred @ centred.T + penalty * torch.eye(len(x), dtype=x.dtype)
    return centred.T @ torch.linalg.solve(gram, wanted), centre


def _last_layer(module: nn.Module, images: torch.Tensor) -> nn.Module:
    """The last layer that reads one vector of each image, or a map; VOLO has another behind it, of each place."""
    called: list[nn.Module] = []

    def note(layer: nn.Module, given: tuple[torch.Tensor]) -> None:
        if isinstance(layer, nn.Conv2d) or given[0].ndim == 2:  # one vector of each
            called.append(layer)

    layers = [layer for layer in module.modules() if isinstance(layer, _WEIGHTED)]
    with _hooked(layers, note, before=True), torch.no_grad():
        module(images[:2])
    return called[-1]


def _read_by(module: nn.Module, head: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """What the head reads of each image, ``(N, D)``; the mean over places where it reads a map."""
    seen: list[torch.Tensor] = []
    with _hooked([head], lambda _, given: seen.append(given[0]), before=True), torch.no_grad():
        module(images)
    (features,) = seen
    return features.flatten(2).mean(2) if isinstance(head, nn.Conv2d) else features
