"""Recovers accuracy of a calibrated model without training: weights' scales, rounding, biases.

A calibrated model and its `simulated` twin run node by node over the calibration images. Each layer is corrected with
the outputs of the corrected layers before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import fx, nn
from torch.ao.nn.intrinsic.modules.fused import _FusedModule
from torch.ao.quantization import QConfig

from optimize.context import Context
from optimize.quantization.calibration import Batches
from optimize.quantization.choices import Chosen
from optimize.quantization.fixed_parameters import is_fixed
from optimize.quantization.gate import sqnr
from optimize.quantization.ranges import Granularity, WeightObserver, cut, weight_observer
from optimize.quantization.recovery.adaround import Rounding, learn_rounding
from optimize.quantization.simulate import simulated, unwatched, weight_grid, weighted
from optimize.store.layer_effects import Effect
from serve.common.config import Config
from serve.runtime.images.image_preprocessing import normalise

SHIFT = "mean error of the output (RMS over channels, share of the output's deviation)"
SQNR = "SQNR of the output in dB"
ERROR = "mean squared error of the output by the weight's rounding"


class Recovery(Config):
    """Settings of the recovery without training."""

    weights: Granularity = Field(
        default="per-channel", description="scales of a layer's weight: one per output channel, or one for all"
    )
    weight_observer: WeightObserver = Field(
        default="minmax", description="how weight ranges are found: minmax (all of it), percentile (99.99), mse"
    )
    rounding: Literal["nearest", "adaround"] = Field(
        default="nearest",
        description="rounding of weights: to the nearest integer, or learned on the calibration images so that each "
        "layer's output stays close to the float layer's (AdaRound)",
    )
    rounding_steps: int = Field(
        default=500, ge=1, description="number of steps of Adam that adaround takes for each layer"
    )
    bias_correction: bool = Field(
        default=False,
        description="shift each layer's bias so that its mean output on the calibration images is the float layer's",
    )

    @model_validator(mode="after")
    def _steps_are_taken(self) -> Recovery:
        # A card contains all settings. Only a value other than the default was requested.
        if self.rounding == "nearest" and self.rounding_steps != Recovery.model_fields["rounding_steps"].default:
            raise ValueError(
                f"rounding_steps is {self.rounding_steps}, but only rounding: adaround uses it; rounding is nearest"
            )
        return self


def choose_weights(prepared: fx.GraphModule, config: Recovery, chosen: Chosen, most: int) -> None:
    """Give the weights of a prepared model the chosen scales, in place. Values beyond a range are clipped.

    Args:
        prepared: with observers.
        config: the settings of all layers.
        chosen: the settings of single layers.
        most: largest integer of a weight.
    """
    for name in weighted(prepared):
        granularity = chosen.granularity(name) or config.weights
        observer = chosen.weight_observer(name) or config.weight_observer
        if granularity == "per-channel" and observer == "minmax":
            continue  # the target's own setting
        if observer != "minmax":
            # Torch's packing writes -128 for values beyond a range (2.11 to 2.14), and the reference form -127. The
            # range of a clipped weight is that of its remaining values.
            weight: torch.Tensor = weighted(prepared)[name].weight  # type: ignore[assignment]
            weight.data = cut(weight.data, observer, granularity, most)
        _watch_weight(prepared, name, granularity, most)


def recover(prepared: fx.GraphModule, context: Context, batches: Batches, config: Recovery) -> list[Effect]:
    """Correct a calibrated model in place: the rounding of its weights, and its biases.

    Args:
        prepared: with observers that have seen images, on ``context.device``, in eval mode.
        context: preprocessing, device, seed, listener.
        batches: calibration images.
        config: which corrections to make.

    Returns:
        The effects on each layer, empty if no correction is requested.
    """
    if config.rounding == "nearest" and not config.bias_correction:
        return []
    images = [normalise(batch, context.preprocessing, context.device, torch.float32) for batch, _ in batches]
    effects: list[Effect] = []
    layers = weighted(prepared)
    grids = {name: weight_grid(prepared, name) for name in layers}
    for done, seen in enumerate(_walk(prepared, images), start=1):
        own = layers[seen.name]
        if config.rounding == "adaround":
            known = is_fixed(prepared, seen.name)
            rounding = Rounding(*grids[seen.name], steps=config.rounding_steps, seed=context.seed, known=known)
            learned = learn_rounding(own, seen.given, seen.expected, rounding)
            for layer in (own, seen.layer):
                layer.weight.data = learned.weight.clone()
            effects.append(Effect(seen.name, ERROR, learned.nearest_error, learned.error))
        if config.bias_correction:
            effects += _correct(own, seen)
        context.listener.progressed(done / len(layers), "recovering")
    return effects


@dataclass(frozen=True)
class _Seen:
    """A layer in the simulated model, with its inputs there and the float layer's outputs, by batch."""

    name: str
    layer: nn.Module
    given: list[torch.Tensor]
    expected: list[torch.Tensor]


