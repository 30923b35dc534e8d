"""The rewrites of a traced network before torch.ao prepares it, in their order, and the faults they work around."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from optimize.quantization.graph.in_place_writes import name_written
from optimize.quantization.placement.attention_scores import call_softmax
from optimize.quantization.placement.float_calls import free_masks, free_maxima, free_quotients, free_sizes
from optimize.quantization.placement.scalar_operands import free_scalars
from optimize.quantization.placement.single_place_means import flatten_places
from optimize.quantization.rewrites.attention import write_out_attention
from optimize.quantization.rewrites.batch_norms import with_factors
from optimize.quantization.rewrites.call_rewrites import drop_empty, write_bounds, write_types
from optimize.quantization.rewrites.computed_weights import store_weights
from optimize.quantization.rewrites.constant_tensors import make_once
from optimize.quantization.rewrites.full_slices import drop_whole_slices
from optimize.quantization.rewrites.functional_layers import lift_functions, write_out_padding
from optimize.quantization.rewrites.own_layers import part_calls, part_parameters, part_tensors
from optimize.quantization.rewrites.resizes import free_resizes
from optimize.quantization.rewrites.same_padding import write_out_same
from optimize.quantization.rewrites.split_tensors import take_pieces
from optimize.quantization.rewrites.wide_patches import unfold_patches
from optimize.tracing.rewrite_table import Fault, Rewrite, Table, by_graph_alone
from optimize.tracing.trace import note_shapes
from optimize.tracing.zero_padding import call_pads, fold_padding

_AO: Final = "2.11 to 2.14"


@dataclass(frozen=True)
class Tracing:
    """The data that rewrites of a traced network get.

    Attributes:
        example: an input, ``float32 (N, C, H, W)``.
        in_float: tells by a module's name whether it stays in float.
    """

    example: torch.Tensor
    in_float: Callable[[str], bool]


#: A traced network, in eval mode.
TRACED: Final = Table[fx.GraphModule, Tracing](
    "traced network",
    (
        Rewrite(
            "in-place-writes",
            "Makes later readers of a tensor that is written in place read the result of the write.",
            lambda module, given: name_written(module, given.example),
        ),
        Rewrite(
            "computed-weights",
            "Stores weights that a layer computes at each call as constant weights.",
            by_graph_alone(store_weights),
            faults=(Fault("torch.ao", _AO, "training fails: it writes to the weights of the network that it trains"),),
        ),
        Rewrite(
            "norm-factors",
            "Gives batch norms without weight and bias a weight of ones and a bias of zeros.",
            by_graph_alone(with_factors),
            faults=(Fault("torch.ao", _AO, "such norms are not folded for training"),),
        ),
        Rewrite(
            "attention",
            "Writes attention as linear layers, matrix products and a softmax.",
            lambda module, given: write_out_attention(module, given.example, given.in_float),
            after=("in-place-writes", "computed-weights"),
            faults=(Fault("torch.ao", _AO, "a third of a ViT's weights stay in float"),),
        ),
        Rewrite(
            "size-dependent-padding",
            "Writes convolutions whose padding depends on the image size as a pad and a convolution.",
            lambda module, given: write_out_same(module, given.example),
            after=("in-place-writes", "computed-weights"),
        ),
        Rewrite(
            "functional-layers",
            "Writes calls of functional convolutions and linear layers as modules.",
            by_graph_alone(lift_functions),
            after=("in-place-writes", "attention"),
            faults=(Fault("torch.ao", _AO, "`conv2d(x, weight, padding=1)` fails"),),
        ),
        Rewrite(
            "border-modes",
            "Writes a pad in front of convolutions whose padding is not with zeros, or is given by a word.",
            by_graph_alone(write_out_padding),
            after=("size-dependent-padding", "functional-layers"),
            faults=(Fault("torch.ao", _AO, "layers are refused, or padded with zeros whatever their mode"),),
        ),
        Rewrite(
            "unwatched-maxima",
            "Keeps max pools in float if they pad with minus infinity or return indices.",
            by_graph_alone(free_maxima),
            faults=(Fault("torch.ao", _AO, "it cannot observe them"),),
        ),
        Rewrite(
            "softmax-modules",
            "Writes each softmax module as a function call.",
            by_graph_alone(call_softmax),
            faults=(Fault("torch.ao", _AO, "steps of 1/256: with 200 tokens of equal weight, a share is one step"),),
        ),
        Rewrite(
            "shapes",
            "Notes the shapes of all nodes for the example. Later records read them.",
            lambda module, given: note_shapes(module, given.example),
            after=("attention", "size-dependent-padding", "functional-layers", "border-modes", "softmax-modules"),
        ),
        Rewrite(
            "constant-tensors",
            "Computes tensors that do not depend on the images once.",
            lambda module, given: make_once(module, given.example),
            after=("shapes",),
            faults=(Fault("torch.ao", _AO, "it fails: `'int' object has no attribute 'args'`"),),
        ),
        Rewrite(
            "types-of-others",
            "Writes `x.type_as(y)` and `x.to(y)` as `x.to(dtype)`.",
            by_graph_alone(write_types),
            after=("shapes",),
            faults=(Fault("torch.ao", _AO, "the graph has other quantizers than the program"),),
        ),
        Rewrite(
            "tensor-bounds",
            "Writes clamps with tensors as bounds as a maximum and a minimum.",
            by_graph_alone(write_bounds),
            after=("shapes",),
            faults=(Fault("torch.ao", _AO, "it clamps integers to plain numbers only"),),
        ),
        Rewrite(
            "empty-parts",
            "Removes empty tensors from concatenations.",
            by_graph_alone(drop_empty),
            after=("shapes",),
            faults=(Fault("torch.ao", _AO, "no int8 program can hold an empty tensor"),),
        ),
        Rewrite(
            "pieces",
            "Splits reads of several pieces of a split tensor into reads of single pieces.",
            by_graph_alone(take_pieces),
            after=("shapes",),
            faults=(Fault("torch.ao", _AO, "its observer of the tuple fails"),),
        ),
        Rewrite(
            "boolean-masks",
            "Keeps calls on masks and integers in float.",
            by_graph_alone(free_masks),
            after=("shapes", "pieces"),
            faults=(Fault("torch.ao", _AO, "it would observe some of them"),),
        ),
        Rewrite(
            "sizes",
            "Keeps sums of shapes from being taken for sums of tensors.",
            by_graph_alone(free_sizes),
            after=("shapes",),
            faults=(Fault("torch.ao", _AO, "it would observe shapes as sums of tensors"),),
        ),
        Rewrite(
            "floor-quotients",
            "Keeps divisions that round down in float.",
            by_graph_alone(free_quotients),
            after=("shapes",),
            faults=(Fault("torch.ao", _AO, "it takes them for sizes"),),
        ),
        Rewrite(
            "resizes",
            "Keeps resizes in float that no int8 kernel computes.",
            by_graph_alone(free_resizes),
            after=("shapes",),
            faults=(
                Fault("torch.ao", _AO, "their output gets the range of their input, and a cubic curve overshoots it"),
            ),
        ),
        Rewrite(
            "means-of-one-place",
            "Writes means over 1 × 1 maps as a flatten.",
            by_graph_alone(flatten_places),
            after=("shapes",),
            faults=(Fault("torch", _AO, "the packed kernel fails"),),
        ),
        Rewrite(
            "whole-slices",
            "Removes slices that select everything.",
            by_graph_alone(drop_whole_slices),
            after=("shapes",),
            faults=(Fault("openvino", "2026.4.1", "the process ends by SIGSEGV"),),
        ),
        Rewrite(
            "scalar-operands",
            "Computes sums and products with a plain number in float.",
            by_graph_alone(free_scalars),
            after=("shapes", "in-place-writes"),
            faults=(
                Fault(
                    "torch.ao",
                    _AO,
                    "GoogLeNet 15.1 dB and Inception v3 13.7 dB to the exact result of the integers, 28.8 and 26.8 "
                    "with it",
                    "pytorch 61859",
                ),
            ),
        ),
        Rewrite(
            "own-calls",
            "Gives each further call of a layer its own copy of the layer.",
            by_graph_alone(part_calls),
            after=("functional-layers",),
            faults=(Fault("torch.ao", _AO, "all calls get the output scale of one call"),),
        ),
        Rewrite(
            "own-tensors",
            "Gives direct reads of the tensors of a layer that is also called a copy.",
            by_graph_alone(part_tensors),
            after=("own-calls",),
            faults=(Fault("torch.ao", _AO, "the weight of an int8 layer is a method"),),
        ),
        Rewrite(
            "own-parameters",
            "Gives each layer its own parameters.",
            by_graph_alone(part_parameters),
            after=("own-calls", "own-tensors"),
        ),
        Rewrite(
            "wide-patches",
            "Writes convolutions of wide patches that do not overlap as matrix products.",
            by_graph_alone(unfold_patches),
            after=("shapes", "own-calls", "own-parameters"),
            faults=(
                Fault("onednn", "torch 2.14", "2 dB of 37, with AMX", "oneDNN 4684"),
                Fault("onednn", "openvino 2026", "2 dB of 37, with AMX", "oneDNN 4684"),
            ),
        ),
        Rewrite(
            "zero-padding",
            "Turns zero padding of a network's maps into the padding of the convolutions that read them.",
            by_graph_alone(fold_padding),
            after=("border-modes", "own-calls"),
            faults=(
                Fault("onnxruntime", "1.31", "EfficientNet-Lite0 8.7 ms, its float graph 7.0", costs="speed"),
                Fault("openvino", "2026.4.1", costs="speed"),
            ),
        ),
        Rewrite(
            "pad-layers",
            "Writes zero padding that only convolutions read as a layer, and other padding as a call.",
            by_graph_alone(call_pads),
            after=("zero-padding",),
            faults=(Fault("torch.ao", _AO, "the padding is computed in float and gets another scale", costs="speed"),),
        ),
    ),
)
