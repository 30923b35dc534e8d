"""What comes out of a stage for a network, as text that two graphs share only if they are the same."""

from __future__ import annotations

import gc
import hashlib
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from torch import fx, nn
from torch.export import ExportedProgram

from benchmarks.workarounds.networks import Shown
from optimize.export.onnx_graph.exported_table import EXPORTED, EXPORTING, WRITTEN, WRITTEN_FOR_CPUS
from optimize.export.onnx_graph.pixel_input import entered
from optimize.export.onnx_graph.write import export_onnx
from optimize.quantization.choices import Chosen
from optimize.quantization.convert import choose, packed_form, prepare, trace_calls
from optimize.quantization.lowering.lowered_table import EXPLICIT, LOWERED, REQUANTIZED, Lowering
from optimize.quantization.lowering.packed_table import PACKED
from optimize.quantization.lowering.qdq import lower, reference_form, reference_program, rewritten
from optimize.quantization.observers import settle_weights
from optimize.quantization.prepared_table import OBSERVED, UNOBSERVED
from optimize.quantization.rewrites.traced_table import TRACED
from optimize.quantization.targets import Target, target_named
from optimize.tracing.aten_program import required_program
from optimize.tracing.rewrite_table import Table
from serve.runtime.card.card import Preprocessing


def target_of(shown: Shown) -> Target:
    """The integers that a network is quantized for."""
    target = target_named(shown.target)
    return target if shown.bits == 8 else target.fewer(shown.bits)


def preprocessing(shown: Shown) -> Preprocessing:
    """What is done to pixels."""
    mean, std = ((0.5,) * 3, (0.5,) * 3) if shown.grey else ((0.45, 0.45, 0.4), (0.23, 0.22, 0.22))
    return Preprocessing(shown.side, (shown.side, shown.side), mean=mean, std=std)


