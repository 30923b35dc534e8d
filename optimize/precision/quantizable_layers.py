"""Finds the layers of a network that can be quantized, and ranks them by a simulation before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import fx

from optimize.context import Context
from optimize.measure.machine import versions
from optimize.passes.ptq import Ptq
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import Override, resolve
from optimize.quantization.gate import sqnr
from optimize.quantization.graph.repeated_calls import called_layer
from optimize.quantization.observer_choice import Observer
from optimize.quantization.simulate import each_alone, weighted
from optimize.quantization.static import calibrating, observer_of, observing
from optimize.quantization.targets import x86_target
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.store.atomic_files import write_json
from optimize.store.keys import RanksKey, content
from optimize.store.sources import code_of
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from serve.runtime.outputs import Answer, Outputs, as_outputs

#: Number of calibration images on which the answers of each simulation are compared.
_JUDGED: Final = 64
_FILE: Final = "ranks.json"


def layers_of(parent: Artifact, config: Ptq, context: Context) -> dict[str, int]:
    """Return the layers that ``ptq`` would quantize, in the graph's order, each with its number of weights.

    Names are those of the model's own code. The projections of an attention that is written out count as the
    attention's.

    Raises:
        UserError: there is none.
    """
    found: dict[str, int] = {}
    own, called = _own_names(parent), set()
    for name, layer in weighted(_observed(parent, config, context)("minmax")).items():  # any observer will do
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        once = called_layer(name)
        if once not in called:
            owner = _owner(once, own)
            found[owner] = found.get(owner, 0) + weight.numel()
            called.add(once)
    if not found:
        raise UserError(f"{parent.name} has no layer that ptq can quantize: no convolution and no linear layer")
    return found


def ranks(session: Session, parent: Artifact, config: Ptq) -> tuple[dict[str, float], str]:
    """Return the least SQNR of an output in dB with each layer alone quantized.

    It is simulated in torch on calibration images.

    Nothing runs as it would be served, and no evaluation image is used: this only says where to look first. A result in
    the store is used again.

    Returns:
        The figures by layer, and their key in the store.
    """
    context = session.context
    key = RanksKey(
        config=config.model_dump(mode="json"),
        ancestors=tuple(content(artifact.card) for artifact in parent.line()),
        target=x86_target().name,
        device=context.device.type,
        libraries={"torch": versions().get("torch")},
        code=code_of(_ranks),
        **session.surroundings(),
    )

    def build(folder: Path) -> None:
        write_json(_ranks(parent, config, context), folder / _FILE)

    about = f"{session.source.name} on {context.data.name}: ranks of layers"
    stored = session.store.obtain(key.digest, build, about=about)
    found: dict[str, float] = json.loads((stored.folder / _FILE).read_text(encoding="utf-8"))
    return found, key.digest


def _ranks(parent: Artifact, config: Ptq, context: Context) -> dict[str, float]:
    observed, shown = _observed(parent, config, context), calibrating(config, context)
    observer, _ = observer_of(config, observed, parent.module(), context, shown)
    prepared = observed(observer).to(context.device)
    calibrate(prepared, context, shown)
    # Clipped weights of all layers would count for each layer.
    whole = config.model_copy(update={"weight_observer": "minmax", "overrides": _whole(config.overrides)})
    plain = _observed(parent, whole, context)(observer).to(context.device)
    images = normalise(context.pixels(_JUDGED), context.preprocessing, context.device, torch.float32)
    own = _own_names(parent)
    found: dict[str, float] = {}
    with torch.no_grad():
        expected = _on_cpu(parent.module().to(context.device)(images))
        for name, module in each_alone(prepared, plain):
            layer, ratio = _owner(called_layer(name), own), sqnr(expected, _on_cpu(module(images)))
            # JSON has no infinity. No quantized layer reaches a tenth of this.
            found[layer] = min(found.get(layer, 1e3), max(ratio, -1e3))
    return found


def _on_cpu(answer: Answer) -> Outputs:
    return tuple(output.cpu() for output in as_outputs(answer))


def _observed(parent: Artifact, config: Ptq, context: Context) -> Callable[[Observer], fx.GraphModule]:
    """Return the function that makes the network with observers, as ``ptq`` would."""
    chosen = resolve(next(parent.line()).module, config)
    return observing(parent.module, config, chosen, context.example())


def _whole(overrides: Mapping[str, Override]) -> dict[str, Override]:
    """Return the choices for single layers, with the whole range of their weights."""
    return {name: {**own, "weight_observer": "minmax"} for name, own in overrides.items()}


def _own_names(parent: Artifact) -> frozenset[str]:
    """Return the names of the modules in the model's own code, which ``keep_float`` can name."""
    return frozenset(name for name, _ in next(parent.line()).module().named_modules())


def _owner(name: str, own: frozenset[str]) -> str:
    """Return the module of the model's own code that a layer is, or is a part of."""
    owner = name
    while owner and owner not in own:
        owner = owner.rpartition(".")[0]
    return owner or name
