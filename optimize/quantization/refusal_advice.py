"""Says which layers of a refused int8 network lose most, and what would hold. It is tried in a simulation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import torch
from torch import nn

from optimize.context import Context
from optimize.errors import PassError
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import resolve
from optimize.quantization.gate import IMAGES, check_answers, sqnr
from optimize.quantization.graph.repeated_calls import called_layer
from optimize.quantization.recovery.concatenations import level
from optimize.quantization.simulate import each_alone, simulated
from optimize.quantization.static import Static, calibrating, observer_of, observing
from optimize.store.artifact import Artifact
from optimize.tracing.trace import trace
from serve.runtime.outputs import Answer, Outputs, as_outputs

#: So many layers are named, and so many of the worst ones are tried in float. Each trial calibrates once.
_NAMED: Final = 3
_TRIED: Final = (1, 2, 4, 8)
_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _Trials:
    """Quantizes the network of one artifact in a simulation, with other settings or weights than those refused."""

    def __init__(self, parent: Artifact, config: Static, context: Context) -> None:
        self._parent, self._config, self._context = parent, config, context
        self._original = next(parent.line()).module
        self.shown, self.images = calibrating(config, context), context.example(IMAGES).to(context.device)
        with torch.no_grad():
            self.expected = _on_cpu(parent.module().to(context.device)(self.images))
        start = self._observing(parent.module, config)
        self._observer, _ = observer_of(config, start, parent.module(), context, self.shown)

    def _observing(self, load: Callable[[], nn.Module], config: Static) -> Callable[..., torch.fx.GraphModule]:
        return observing(load, config, resolve(self._original, config), self._context.example())

    def losses(self) -> dict[str, float]:
        """Return the least SQNR of an output in dB with each layer alone in int8, the worst first."""
        observed = self._observing(self._parent.module, self._config)
        prepared, plain = (observed(self._observer).to(self._context.device) for _ in range(2))
        calibrate(prepared, self._context, self.shown)
        own = {name for name, _ in self._original().named_modules()}
        found: dict[str, float] = {}
        with torch.no_grad():
            for name, module in each_alone(prepared, plain):
                layer, ratio = called_layer(name), sqnr(self.expected, _on_cpu(module(self.images)))
                if layer in own:  # others cannot be named in settings
                    found[layer] = min(found.get(layer, ratio), ratio)
        return dict(sorted(found.items(), key=lambda entry: entry[1]))

    def held(self, *, load: Callable[[], nn.Module] | None = None, keep_float: list[str] | None = None) -> float | None:
        """Return the least SQNR in dB with other weights or settings. None: it would be refused, too."""
        config = self._config.model_copy(update={"keep_float": [*self._config.keep_float, *(keep_float or [])]})
        prepared = self._observing(load or self._parent.module, config)(self._observer).to(self._context.device)
        calibrate(prepared, self._context, self.shown)
        with torch.no_grad():
            found = _on_cpu(simulated(prepared)(self.images))
        try:
            check_answers(self.expected, found, config, "", task=self._context.task, names=self._parent.card.outputs)
        except PassError:
            return None
        return sqnr(self.expected, found)

    def levelled(self) -> nn.Module | None:
        """Return the network with levelled concatenations. None: there is nothing to level."""
        module = trace(self._parent.module())
        if any(isinstance(layer, _NORMS) for layer in module.modules()):
            return None  # `equalize` comes after `fuse`
        return module if level(module, self._context.example(IMAGES)) else None


def advice(parent: Artifact, config: Static, context: Context) -> str:
    """Return what to do about an int8 network that is refused, in one line.

    Args:
        parent: the float module.
        config: the refused settings.
        context: data, preprocessing and device.
    """
    trials = _Trials(parent, config, context)
    losses = trials.losses()
    worst = ", ".join(f"{name} ({ratio:.1f} dB)" for name, ratio in list(losses.items())[:_NAMED])
    found = [f"alone in int8, these layers lose most: {worst}"] if worst else []
    held = []
    if (levelled := trials.levelled()) is not None and (
        ratio := trials.held(load=lambda: copy.deepcopy(levelled))
    ) is not None:
        held.append(f"equalize before it, {ratio:.1f} dB")
    for count in _TRIED:
        names = list(losses)[:count]
        if 2 * len(names) > len(losses):
            break
        if (ratio := trials.held(keep_float=names)) is not None:
            held.append(f"keep_float: [{', '.join(names)}], {ratio:.1f} dB")
            break
    simulated_well = f"in a simulation this holds: {'; or '.join(held)}"
    found.append(simulated_well if held else "not even several of them in float would suffice: train it with qat")
    return "; ".join(found)


def _on_cpu(answer: Answer) -> Outputs:
    return tuple(output.cpu() for output in as_outputs(answer))