def pixels(shown: Shown, images: int, seed: int = 0) -> torch.Tensor:
    """``uint8 (images, 3, side, side)`` noise."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (images, 3, shown.side, shown.side), dtype=torch.uint8, generator=generator)


def blocks(shown: Shown) -> torch.Tensor:
    """Images of few places, which layers answer more to than to noise."""
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(0, 2, (8, 3, 2, 2), generator=generator) * 255
    return places.repeat_interleave(shown.side // 2, 2).repeat_interleave(shown.side // 2, 3).to(torch.uint8)


def normalised(shown: Shown, given: torch.Tensor) -> torch.Tensor:
    """What networks are given of pixels."""
    images: torch.Tensor = entered(nn.Identity(), "uint8", preprocessing(shown))(given)
    return images


def traced(shown: Shown) -> fx.GraphModule:
    """The network, traced for quantization."""
    return trace_calls(shown.network(), normalised(shown, pixels(shown, 2)), lambda name: name in shown.keep_float)


def prepared(shown: Shown) -> fx.GraphModule:
    """The same with observers, which have seen some images, or with fake-quantize modules."""
    target, example = target_of(shown), normalised(shown, pixels(shown, 4))
    module = traced(shown)
    if shown.training:
        return prepare(module.train(), target.quantization_aware(100), example, target)
    mapping = choose(module, target.post_training("minmax"), Chosen(frozenset(shown.keep_float), {}))
    found = prepare(module, mapping, example, target)
    grey = torch.arange(0, 256, 17, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, shown.side, shown.side)
    for images in (pixels(shown, 16), blocks(shown)) if shown.seen else (grey,):
        found(normalised(shown, images))
    settle_weights(found, example)
    return found


def quantized(shown: Shown) -> tuple[fx.GraphModule | None, fx.GraphModule]:
    """The packed program, if torch has kernels for it, and the reference form."""
    target, example, observed = target_of(shown), normalised(shown, pixels(shown, 4)), prepared(shown)
    if target.packed:
        return packed_form(observed, example, target)
    return None, reference_form(observed, example, target.backend_config())


def program(shown: Shown) -> ExportedProgram:
    """The reference program."""
    return reference_program(quantized(shown)[1], normalised(shown, pixels(shown, 4)))


def graph(shown: Shown, folder: Path) -> Path:
    """The ONNX file that takes pixels, of the quantized network, or of the float one."""
    path = folder / "model.onnx"
    if not shown.quantized:
        export_onnx(entered(shown.network(), "uint8", preprocessing(shown)), pixels(shown, 4), path)
        return path
    target = target_of(shown)
    enter: Callable[[nn.Module], nn.Module] = lambda module: entered(module, "uint8", preprocessing(shown))  # noqa: E731
    lower(program(shown), pixels(shown, 4), path, target, enter, exact_sums=shown.exact_sums)
    if target.packed:
        model = onnx.load(path)
        WRITTEN_FOR_CPUS.run(model, None)
        onnx.save(model, path)
    return path


def _packed_text(shown: Shown) -> str:
    packed, form = quantized(shown)
    return text(form) + (text(packed) if packed is not None else "")


def _lowered_text(shown: Shown) -> str:
    return text(rewritten(program(shown), Lowering(target_of(shown), shown.exact_sums))[0])


def _exported_text(shown: Shown) -> str:
    module: nn.Module = shown.network()
    if shown.quantized:
        module, _ = rewritten(program(shown), Lowering(target_of(shown)))
    exported = required_program(module, normalised(shown, pixels(shown, 4)))
    EXPORTED.run(exported, None)
    return text(exported.graph_module)


def _exporting_text(shown: Shown) -> str:
    """What is other while a network is exported, and how much of it is held afterwards."""
    from torch.onnx._internal.exporter import _fx_passes, _registration

    config: Any = fx.config
    network = shown.network()
    with EXPORTING.around(network, None):
        inside = [
            str([parameter.requires_grad for parameter in network.parameters()]),
            str(getattr(config, "do_not_emit_stack_traces", False)),
            _registration.ONNXRegistry.from_torchlib.__qualname__,
            _fx_passes.decompose_with_registry.__qualname__,
            _fx_passes.insert_type_promotion_nodes.__qualname__,
        ]
    held = [weakref.ref(parameter) for parameter in network.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(network, normalised(shown, pixels(shown, 2)), Path(folder) / "model.onnx")
    del network
    gc.collect()
    return "\n".join([*inside, str(sum(one() is not None for one in held))])


def _graph_text(shown: Shown) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return hashlib.sha256(graph(shown, Path(folder)).read_bytes()).hexdigest()


#: What a table is seen by.
TEXTS: Final[tuple[tuple[Table[Any, Any], Callable[[Shown], str]], ...]] = (
    (TRACED, lambda shown: text(traced(shown))),
    (UNOBSERVED, lambda shown: text(prepared(shown))),
    (OBSERVED, lambda shown: text(prepared(shown))),
    (EXPLICIT, lambda shown: text(quantized(shown)[1])),
    (PACKED, _packed_text),
    (REQUANTIZED, _lowered_text),
    (LOWERED, _lowered_text),
    (EXPORTING, _exporting_text),
    (EXPORTED, _exported_text),
    (WRITTEN, _graph_text),
    (WRITTEN_FOR_CPUS, _graph_text),
)


def text(module: fx.GraphModule) -> str:
    """Nodes, layers and tensors of a graph; which of them are the same object, and what watches them."""
    return "\n".join([*_nodes(module), *_layers(module), *_tensors(module)])


def _nodes(module: fx.GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", str(node.target))
        yield f"{node.name} {node.op} {target} {node.args} {node.kwargs}"


def _layers(module: fx.GraphModule) -> Iterator[str]:
    first: dict[int, str] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if name:
            same = first.setdefault(id(layer), name)
            yield f"{name} {same} {type(layer).__name__} {layer.extra_repr()} {len(layer._forward_pre_hooks)}"


def _tensors(module: fx.GraphModule) -> Iterator[str]:
    first: dict[int, str] = {}
    kept = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    packed = [
        (f"{name}.{place}", tensor)
        for name, layer in module.named_modules()
        if callable(getattr(layer, "_weight_bias", None))
        for place, tensor in enumerate(layer._weight_bias())
        if tensor is not None
    ]
    for name, tensor in (*kept, *packed):
        whole = tensor.int_repr() if tensor.is_quantized else tensor
        numbers = whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        same = first.setdefault(id(tensor), name)
        yield f"{name} {same} {tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(numbers).hexdigest()[:16]}"
