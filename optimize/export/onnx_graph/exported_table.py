"""The rewrites on the way to an ONNX file, in their order, with the library faults that they work around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import onnx
from torch import fx, nn
from torch.export import ExportedProgram

from optimize.export.onnx_graph.decompositions import decomposed_where_needed
from optimize.export.onnx_graph.engine_rewrites import (
    write_out_attention,
    write_out_bounds,
    write_out_circles,
    write_out_copies,
    write_out_norms,
    write_out_slopes,
)
from optimize.export.onnx_graph.float_layers import keep_in_float
from optimize.export.onnx_graph.gradients import nothing_learned
from optimize.export.onnx_graph.image_quantizer import cast_first, keep_rounding
from optimize.export.onnx_graph.pool_rewrites import (
    part_borders,
    write_out_maxima,
    write_out_means,
    write_out_shares,
)
from optimize.export.onnx_graph.rule_memory import let_go
from optimize.export.onnx_graph.translations import read_once
from optimize.export.onnx_graph.type_promotion import promoted_by_notes
from optimize.export.onnx_graph.untranslated import write_out_untranslated
from optimize.export.onnx_graph.variances import write_out_deviations
from optimize.tracing.aten_program import unplaced
from optimize.tracing.rewrite_table import Fault, Rewrite, Table, by_graph_alone

_TORCH: Final = "2.11 to 2.14"
_OPENVINO: Final = "2026.4.1"
_ONNXRUNTIME: Final = "1.31"


def _on_graph(write: Callable[[fx.GraphModule], Any]) -> Callable[[ExportedProgram, None], Any]:
    return lambda program, _: write(program.graph_module)


#: Rewrites that hold during an export. Their records return context managers.
EXPORTING: Final = Table[nn.Module, None](
    "around the export",
    (
        Rewrite(
            "nothing-learned",
            "Turns the gradients of all parameters off during the export.",
            by_graph_alone(nothing_learned),
            faults=(Fault("torch.onnx", "2.14", "the export of a MaxViT that takes pixels fails"),),
        ),
        Rewrite(
            "no-source-lines",
            "Stops torch from recording the source lines of each node.",
            lambda module, _: unplaced(),
            faults=(Fault("torch", _TORCH, "a tenth of the time to write an int8 graph", costs="speed"),),
        ),
        Rewrite(
            "read-translations-once",
            "Gives each export a copy of the translations that the first one read.",
            lambda module, _: read_once(),
            faults=(
                Fault("torch.onnx", _TORCH, "half a second of the 0.8 s that a small network takes", costs="speed"),
            ),
        ),
        Rewrite(
            "decompose-where-needed",
            "Lets the exporter trace a program again only if a part of it must be decomposed.",
            lambda module, _: decomposed_where_needed(),
            faults=(Fault("torch.onnx", _TORCH, "a third to three quarters of an export's time", costs="speed"),),
        ),
        Rewrite(
            "promote-by-notes",
            "Lets the exporter promote types by the types noted at nodes, without running the program.",
            lambda module, _: promoted_by_notes(),
            faults=(
                Fault(
                    "torch.onnx", _TORCH, "a tenth of the time of an export, a fifth for an int8 graph", costs="speed"
                ),
            ),
        ),
        Rewrite(
            "release-weights",
            "Makes the exporter's rules release the weights of the graph that they saw last.",
            lambda module, _: let_go(),
            faults=(Fault("torch.onnx", "onnxscript 0.7.2", "160 MB held after an export of 160 MB", costs="memory"),),
        ),
    ),
)

#: An exported program, right before torch's exporter translates it.
EXPORTED: Final = Table[ExportedProgram, None](
    "exported program",
    (
        Rewrite(
            "pool-of-all-places",
            "Writes a pool over a whole map as a mean.",
            _on_graph(write_out_means),
            faults=(Fault("openvino", _OPENVINO),),
        ),
        Rewrite(
            "pool-divisors",
            "Writes averages that do not divide by the number of places as plain averages times a factor.",
            _on_graph(write_out_shares),
            faults=(
                Fault("torch.onnx", _TORCH),
                Fault("onnxruntime", _ONNXRUNTIME, "30 steps off"),
                Fault("openvino", _OPENVINO),
            ),
        ),
        Rewrite(
            "adaptive-maxima",
            "Writes an adaptive maximum as maxima of slices where its output size does not divide the image.",
            _on_graph(write_out_maxima),
            faults=(Fault("torch.onnx", _TORCH, "no translation"),),
        ),
        Rewrite(
            "padded-pools",
            "Puts a maximum with the lowest float between zero padding and a pool.",
            _on_graph(part_borders),
            after=("pool-divisors", "adaptive-maxima"),
            faults=(
                Fault("onnxruntime", _ONNXRUNTIME, "off by 1.2, with values from −1.5 to −0.5", "onnxruntime 18136"),
            ),
        ),
        Rewrite(
            "circular-borders",
            "Writes circular padding as a concatenation of slices.",
            _on_graph(write_out_circles),
            faults=(Fault("openvino", _OPENVINO, "the graph cannot be opened"),),
        ),
        Rewrite(
            "attention-rank",
            "Writes attention over more or fewer than four axes as attention over four.",
            _on_graph(write_out_attention),
            faults=(Fault("torch.onnx", "onnxscript 0.7.2", "no translation"),),
        ),
        Rewrite(
            "instance-norms",
            "Writes an instance norm that uses running statistics as a batch norm.",
            _on_graph(write_out_norms),
            faults=(Fault("openvino", _OPENVINO),),
        ),
        Rewrite(
            "random-slopes",
            "Writes a ReLU with a random slope in training as one with the mean slope.",
            _on_graph(write_out_slopes),
            faults=(Fault("torch.onnx", _TORCH, "no translation"),),
        ),
        Rewrite(
            "clamp-types",
            "Writes both bounds of a clamp of floats as floats.",
            _on_graph(write_out_bounds),
            faults=(Fault("torch.onnx", "2.14", "no translation of an integer and a float"),),
        ),
        Rewrite(
            "variances",
            "Writes variances and standard deviations as means.",
            _on_graph(write_out_deviations),
            faults=(Fault("openvino", _OPENVINO, "19.4 dB to the exact result of the integers, in a small network"),),
        ),
        Rewrite(
            "untranslated-operators",
            "Writes operators that the exporter cannot translate as operators that it can.",
            _on_graph(write_out_untranslated),
            faults=(Fault("torch.onnx", _TORCH, "no translation"),),
        ),
        Rewrite(
            "copies-for-each-image",
            "Adds a zero of each image to tensors that are the same for all images.",
            by_graph_alone(write_out_copies),
            after=("instance-norms", "variances", "untranslated-operators"),
            faults=(
                Fault(
                    "openvino",
                    _OPENVINO,
                    "−1.9 dB to the exact result of the integers in a small network, 4.8 dB in EdgeNeXt",
                ),
            ),
        ),
    ),
    behind=(EXPORTING,),
)

#: The ONNX graph as torch's exporter wrote it.
WRITTEN: Final = Table[onnx.ModelProto, None](
    "ONNX graph",
    (
        Rewrite(
            "cast-pixels-first",
            "Makes all nodes read the float copy of integer pixels, also those that read the shape.",
            by_graph_alone(cast_first),
            faults=(Fault("tensorrt", "10 and 11"),),
        ),
    ),
    behind=(EXPORTED,),
)

#: An int8 graph for CPUs, as `onnx-int8` writes it.
WRITTEN_FOR_CPUS: Final = Table[onnx.ModelProto, None](
    "int8 ONNX graph for CPUs",
    (
        Rewrite(
            "float-layers",
            "Dequantizes the inputs of float layers per channel, with one scale for all channels.",
            by_graph_alone(keep_in_float),
            faults=(Fault("onnxruntime", _ONNXRUNTIME, issue="onnxruntime 22969"),),
        ),
        Rewrite(
            "image-quantizer",
            "Casts pixels to int32 first where the quantizer's result is nearly the pixels.",
            by_graph_alone(keep_rounding),
            faults=(
                Fault(
                    "openvino",
                    _OPENVINO,
                    "9 % of a layer's integers up to 3 steps off, 2.5 % of answers differ, in a small network",
                ),
            ),
        ),
    ),
    behind=(WRITTEN,),
)
