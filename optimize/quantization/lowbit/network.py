"""A float network for training with fewer bits, and its result: integers, scales and grids."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.ao.nn.qat as nnqat
from torch import fx, nn
from torch.ao.quantization import QConfig

from optimize.context import Context
from optimize.quantization.calibration import calibrate
from optimize.quantization.graph.nodes import called_module
from optimize.quantization.lowbit.bit_settings import LowBitTraining
from optimize.quantization.lowbit.inputs import INPUT_QUANTIZERS, Grid, InputQuantizer, put_before
from optimize.quantization.lowbit.weights import WEIGHT_QUANTIZERS, Codes, WeightQuantizer
from optimize.quantization.ranges import MseObserver

_TRAINED = {nn.Conv1d: nnqat.Conv1d, nn.Conv2d: nnqat.Conv2d, nn.Conv3d: nnqat.Conv3d, nn.Linear: nnqat.Linear}


@dataclass(frozen=True)
class Quantized:
    """The result of training.

    Attributes:
        module: the float network on the CPU, in eval mode, with the trained weights.
        codes: the integers of each layer whose weight has fewer bits.
        grids: the input grid of each layer whose input has fewer bits.
    """

    module: fx.GraphModule
    codes: Mapping[str, Codes]
    grids: Mapping[str, Grid]


def start_network(
    traced: fx.GraphModule, layers: Sequence[str], config: LowBitTraining, context: Context, images: int
) -> fx.GraphModule:
    """Return a copy of a traced network that rounds weights and inputs of layers, for training.

    Inputs start on the grids of the least squared error on training images. The network's weights are already rounded
    then.

    Args:
        traced: in eval mode, on the CPU. See `trace_calls`.
        layers: the layers. See `low_layers`.
        config: bits and methods.
        context: data, preprocessing, device.
        images: number of training images for the first grids.
    """
    module = copy.deepcopy(traced)
    if config.weight_bits < 8:
        for name in layers:
            module.set_submodule(name, _trained(module.get_submodule(name), config))
    if config.activation_bits < 8:
        levels = 1 << config.activation_bits

        def observer(_: None) -> nn.Module:
            return MseObserver(dtype=torch.quint8, quant_min=0, quant_max=levels - 1)

        placed = put_before(module, dict.fromkeys(layers), observer)
        module.to(context.device).eval()
        calibrate(module, context, context.calibration(images))
        for name in placed:
            scale, zero = module.get_submodule(name).calculate_qparams()  # type: ignore[operator]
            grid = Grid(float(scale), int(zero), levels)
            module.set_submodule(name, INPUT_QUANTIZERS[config.activation_quantizer](grid).to(context.device))
    return module


def _trained(layer: nn.Module, config: LowBitTraining) -> nn.Module:
    """Return torch.ao's layer for training, with a fake-quantize module of the weight."""
    kind, weight = WEIGHT_QUANTIZERS[config.weight_quantizer], layer.weight.detach()  # type: ignore[operator]
    fake = kind(config.weight_bits, len(weight), config.weights)
    fake.start(weight)
    # Its activation is not used: inputs have their own modules.
    layer.qconfig = QConfig(activation=nn.Identity, weight=lambda **_: fake)  # type: ignore[assignment, no-untyped-call]
    trained: nn.Module = _TRAINED[type(layer)].from_float(layer)  # type: ignore[attr-defined]
    return trained


def settle(trained: fx.GraphModule, traced: fx.GraphModule) -> Quantized:
    """Return the result of a trained network.

    Args:
        trained: see `start_network`. It is on the CPU, in eval mode.
        traced: the network that it was made from. It gets the trained weights.
    """
    own = trained.state_dict()
    traced.load_state_dict({name: own[name] for name in traced.state_dict()})
    codes: dict[str, Codes] = {}
    grids: dict[str, Grid] = {}
    for node in trained.graph.nodes:
        layer = called_module(trained, node)
        fake = getattr(layer, "weight_fake_quant", None)
        if isinstance(fake, WeightQuantizer):
            assert layer is not None
            codes[str(node.target)] = fake.codes(layer.weight)  # type: ignore[arg-type]
        if isinstance(layer, InputQuantizer):
            grids |= {str(user.target): layer.grid for user in node.users}
    return Quantized(traced, codes, grids)