def _walk(prepared: fx.GraphModule, images: Sequence[torch.Tensor]) -> Iterator[_Seen]:
    """Yield each layer with weights in the graph's order. Later layers see its changes."""
    rounding, plain = _Stream(simulated(prepared), images), _Stream(unwatched(prepared), images)
    names = frozenset(weighted(prepared))
    for number, node in enumerate(list(rounding.module.graph.nodes)):
        twin = plain.nodes[number]
        if node.op == "call_module" and str(node.target) in names:
            plain.enter(twin)
            yield _Seen(str(node.target), rounding.layer(node), rounding.inputs(node), plain.outputs(twin))
            plain.leave(twin)
            rounding.enter(node)
            rounding.leave(node)
        else:
            rounding.step(node)
            plain.step(twin)


class _Stream:
    """Several batches that run through a graph, node by node."""

    def __init__(self, module: fx.GraphModule, images: Sequence[torch.Tensor]) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self._runs = [fx.Interpreter(module, garbage_collect_values=False) for _ in images]
        for run, batch in zip(self._runs, images, strict=True):
            run.args_iter = iter([batch])
        self._last = {used: node for node in self.nodes for used in node.all_input_nodes}

    @torch.no_grad()
    def step(self, node: fx.Node) -> None:
        """Compute a node for all batches."""
        for run in self._runs:
            run.env[node] = run.run_node(node)
        self._forget(node)

    def layer(self, node: fx.Node) -> nn.Module:
        """Return the layer that a node calls, without its fused ReLU."""
        called = self.module.get_submodule(str(node.target))
        return called[0] if isinstance(called, _FusedModule) else called

    def inputs(self, node: fx.Node) -> list[torch.Tensor]:
        """Return the inputs of a layer, by batch."""
        return [run.env[node.all_input_nodes[0]] for run in self._runs]

    @torch.no_grad()
    def enter(self, node: fx.Node) -> None:
        """Compute a layer for all batches, without its ReLU."""
        for run, given in zip(self._runs, self.inputs(node), strict=True):
            run.env[node] = self.layer(node)(given)

    def outputs(self, node: fx.Node) -> list[torch.Tensor]:
        """Return the computed values of a node, by batch."""
        return [run.env[node] for run in self._runs]

    @torch.no_grad()
    def leave(self, node: fx.Node) -> None:
        """Compute the fused ReLU of a layer."""
        called = self.module.get_submodule(str(node.target))
        if isinstance(called, _FusedModule):
            for run in self._runs:
                run.env[node] = called[1](run.env[node])
        self._forget(node)

    def _forget(self, node: fx.Node) -> None:
        for used in node.all_input_nodes:
            if self._last[used] is node:
                for run in self._runs:
                    run.env.pop(used, None)


@torch.no_grad()
def _correct(own: nn.Module, seen: _Seen) -> list[Effect]:
    """Shift the bias of a layer and of its simulated twin by the mean error of the twin's output.

    Source: Nagel et al. 2019 (arXiv:1906.04721), section 4.2, with measured means (their appendix D).
    """
    found = [seen.layer(batch) for batch in seen.given]
    axis = -1 if isinstance(own, nn.Linear) else 1
    shift = _channel_means([e - f for e, f in zip(seen.expected, found, strict=True)], axis)
    for layer in (own, seen.layer):
        if getattr(layer, "bias", None) is None:
            layer.bias = nn.Parameter(torch.zeros_like(shift))
        layer.bias.data = layer.bias.data + shift  # type: ignore[operator]
    after = [seen.layer(batch) for batch in seen.given]
    left = _channel_means([e - a for e, a in zip(seen.expected, after, strict=True)], axis)
    expected = torch.cat([batch.flatten() for batch in seen.expected])
    deviation = float(expected.std(unbiased=False).clamp(min=1e-12))
    ratios = [sqnr(expected.cpu(), torch.cat([b.flatten() for b in batches]).cpu()) for batches in (found, after)]
    rms = [float(means.square().mean().sqrt()) / deviation for means in (shift, left)]
    return [Effect(seen.name, SHIFT, *rms), Effect(seen.name, SQNR, *(min(ratio, 999.0) for ratio in ratios))]


def _channel_means(batches: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
    """Mean of each channel, which lies along ``axis``, over all batches and places: ``(C,)``."""
    rows = [batch.movedim(axis, -1).flatten(0, -2) for batch in batches]
    total = sum((row.double().sum(0) for row in rows), start=torch.zeros((), device=rows[0].device).double())
    return (total / sum(len(row) for row in rows)).float()


def _watch_weight(prepared: fx.GraphModule, name: str, granularity: Granularity, most: int) -> None:
    called = prepared.get_submodule(name)
    qconfig: QConfig = called.qconfig  # type: ignore[assignment]
    called.qconfig = QConfig(qconfig.activation, weight_observer("minmax", granularity, -most, most))  # type: ignore[assignment, no-untyped-call]
