"""What the installed libraries make of a network, in figures of which larger ones are better."""

from __future__ import annotations

import multiprocessing
import tempfile
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from torch import fx, nn

from benchmarks.workarounds.networks import SHOWN, Shown
from benchmarks.workarounds.stages import blocks, graph, normalised, pixels, prepared, quantized
from optimize.export.onnx_graph.write import run_onnx
from optimize.quantization.convert import quantized_layers
from optimize.tracing.rewrite_table import Fault, Library, left_out
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.errors import one_line

#: By library, the packages that may hold it.
_PACKAGES: Final[dict[Library, tuple[str, ...]]] = {
    "onednn": (),  # a part of torch and of OpenVINO
    "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
    "openvino": ("openvino",),
    "tensorrt": ("tensorrt",),
    "torch": ("torch",),
    "torch.ao": ("torch",),
    "torch.onnx": ("torch",),
}
#: Beyond this, in dB, answers are the same.
_SAME_DB: Final = 80.0
#: A figure has fallen if it is less by more.
MARGIN: Final = 1.0
#: Seconds that a network may take in an engine.
_PATIENCE: Final = 120.0


def runs_in(fault: Fault) -> Library:
    """The library that shows a fault: of oneDNN, the one that it was seen in."""
    if fault.library != "onednn":
        return fault.library
    return "openvino" if fault.seen.startswith("openvino") else "torch"


def installed(library: Library) -> str | None:
    """The version of a library that is installed; None: there is none."""
    for package in _PACKAGES[library]:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def figures(shown: Shown, library: Library) -> list[float]:
    """What a library makes of a network.

    Of torch.ao: how many layers are in integers, and how well the integers follow the float network, and torch's packed
    program and the graph the integers. Of torch: the packed program. Of others: how well answers of the graph follow
    what it means, in dB. Of a network that is prepared for training: how many layers are trained for integers.
    """
    if shown.training:
        return [float(sum(hasattr(layer, "weight_fake_quant") for layer in prepared(shown).modules()))]
    given = torch.cat([pixels(shown, 8, 7), blocks(shown)])
    images, network = normalised(shown, given), shown.network()
    if not shown.quantized:
        return [_decibels(_computed(network, images), _answers(shown, library, given))]
    packed, form = quantized(shown)
    meant = _computed(form, images)
    if library not in ("torch", "torch.ao"):
        return [_decibels(meant, _answers(shown, library, given))]
    follows = [] if packed is None else [_decibels(meant, _computed(packed, images))]
    if library == "torch":
        return follows
    layers = _weights(form) if packed is None else quantized_layers(packed)
    literally = _decibels(meant, _answers(shown, "torch.onnx", given))
    return [float(layers), _decibels(_computed(network, images), meant), *follows, literally]


def _computed(module: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(images.clone())  # a network may change its images in place
    return found


def _answers(shown: Shown, library: Library, given: torch.Tensor) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = graph(shown, Path(folder))
        if library == "openvino":
            (found,) = compile_bytes(path.read_bytes(), 1)(given.numpy()).values()
            return torch.from_numpy(found)
        answers: torch.Tensor = run_onnx(path, given, literal=library == "torch.onnx")
        return answers


def _weights(form: fx.GraphModule) -> int:
    return sum("dequantize_per_channel" in str(node.target) for node in form.graph.nodes)


def _decibels(meant: torch.Tensor, found: torch.Tensor) -> float:
    noise = (meant.double() - found.double()).square().sum()
    found_db = float(10 * torch.log10(meant.double().square().sum() / noise))
    return min(found_db, _SAME_DB) if found_db == found_db else -_SAME_DB  # noqa: PLR0124 - NaN


def outcome(name: str, library: Library, *, without: bool) -> list[float] | str:
    """`figures` of a record's network, in a process of its own, with the record or without it.

    Returns:
        The figures, or in a line why there are none.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(there, name, library, without))
    process.start()
    there.close()
    try:
        found: list[float] | str = here.recv() if here.poll(_PATIENCE) else f"no answer in {_PATIENCE:g} s"
    except EOFError:
        process.join()
        found = f"the process ended with code {process.exitcode}"
    process.kill()
    process.join()
    return found


def _tell(there: Connection, name: str, library: Library, without: bool) -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        with left_out(*[name] * without):
            there.send(figures(SHOWN[name], library))
    except Exception as error:  # noqa: BLE001 - whatever a library raises
        there.send(one_line(error)[:160])
