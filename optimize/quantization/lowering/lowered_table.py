"""The rewrites of a program with explicit quantizers until it becomes an ONNX graph, in their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from torch import fx

from optimize.quantization.lowering.amx.group_widths import border_groups
from optimize.quantization.lowering.amx.narrow_groups import put_explicit_groups_together
from optimize.quantization.lowering.clamps import round_clamps
from optimize.quantization.lowering.duplicates import merge_alike, write_aside
from optimize.quantization.lowering.folded_weights import drop_doubled, fold_weights
from optimize.quantization.lowering.narrow_ranges import NarrowRange, clamp_explicit
from optimize.quantization.lowering.openvino.borders import keep_borders
from optimize.quantization.lowering.openvino.concatenations import part_joined, read_joined
from optimize.quantization.lowering.openvino.extremes import keep_extremes
from optimize.quantization.lowering.openvino.norm_floors import raise_floors
from optimize.quantization.lowering.openvino.reductions import keep_reductions
from optimize.quantization.lowering.openvino.residual_sums import keep_sums
from optimize.quantization.lowering.softmax_shares import keep_shares
from optimize.quantization.lowering.tensorrt.one_row_pools import write_out_lines
from optimize.quantization.lowering.tensorrt.overlapping_patches import write_out_folds
from optimize.quantization.lowering.uneven_padding import Padding, put_padding, take_padding
from optimize.quantization.rewrites.resizes import write_out_resizes
from optimize.quantization.targets import Target
from optimize.tracing.rewrite_table import Fault, Rewrite, Table, by_graph_alone

_TORCH: Final = "2.11 to 2.14"
_OPENVINO: Final = "2026.4.1"
_ONNXRUNTIME: Final = "1.31"
_TENSORRT: Final = "10 and 11"


@dataclass(frozen=True)
class Lowering:
    """The data that rewrites get while a program is lowered.

    Attributes:
        target: the target of the integers.
        exact_sums: whether residual sums are kept apart from the layers that compute their addends. CPU targets only.
        taken: the padding that `padding-behind-quantizers` took away, for `layer-padding`.
        clamps: the clamps that `range-clamps` wrote.
    """

    target: Target
    exact_sums: bool = False
    taken: dict[fx.Node, Padding] = field(default_factory=dict)
    clamps: list[NarrowRange] = field(default_factory=list)


def _for_cpus(given: Lowering) -> bool:
    return given.target.packed


def _for_tensorrt(given: Lowering) -> bool:
    return not given.target.packed


#: A network with explicit quantizers, from the front end to the reference form.
EXPLICIT: Final = Table[fx.GraphModule, None](
    "reference form",
    (
        Rewrite(
            "in-place-operators",
            "Writes in-place operators as operators that return new tensors, where nobody reads the old one "
            "afterwards.",
            by_graph_alone(write_aside),
        ),
        Rewrite(
            "integer-weights",
            "Stores weights as the integers that torch computes, and other quantized constants as rounded floats.",
            by_graph_alone(fold_weights),
            faults=(Fault("torch.onnx", "2.13 and 2.14", "45 MB for ResNet-18, 11.3 with it", costs="memory"),),
        ),
        Rewrite(
            "repeated-pairs",
            "Removes pairs that dequantize and quantize again with the same scale.",
            by_graph_alone(drop_doubled),
        ),
        Rewrite(
            "equal-nodes",
            "Merges equal nodes, so that equal values are computed and quantized once.",
            by_graph_alone(merge_alike),
            after=("in-place-operators", "integer-weights", "repeated-pairs"),
            faults=(Fault("torch.onnx", _TORCH, "the graph has fewer quantizers than the program"),),
        ),
    ),
)

#: A reference program that becomes a graph: the rewrites that change which quantizers it has.
REQUANTIZED: Final = Table[fx.GraphModule, Lowering](
    "program whose quantizers move",
    (
        Rewrite(
            "concatenations-read-directly",
            "Lets ReLUs and arithmetic with constants read concatenations without the quantizer between them.",
            by_graph_alone(read_joined),
            when=_for_cpus,
            faults=(Fault("openvino", _OPENVINO, "the process ends by SIGSEGV"),),
        ),
        Rewrite(
            "padding-behind-quantizers",
            "Removes quantized zero padding in front of a convolution, until `layer-padding`.",
            lambda module, given: given.taken.update(take_padding(module)),
            faults=(
                Fault("onnxruntime", _ONNXRUNTIME, "EfficientNet-Lite0 8.7 ms, its float graph 7.0", costs="speed"),
            ),
        ),
    ),
    behind=(EXPLICIT,),
)

#: The same program afterwards. None of these rewrites changes which quantizers it has.
LOWERED: Final = Table[fx.GraphModule, Lowering](
    "program for the exporter",
    (
        Rewrite(
            "clamp-ends",
            "Rounds the bounds of a clamp between quantizers of one scale to that scale's steps.",
            by_graph_alone(round_clamps),
            faults=(Fault("openvino", _OPENVINO, "28 dB to the exact result of the integers, in a small network"),),
        ),
        Rewrite(
            "range-clamps",
            "Writes a clamp for each activation range that is narrower than its integer type.",
            lambda module, given: given.clamps.extend(clamp_explicit(module)),
            after=("clamp-ends",),
            faults=(Fault("torch.onnx", _TORCH, issue="onnxscript 3052"),),
        ),
        Rewrite(
            "norm-floors",
            "Raises the lower bound of a norm that divides quantized values from zero to half a step.",
            by_graph_alone(raise_floors),
            faults=(
                Fault(
                    "openvino",
                    _OPENVINO,
                    "Swin-V2 2.1 dB to the exact result of its integers, and 59 % of answers; 15.1 dB and 98 % with it",
                ),
            ),
        ),
        Rewrite(
            "resize-products",
            "Writes cubic and antialiased resizes as two matrix products with constants.",
            by_graph_alone(write_out_resizes),
            faults=(
                Fault("tensorrt", _TENSORRT, "the parser accepts neither"),
                Fault("onnxruntime", _ONNXRUNTIME, "its kernel refuses to make a map smaller"),
            ),
        ),
        Rewrite(
            "integer-reductions",
            "Puts a maximum with the lowest float in front of sums, means over other axes than a map's, and small "
            "norms.",
            by_graph_alone(keep_reductions),
            when=_for_cpus,
            faults=(Fault("openvino", _OPENVINO, "off by up to 110 times the sums; a norm left 9.7 dB"),),
        ),
        Rewrite(
            "integer-extremes",
            "Puts a maximum with the lowest float behind maxima and minima over axes.",
            by_graph_alone(keep_extremes),
            when=_for_cpus,
            faults=(
                Fault("openvino", _OPENVINO, "9 to 23 dB to the exact results of the integers of 28 small networks"),
            ),
        ),
        Rewrite(
            "integer-borders",
            "Puts a maximum with the lowest float in front of padding along one axis, and of averages that count "
            "zeros.",
            by_graph_alone(keep_borders),
            when=_for_cpus,
            faults=(
                Fault(
                    "openvino",
                    _OPENVINO,
                    "2 to 35 dB to the exact results of twelve small networks, 47 with it; averages 67 steps off",
                ),
            ),
        ),
        Rewrite(
            "softmax-shares",
            "Puts a maximum with the lowest float in front of a softmax whose shares may exceed their range.",
            by_graph_alone(keep_shares),
            when=_for_cpus,
            faults=(Fault("onnxruntime", _ONNXRUNTIME, "1.8 dB to the exact result of a small network, 47 with it"),),
        ),
        Rewrite(
            "concatenations-parted",
            "Puts a maximum with the lowest float between a concatenation and its quantizer where OpenVINO fails.",
            by_graph_alone(part_joined),
            after=("concatenations-read-directly",),
            when=_for_cpus,
            faults=(Fault("openvino", _OPENVINO, "the graph cannot be opened"),),
        ),
        Rewrite(
            "group-borders",
            "Pads quantized 1 × 1 convolutions in groups of some widths, and cuts the border off.",
            by_graph_alone(border_groups),
            after=("range-clamps",),
            when=_for_cpus,
            faults=(Fault("onednn", "openvino 2026.4.1", "1 dB and less of a layer alone, with AMX"),),
        ),
        Rewrite(
            "joined-groups",
            "Joins narrow groups of convolutions, with zero weights between them.",
            by_graph_alone(put_explicit_groups_together),
            when=_for_cpus,
            faults=(Fault("onednn", "openvino 2026.4.1", "CPUBone −2 dB, with AMX"),),
        ),
        Rewrite(
            "residual-sums",
            "Puts a maximum with the lowest float between sums and addends that nothing else reads, on request.",
            by_graph_alone(keep_sums),
            when=lambda given: _for_cpus(given) and given.exact_sums,
            faults=(
                Fault("openvino", _OPENVINO, "ResNet-20: 99.09 % of answers and 32.7 dB, 99.89 % and 41.4 dB with it"),
            ),
        ),
        Rewrite(
            "overlapping-patches",
            "Writes sums of overlapping patches as transposed convolutions, for TensorRT.",
            by_graph_alone(write_out_folds),
            when=_for_tensorrt,
            faults=(Fault("tensorrt", _TENSORRT, "the parser has no Col2Im"),),
        ),
        Rewrite(
            "one-row-pools",
            "Writes pools along one axis as pools of maps, for TensorRT.",
            by_graph_alone(write_out_lines),
            when=_for_tensorrt,
            faults=(Fault("tensorrt", _TENSORRT, "it pools along two or three axes only"),),
        ),
        Rewrite(
            "layer-padding",
            "Puts the padding that `padding-behind-quantizers` removed right in front of the convolutions.",
            lambda module, given: put_padding(module, given.taken),
            after=("padding-behind-quantizers", "group-borders", "joined-groups"),
        ),
    ),
    behind=(REQUANTIZED,),
)
