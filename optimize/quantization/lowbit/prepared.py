"""Puts fewer bits into a network prepared for int8: known integers of weights and grids of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx, nn

from optimize.quantization.fixed_parameters import fix_weight, fixed_activation
from optimize.quantization.lowbit.bit_settings import LowBits
from optimize.quantization.lowbit.inputs import Grid, put_before
from optimize.quantization.lowbit.weights import LEAST_SCALE, Codes, XnorWeight
from optimize.quantization.ranges import Granularity, WeightObserver, weight_observer
from optimize.quantization.simulate import weighted
from optimize.quantization.targets import Target

#: From a layer's name to the rule for the range of its weight, and the number of scales.
Ranging = Callable[[str], tuple[WeightObserver, Granularity]]


def lay_codes(prepared: fx.GraphModule, codes: Mapping[str, Codes]) -> None:
    """Give weights of a prepared network, with norms folded in, their integers, in place.

    A norm multiplies each output channel, so the weight is still integers times a scale. Least squares finds that
    scale, exactly but for float32's rounding. If it is negative, the integers change their signs.

    Args:
        prepared: on the CPU, from a network whose weights are the codes' values.
        codes: by layer.
    """
    for name, layer in weighted(prepared).items():
        if name not in codes:
            continue
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        low, high = codes[name].low, codes[name].high
        rows, integers = weight.detach().flatten(1).double(), codes[name].integers.flatten(1).double()
        square = integers.square().sum(1)
        scale = (rows * integers).sum(1) / square.clamp(min=1)
        integers = (integers * torch.where(scale < 0, -1.0, 1.0)[:, None]).clamp(low, high)
        scale = scale.abs().clamp(min=LEAST_SCALE).float()
        weight.data = (integers.float() * scale[:, None]).view_as(weight)
        fix_weight(prepared, name, scale, low, high)


def lay_grids(prepared: fx.GraphModule, grids: Mapping[str, Grid], target: Target) -> None:
    """Round the inputs of a prepared network's layers to known grids, in place."""

    def rounding(grid: Grid) -> nn.Module:
        # The same integers, shifted to the target's zero point.
        zero, dtype = (grid.zero_point, torch.quint8) if target.activation_min == 0 else (0, torch.qint8)
        low = zero - grid.zero_point
        return fixed_activation(grid.scale, zero, low, low + grid.levels - 1, dtype)

    put_before(prepared, grids, rounding)


def choose_bits(
    prepared: fx.GraphModule, layers: Sequence[str], bits: LowBits, ranging: Ranging, target: Target
) -> None:
    """Prepare layers for calibration with fewer bits, in place.

    Weights get the scale of the range that the settings find, with integers of ``weight_bits``. With 1 bit they become
    their signs times the mean magnitude (`XnorWeight`). Inputs get observers of the least squared error, whatever
    observer the others have: with wider steps, the end of a range matters more.

    Args:
        prepared: with observers. See `prepare`.
        layers: the layers.
        bits: of weights and inputs. 8 leaves them as they are.
        ranging: gives the rule for the range of a layer's weight, and the number of scales.
        target: the target of the integers.
    """
    called, weight_bits = weighted(prepared), bits.weight_bits
    if weight_bits < 8:
        for name in (name for name in layers if name in called):
            weight: torch.Tensor = called[name].weight  # type: ignore[assignment]
            if weight_bits == 1:
                codes = XnorWeight(1, len(weight), ranging(name)[1]).codes(weight)
                weight.data = codes.value
                fix_weight(prepared, name, codes.scale.flatten().expand(len(weight)), -1, 1)
                continue
            low, high = -(1 << (weight_bits - 1)), (1 << (weight_bits - 1)) - 1
            observer = weight_observer(*ranging(name), low, high)()
            observer(weight.detach())
            fix_weight(prepared, name, observer.calculate_qparams()[0], low, high)
    if bits.activation_bits < 8:
        own = target.fewer(bits.activation_bits)
        watching: dict[str, str] = {name: "mse" for name in layers if name in called}
        put_before(prepared, watching, own.observer)
