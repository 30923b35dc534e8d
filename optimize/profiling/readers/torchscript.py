"""``torchscript``: the operators that a TorchScript program runs, as torch's profiler times them.

A frozen program has no names of layers and no shapes. Those of an int8 program are taken from its reference program,
which has the same layers in the same order, in integers and in float.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from optimize.export.macs import Work, program_work
from optimize.profiling.base import Piece, Reader, Reading, Subject, register
from optimize.profiling.int8_products import activations, weights
from optimize.profiling.layer_names import called, layer_name
from optimize.profiling.operators import operator_calls, times
from optimize.quantization.graph.explicit_quantizers import quantizing
from optimize.store.artifact import REFERENCE_FILE
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program

#: The computing operators, in a program of torch's kernels and in a reference program, with the operators fused into
#: them. A frozen program calls each float convolution ``aten::_convolution``, whatever its dimensions (torch 2.11 to
#: 2.14).
_COMPUTES: Final = re.compile(
    r"(?:quantized|aten)::_?(conv|linear|matmul)(?:olution|(?:_transpose)?\d?d)?(?:_add)?(?:_relu|_leaky_relu|_tanh)?$"
)
_FLOAT, _INT8 = 4, 1  # bytes


@dataclass(frozen=True)
class _Known:
    """A layer of a reference program: its kind, whether it is int8, its name, its work."""

    kind: str
    is_int8: bool
    name: str
    work: Work


def read(subject: Subject) -> Reading:
    """See `Reader`."""
    engine = subject.open()
    calls = operator_calls(subject, engine)
    operators = calls[-1][1]
    computing = [(found[1], _is_int8(one.name)) for one in operators if (found := _COMPUTES.match(one.name))]
    layers, left_macs = _reference(subject)
    if [(layer.kind, layer.is_int8) for layer in layers] != computing:
        layers, left_macs = [], 0  # another program's layers: names would be guesses
    left = iter(layers)
    pieces: list[Piece] = []
    for place, operator in enumerate(operators):
        ms, start = times(calls, place)
        known = next(left, None) if _COMPUTES.match(operator.name) else None
        in_float = "float32" if known else None
        pieces.append(
            Piece(
                name=known.name if known else f"{operator.name.partition('::')[2]} {place}",
                kind=operator.name.partition("::")[2],
                ms=ms,
                precision="int8" if _is_int8(operator.name) else in_float,
                work=known.work if known else None,
                start_ms=start,
                after=(pieces[-1].name,) if pieces else (),
            )
        )
    note = "" if layers else "a TorchScript program has no shapes: MACs and bytes are not known"
    return Reading(tuple(pieces), left_macs, note)


def _is_int8(operator: str) -> bool:
    return operator.startswith("quantized::")


def _reference(subject: Subject) -> tuple[list[_Known], int]:
    """Return the computing layers of an int8 artifact's reference program, in order.

    Their bytes are those of the real program. Also returns the MACs of all other nodes.
    """
    if REFERENCE_FILE not in subject.card.files or subject.card.file == REFERENCE_FILE:
        return [], 0
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers its operators (torch 2.11 to 2.14)
    module: Any = load_program(subject.folder / REFERENCE_FILE).module()
    assert isinstance(module, fx.GraphModule)
    work = program_work(module, torch.zeros(len(subject.images), *subject.card.preprocessing.shape))
    computing = [node for node in module.graph.nodes if node.name in work and work[node.name].macs]
    names = called([work[node.name].macs for node in computing], subject.floats)
    found = list(_known(dict(zip(computing, names or map(layer_name, computing), strict=True)), work))
    return found, sum(work[node.name].macs for node in computing) - sum(layer.work.macs for layer in found)


def _known(named: Mapping[fx.Node, str], work: Mapping[str, Work]) -> Iterator[_Known]:
    for node, name in named.items():
        schema = getattr(node.target, "_schema", None)
        found = _COMPUTES.match(schema.name) if schema is not None else None
        if found:
            one = work[node.name]
            is_int8 = all(quantizing(given).startswith("dequantize") for given in node.args[:2])
            size = _INT8 if is_int8 else _FLOAT
            sizes = (each // _FLOAT * size for each in (one.weights, one.read, one.written))
            yield _Known(found[1], is_int8, name, Work(one.macs, *sizes))


def int8_product(side: int, threads: int) -> Callable[[], object]:
    """See `Reader`."""
    use_int8_kernels()
    weight = torch.from_numpy(weights(side)).float()
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(weight, 1.0, 0, torch.qint8), None)
    given = torch.quantize_per_tensor(torch.from_numpy(activations(side)).float(), 1.0, 0, torch.quint8)
    return lambda: torch.ops.quantized.linear(given, packed, 1000.0, 128)


TORCHSCRIPT = register(Reader("torchscript", read, int8_product))
