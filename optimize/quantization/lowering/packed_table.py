"""The rewrites of torch's packed program, in their order. They make it give the integers of its reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from optimize.quantization.lowering.amx.narrow_groups import put_groups_together
from optimize.quantization.lowering.integer_biases import repack, round_biases
from optimize.quantization.lowering.lowered_table import EXPLICIT
from optimize.quantization.lowering.narrow_ranges import clamp_packed
from optimize.quantization.lowering.packed_views import reshape_views
from optimize.quantization.lowering.uneven_padding import embed_padding, pad_integers
from optimize.tracing.rewrite_table import Fault, Rewrite, Table, by_graph_alone

_TORCH: Final = "2.11 to 2.14"


@dataclass(frozen=True)
class Packing:
    """The data that rewrites of a packed program get.

    Attributes:
        form: the reference form. Its biases are rounded together with the program's.
        example: an input, ``float32 (N, C, H, W)``.
    """

    form: fx.GraphModule
    example: torch.Tensor


#: A converted network, and its reference form beside it.
PACKED: Final = Table[fx.GraphModule, Packing](
    "packed program",
    (
        Rewrite(
            "whole-biases",
            "Rounds biases to multiples of their products' scale, in the program and in its reference.",
            lambda converted, given: repack(converted, round_biases(given.form)),
            after=("integer-weights", "equal-nodes"),
            faults=(
                Fault(
                    "onnxruntime",
                    "1.31",
                    "14 of ResNet-18's layers miss 99.99 % of equal integers; biases beyond 32 bits wrap around",
                    "onnxruntime 22020",
                ),
            ),
        ),
        Rewrite(
            "padded-integers",
            "Pads integers where torch.ao dequantized them to pad.",
            lambda converted, given: pad_integers(converted, given.example),
            faults=(Fault("torch.ao", _TORCH, costs="speed"),),
        ),
        Rewrite(
            "embedded-padding",
            "Lets packed convolutions with padding that is uneven by one pad evenly, with a wider kernel.",
            by_graph_alone(embed_padding),
            after=("whole-biases", "padded-integers"),
            faults=(Fault("torch", "2.14", "a pad takes 0.1 to 0.4 ms, two cores", costs="speed"),),
        ),
        Rewrite(
            "packed-groups",
            "Joins narrow groups of packed convolutions, with zero weights between them.",
            lambda converted, given: put_groups_together(converted, given.example),
            after=("whole-biases", "embedded-padding"),
            faults=(Fault("onednn", "torch 2.14", "CPUBone −2 dB, with AMX"),),
        ),
        Rewrite(
            "packed-views",
            "Writes views as reshapes.",
            by_graph_alone(reshape_views),
            faults=(Fault("torch", _TORCH, "the view is refused"),),
        ),
        Rewrite(
            "packed-clamps",
            "Clamps the results of packed kernels to a range that is narrower than their type.",
            lambda converted, given: clamp_packed(converted, given.form.graph, given.example),
            after=("embedded-padding", "packed-groups"),
            faults=(Fault("torch", _TORCH),),
        ),
    ),
    behind=(EXPLICIT,),
)
