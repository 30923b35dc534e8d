"""``torchscript``: the operators that a TorchScript program runs, as torch's profiler times them.

A frozen program has no names of layers and no shapes. Those of an int8 program are its reference program's, which has
the same layers in the same order.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import fx

from optimize.export.macs import Work, program_work
from optimize.profiling.base import Piece, Reader, Reading, Subject, register
from optimize.profiling.names import called, layer_name
from optimize.profiling.operators import operator_calls, times
from optimize.store.artifact import REFERENCE_FILE
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.program_file import load_program

#: torch's int8 layers, and the operators of the reference program that they are.
_INT8_LAYER: Final = re.compile(r"quantized::(conv\d?d|linear)")
_LAYER: Final = re.compile(r"aten::(conv\d?d|linear)$")
_FLOAT, _INT8 = 4, 1  # bytes


def read(subject: Subject) -> Reading:
    """See `Reader`."""
    engine = subject.open()
    calls = operator_calls(subject, engine)
    operators = calls[-1][1]
    kinds = [found[1] for one in operators if (found := _INT8_LAYER.match(one.name))]
    layers = list(_reference(subject))
    if [kind for kind, _, _ in layers] != kinds:
        layers = []  # another program's: names would be guesses
    left = iter(layers)
    pieces: list[Piece] = []
    for place, operator in enumerate(operators):
        ms, start = times(calls, place)
        is_int8 = operator.name.startswith("quantized::")
        known = next(left, None) if _INT8_LAYER.match(operator.name) else None
        pieces.append(
            Piece(
                name=known[1] if known else f"{operator.name.partition('::')[2]} {place}",
                kind=operator.name.partition("::")[2],
                ms=ms,
                precision="int8" if is_int8 else None,
                work=known[2] if known else None,
                start_ms=start,
                after=(pieces[-1].name,) if pieces else (),
            )
        )
    note = "" if layers else "a TorchScript program has no shapes: MACs and bytes are not known"
    return Reading(tuple(pieces), 0, note)


def _reference(subject: Subject) -> Iterator[tuple[str, str, Work]]:
    """Kind, name and work of each layer of the reference program beside an int8 artifact, with bytes as int8."""
    if REFERENCE_FILE not in subject.card.files or subject.card.file == REFERENCE_FILE:
        return
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers its operators (torch 2.11 to 2.14)
    module: Any = load_program(subject.folder / REFERENCE_FILE).module()
    assert isinstance(module, fx.GraphModule)
    work = program_work(module, torch.zeros(len(subject.images), *subject.card.preprocessing.shape))
    computing = [node for node in module.graph.nodes if node.name in work and work[node.name].macs]
    names = called([work[node.name].macs for node in computing], subject.floats)
    named = dict(zip(computing, names or map(layer_name, computing), strict=True))
    for node in computing:
        schema = getattr(node.target, "_schema", None)
        found = _LAYER.match(schema.name) if schema is not None else None
        if found:
            one = work[node.name]
            sizes = (size // _FLOAT * _INT8 for size in (one.weights, one.read, one.written))
            yield found[1], named[node], Work(one.macs, *sizes)


def int8_product(side: int, threads: int) -> Callable[[], object]:
    """See `Reader`."""
    use_int8_kernels()
    weight = torch.randint(-127, 128, (side, side), dtype=torch.int8).float()
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(weight, 1.0, 0, torch.qint8), None)
    given = torch.quantize_per_tensor(torch.randint(0, 255, (side, side)).float(), 1.0, 0, torch.quint8)
    return lambda: torch.ops.quantized.linear(given, packed, 1000.0, 128)


TORCHSCRIPT = register(Reader("torchscript", read, int8_product))
