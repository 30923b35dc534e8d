"""``dynamic``: int8 weights of linear and recurrent layers, with activations quantized at run time (torch.ao).

Convolutions stay in float. On a convolutional network it changes little more than the head.
"""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import Field
from torch import nn
from torch.ao.quantization import default_dynamic_qconfig, per_channel_dynamic_qconfig, quantize_dynamic

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.export.program import write_script
from optimize.passes.base import Pass, register
from optimize.quantization.gate import IMAGES, Gate, check_answers
from optimize.store.artifact import Artifact, Product
from serve.runtime.device.cpu_integers import ANY_X86
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.script_file import load_script

_RECURRENT = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
# Their constructor arguments, beside sizes and biases.
_WORDS = ("num_layers", "batch_first", "dropout", "bidirectional", "proj_size", "nonlinearity")


class Dynamic(Gate):
    """Settings of ``dynamic``."""

    per_channel: bool = Field(
        default=True, description="use one weight scale per output of a linear layer instead of one per layer"
    )


def _called_layers(module: nn.Module, example: torch.Tensor) -> list[str]:
    """Return the names of the linear and recurrent layers that ``module`` calls, in its order.

    Layers whose weight is read instead are left out, as in Swin's attention and `nn.MultiheadAttention`. The weight of
    a quantized layer is packed, and torch fails on it.
    """
    called: set[nn.Module] = set()
    # The exact type: a subclass such as torch's NonDynamicallyQuantizableLinear has its reasons.
    layers = {name: layer for name, layer in module.named_modules() if type(layer) in (nn.Linear, *_RECURRENT)}
    handles = [layer.register_forward_pre_hook(lambda layer, _: called.add(layer)) for layer in layers.values()]
    with torch.no_grad():
        module(example)
    for handle in handles:
        handle.remove()
    return [name for name, layer in layers.items() if layer in called]


def _give_biases(module: nn.Module, names: list[str]) -> None:
    """Give recurrent layers without biases zero biases, in place.

    torch.ao (2.11 to 2.14) asserts that they have some.
    """
    for name in names:
        layer = module.get_submodule(name)
        if not isinstance(layer, _RECURRENT) or layer.bias:
            continue
        given = {word: value for word in _WORDS if (value := getattr(layer, word, None))}
        whole = type(layer)(layer.input_size, layer.hidden_size, **given)
        for parameter in whole.parameters():
            nn.init.zeros_(parameter)
        whole.load_state_dict(layer.state_dict(), strict=False)
        module.set_submodule(name, whole.train(layer.training))


def _apply(parent: Artifact, config: Dynamic, context: Context, folder: Path) -> Product:
    module = parent.module()
    names = _called_layers(module, context.example())
    if not names:
        raise NotApplicableError("the model has no linear or recurrent layer")
    _give_biases(module, names)
    use_int8_kernels()
    linear = per_channel_dynamic_qconfig if config.per_channel else default_dynamic_qconfig
    recipe = {
        name: linear if isinstance(module.get_submodule(name), nn.Linear) else default_dynamic_qconfig for name in names
    }
    quantized = quantize_dynamic(module, recipe)  # type: ignore[no-untyped-call]
    file = write_script(quantized, context.example(), folder)
    images = context.example(IMAGES)
    with torch.no_grad():
        # From its file, as it is served. The parent is loaded again, because quantizing removed layers from this one.
        found = load_script(folder / file, torch.device("cpu"))(images)
        expected = parent.module()(images)
    parties = "int8 linear layers against float arithmetic"
    note = check_answers(expected, found, config, parties, task=context.task, names=parent.card.outputs)
    return Product(
        file,
        "torchscript",
        precision="int8 linear layers",
        device="cpu",
        # Torch quantizes the inputs of these layers to 7 bits on any machine (`reduce_range`, 2.11 to 2.14).
        target=ANY_X86,
        notes=(f"{len(names)} layers quantized: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}", note),
    )


DYNAMIC = register(
    Pass(
        name="dynamic",
        summary="torch.ao dynamic quantization of linear and recurrent layers",
        config=Dynamic,
        accepts=frozenset({"module"}),
        yields="dynamic",
        apply=_apply,
    )
)
