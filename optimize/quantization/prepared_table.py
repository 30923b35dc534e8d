"""What is rewritten right before observers are inserted into a traced network, and which of them go, in their order."""

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
    """What a network is prepared by.

    Attributes:
        example: ``float32 (N, C, H, W)``.
        target: whose integers it gets.
        training: whether it is prepared for training.
        mapping: which layers are quantized, and how.
        unbound: layers whose ReLU6 stays.
        bounds: what `bounded-relus` has found, for `observer-bounds`: the bound behind each layer.
        lost: what that has found: layers whose bound the observer cannot keep, so that their ReLU6 must stay.
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
    "Takes dropouts away.",
    by_graph_alone(drop_dropouts),
    when=lambda given: not given.training,
    faults=(Fault("torch.ao", _AO, "one that reads no integers gets the range of the nearest that are"),),
)
_LAST_POOL: Final = Rewrite[fx.GraphModule, Preparing](
    "last-pool",
    "Computes the average pool that everything goes through in float, for CPUs.",
    lambda module, given: free_last_pool(module, given.example),
    after=("means-of-one-place",),
    when=_packed,
    faults=(Fault("torch", _AO, "a quarter of a 2 × 2 pool's sums are ties, which engines round to either side"),),
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
            "Keeps a tanh, sigmoid or hardsigmoid in float that is put together with others, for CPUs.",
            by_graph_alone(free_known),
            when=_packed,
            faults=(Fault("torch.ao", _AO, "its kernels give their own range whatever is done with it"),),
        ),
        Rewrite(
            "bounded-relus",
            "Writes a ReLU6 behind a quantized layer as a ReLU whose range ends at the bound.",
            lambda module, given: given.bounds.update(bound_relus(module, given.mapping, but_not=given.unbound)),
            after=("dropouts", "own-calls"),
            faults=(Fault("torch.ao", _AO, "half of a layer's range is for numbers that its ReLU6 cuts off"),),
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
            "Lets all readers of a layer norm read one observer, and what keeps a scale share it with what it reads.",
            lambda prepared, given: share_watchers(prepared, given.target),
            faults=(Fault("torch.ao", _AO, "readers quantize integers again, or integers of two scales are joined"),),
        ),
        Rewrite(
            "observer-bounds",
            "Lets an observer behind a layer see, and pass on, nothing above the bound of its ReLU6.",
            lambda prepared, given: given.lost.update(bind(prepared, given.bounds)),
            after=("bounded-relus", "shared-observers"),
        ),
        Rewrite(
            "given-ranges",
            "Takes observers of known range from what operators of known range are given.",
            by_graph_alone(free_given),
            after=("shared-observers",),
            faults=(Fault("torch.ao", _AO, "of what a sigmoid is given, all beyond 0 to 1 is cut off"),),
        ),
        Rewrite(
            "attention-scores",
            "Keeps what lies between a product, or a layer, and a softmax in float.",
            by_graph_alone(free_scores),
            after=("attention", "softmax-modules", "shared-observers"),
        ),
        Rewrite(
            "means-in-float",
            "Takes observers from means that nothing in integers gives or reads.",
            lambda prepared, given: free_means(prepared, given.target.backend_config()),
            after=("shared-observers",),
            faults=(Fault("torch.ao", _AO, "a mean gets the range of what it is the mean of"),),
        ),
        Rewrite(
            "residual-stream",
            "Keeps sums that norms read, and nothing in integers, in float.",
            by_graph_alone(free_stream),
            after=("shared-observers",),
        ),
        Rewrite(
            "network-answer",
            "Keeps the network's answer in float where no layer gives it.",
            by_graph_alone(free_answer),
            after=("shared-observers",),
        ),
        Rewrite(
            "layer-outputs",
            "Keeps outputs of layers in float that no integers are read from, for TensorRT.",
            lambda prepared, given: free_outputs(prepared, given.target.backend_config()),
            after=("observer-bounds",),
            when=lambda given: not given.target.packed,
            faults=(Fault("tensorrt", "10", costs="speed"),),
        ),
        Rewrite(
            "between-float-layers",
            "Keeps operators between layers that stay in float in float.",
            by_graph_alone(free_between),
            after=("shared-observers",),
            faults=(Fault("torch.ao", _AO, "it rounds what nobody quantized"),),
        ),
        Rewrite(
            "image-operators",
            "Takes observers from what is done to the image in front of every layer.",
            by_graph_alone(free_image),
            after=("shared-observers",),
            faults=(Fault("torch.ao", _AO, "the image is rounded twice"),),
        ),
    ),
    behind=(UNOBSERVED,),
)
