"""The rewrites right before and right after observers are inserted into a traced network, in their order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import fx
from torch.ao.quantization import QConfigMapping

from optimize.quantization.placement.attention_scores import free_scores
from optimize.quantization.placement.between_layers import free_between, free_image
from optimize.quantization.placement.global_pools import free_last_pool
from optimize.quantization.placement.inexact_layers import free_inexact
from optimize.quantization.placement.known_ranges import free_given, free_known
from optimize.quantization.placement.layer_outputs import free_outputs
from optimize.quantization.placement.network_output import free_answer
from optimize.quantization.placement.relu6 import bind, bound_relus
from optimize.quantization.placement.residual_stream import free_stream
from optimize.quantization.placement.single_place_means import free_means
from optimize.quantization.rewrites.eval_dropouts import drop_dropouts
from optimize.quantization.rewrites.traced_table import TRACED
from optimize.quantization.shared_observers import share_watchers
from optimize.quantization.targets import Target
from optimize.tracing.rewrite_table import Fault, Rewrite, Table, by_graph_alone

_AO: Final = "2.11 to 2.14"


@dataclass(frozen=True)
class Preparing:
    """The data that rewrites get while a network is prepared.

    Attributes:
        example: an input, ``float32 (N, C, H, W)``.
        target: the target of the integers.
        training: whether the network is prepared for training.
        mapping: which layers are quantized, and how.
        unbound: layers that keep their ReLU6.
        bounds: the bound behind each layer. `bounded-relus` finds them for `observer-bounds`.
        lost: layers whose bound the observer cannot keep, so that their ReLU6 must stay. `observer-bounds` finds them.
    """

    example: torch.Tensor
    target: Target
    training: bool = False
    mapping: QConfigMapping = field(default_factory=QConfigMapping)
    unbound: frozenset[str] = frozenset()
    bounds: dict[str, float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)


def _packed(given: Preparing) -> bool:
    return given.target.packed


_DROPOUTS: Final = Rewrite[fx.GraphModule, Preparing](
    "dropouts",
    "Removes dropouts.",
    by_graph_alone(drop_dropouts),
    when=lambda given: not given.training,
    faults=(Fault("torch.ao", _AO, "a dropout that reads no integers gets the range of the nearest node that does"),),
)
_LAST_POOL: Final = Rewrite[fx.GraphModule, Preparing](
    "last-pool",
    "Computes the last average pool, through which the whole network goes, in float, for CPUs.",
    lambda module, given: free_last_pool(module, given.example),
    after=("means-of-one-place",),
    when=_packed,
    faults=(Fault("torch", _AO, "a quarter of a 2 × 2 pool's sums are ties, and engines round ties to either side"),),
)

#: A traced network, before torch.ao inserts observers.
UNOBSERVED: Final = Table[fx.GraphModule, Preparing](
    "network before observers",
    (
        _DROPOUTS,
        _LAST_POOL,
        Rewrite(
            "inexact-layers",
            "Keeps PReLUs and instance norms in float, for CPUs.",
            by_graph_alone(free_inexact),
            when=_packed,
            faults=(Fault("torch", "2.14", "10 dB and less where exact arithmetic with the same integers has 40"),),
        ),
        Rewrite(
            "known-ranges",
            "Keeps a tanh, sigmoid or hardsigmoid in float if its result is joined with others, for CPUs.",
            by_graph_alone(free_known),
            when=_packed,
            faults=(Fault("torch.ao", _AO, "its kernels use their own output range whatever reads the result"),),
        ),
        Rewrite(
            "bounded-relus",
            "Writes a ReLU6 behind a quantized layer as a ReLU whose range ends at the bound.",
            lambda module, given: given.bounds.update(bound_relus(module, given.mapping, but_not=given.unbound)),
            after=("dropouts", "own-calls"),
            faults=(Fault("torch.ao", _AO, "half of a layer's range is spent on values that its ReLU6 cuts off"),),
        ),
    ),
    behind=(TRACED,),
)

#: A traced network, before PT2E inserts observers into its program.
UNOBSERVED_BY_PT2E: Final = Table("network before observers, for PT2E", (_DROPOUTS, _LAST_POOL), (TRACED,))

#: A network with observers, or with fake-quantize modules.
OBSERVED: Final = Table[fx.GraphModule, Preparing](
    "network with observers",
    (
        Rewrite(
            "shared-observers",
            "Gives all readers of a layer norm one observer, and operators that keep the scale the observer of their "
            "input.",
            lambda prepared, given: share_watchers(prepared, given.target),
            faults=(Fault("torch.ao", _AO, "readers quantize integers again, or integers of two scales are joined"),),
        ),
        Rewrite(
            "observer-bounds",
            "Clamps what an observer behind a layer sees and passes on to the bound of the layer's ReLU6.",
            lambda prepared, given: given.lost.update(bind(prepared, given.bounds)),
            after=("bounded-relus", "shared-observers"),
        ),
        Rewrite(
            "given-ranges",
            "Removes observers with a fixed range from the inputs of operators with a fixed output range.",
            by_graph_alone(free_given),
            after=("shared-observers",),
            faults=(Fault("torch.ao", _AO, "all inputs of a sigmoid beyond 0 to 1 are cut off"),),
        ),
        Rewrite(
            "attention-scores",
            "Keeps operators between a product or a layer and a softmax in float.",
            by_graph_alone(free_scores),
            after=("attention", "softmax-modules", "shared-observers"),
        ),
        Rewrite(
            "means-in-float",
            "Removes observers from means that neither read integers nor are read as integers.",
            lambda prepared, given: free_means(prepared, given.target.backend_config()),
            after=("shared-observers",),
            faults=(Fault("torch.ao", _AO, "a mean gets the range of its input"),),
        ),
        Rewrite(
            "residual-stream",
            "Keeps sums in float that norms read and no integer operator reads.",
            by_graph_alone(free_stream),
            after=("shared-observers",),
        ),
        Rewrite(
            "network-answer",
            "Keeps the network's output in float where no layer computes it.",
            by_graph_alone(free_answer),
            after=("shared-observers",),
        ),
        Rewrite(
            "layer-outputs",
            "Keeps layer outputs in float that no integer operator reads, for TensorRT.",
            lambda prepared, given: free_outputs(prepared, given.target.backend_config()),
            after=("observer-bounds",),
            when=lambda given: not given.target.packed,
            faults=(Fault("tensorrt", "10", costs="speed"),),
        ),
        Rewrite(
            "between-float-layers",
            "Keeps operators in float that lie between float layers.",
            by_graph_alone(free_between),
            after=("shared-observers",),
            faults=(Fault("torch.ao", _AO, "it rounds values that nobody asked to quantize"),),
        ),
        Rewrite(
            "image-operators",
            "Removes observers from operators on the image in front of the first layer.",
            by_graph_alone(free_image),
            after=("shared-observers",),
            faults=(Fault("torch.ao", _AO, "the image is rounded twice"),),
        ),
    ),
    behind=(UNOBSERVED,),
)
