"""Reads values within networks by the names of torch.fx nodes, for a student and its teacher.

No hooks are used. The trained graph has the values as outputs, so that they are copied, pickled and shared by processes
with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from optimize.errors import PassError
from optimize.tracing.trace import graph_as_is
from serve.runtime.errors import UserError, did_you_mean, listed, one_line

#: The output of a graph with features: logits ``(N, classes)``, and the values in the order of their names.
Outputs = tuple[torch.Tensor, tuple[torch.Tensor, ...]]


def _graph(module: nn.Module, whose: str, example: torch.Tensor, *, training: bool = False) -> fx.Graph:
    """Return the graph whose nodes features name."""
    try:
        return graph_as_is(module, example, training=training)
    except PassError as error:
        raise UserError(f"distil.features: {whose} has no nodes: {error}") from None


def with_features(
    graph: fx.Graph, names: Sequence[str], whose: str, known: Mapping[str, str] | None = None
) -> fx.Graph:
    """Return a graph that gives `Outputs`.

    Args:
        graph: a graph that gives logits. It is not changed.
        names: names of the nodes whose values are returned.
        whose: the graph's owner, for messages: ``the student``.
        known: maps allowed names to names in this graph. None: every node by its own name.

    Raises:
        UserError: a node does not exist. The message suggests the nearest names.
    """
    graph = copy.deepcopy(graph)
    nodes = {node.name: node for node in graph.nodes if node.op != "output"}
    known = {name: name for name in nodes} if known is None else known
    for name in names:
        if name not in known:
            if whole := next((other for other, there in known.items() if there == name), None):
                raise UserError(
                    f"distil.features: {whose} fuses {name!r} with the node after it; the output of both is {whole!r}"
                )
            near = did_you_mean(name, known) or f"; it has {listed(known, 6)}"
            raise UserError(f"distil.features: {whose} has no node {name!r}{near}")
    output = next(node for node in graph.nodes if node.op == "output")
    (answer,) = output.args
    logits = answer[0] if isinstance(answer, tuple | list) else answer
    output.args = ((logits, tuple(nodes[known[name]] for name in names)),)
    graph.lint()
    return graph


def _shapes(module: nn.Module, graph: fx.Graph, names: Sequence[str], images: torch.Tensor) -> list[torch.Size]:
    """Return the shapes of a graph's features.

    Args:
        module: the graph's module. A copy of it runs, because observers and norms are changed by their inputs.
        graph: see `with_features`.
        names: names of the features.
        images: ``float32 (N, C, H, W)`` on the CPU.

    Raises:
        UserError: a node's value is not a tensor, or has no row for each image.
    """
    try:
        with torch.no_grad():
            _, values = fx.GraphModule(copy.deepcopy(module).cpu().eval(), graph)(images)
    except RuntimeError as error:
        raise UserError(f"distil.features: the network fails: {one_line(error)}") from None
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.shape[:1] != images.shape[:1]:
            raise UserError(f"distil.features: the output of {name!r} is not a tensor with a row for each image")
    return [value.shape for value in values]


def projections(
    features: Mapping[str, str], student: Sequence[torch.Size], teacher: Sequence[torch.Size]
) -> list[nn.Module]:
    """Return what maps each feature of a student to the teacher's width: a learned 1x1 convolution, or nothing.

    This is the regressor of FitNets (Romero et al. 2015, arXiv:1412.6550, section 2.2) as a 1x1 convolution. The width
    is the second dimension of maps ``(N, C, H, W)``, and the last of anything else.

    Args:
        features: names in the student and in the teacher.
        student: shapes in the student.
        teacher: shapes in the teacher.

    Raises:
        UserError: shapes differ in more than the width.
    """
    found: list[nn.Module] = []
    for (own, others), ours, theirs in zip(features.items(), student, teacher, strict=True):
        width = 1 if len(ours) == 4 else len(ours) - 1
        rest = [[size for place, size in enumerate(shape) if place != width] for shape in (ours, theirs)]
        if len(ours) != len(theirs) or rest[0] != rest[1]:
            raise UserError(
                f"distil.features: {own!r} is {_each(ours)} in the student and {others!r} {_each(theirs)} in the "
                "teacher; only the number of channels may differ"
            )
        if ours == theirs:
            found.append(nn.Identity())
        elif len(ours) == 4:
            found.append(nn.Conv2d(ours[width], theirs[width], 1, bias=False))
        else:
            found.append(nn.Linear(ours[width], theirs[width], bias=False))
    return found


@dataclass(frozen=True)
class Matched:
    """A student's and a teacher's features side by side.

    Attributes:
        student: its graph, which gives `Outputs`.
        teacher: the same for the teacher, as a module.
        projections: from the student's widths to the teacher's.
    """

    student: fx.Graph
    teacher: fx.GraphModule
    projections: nn.ModuleList


def match(
    student: nn.Module,
    teacher: nn.Module,
    features: Mapping[str, str],
    images: torch.Tensor,
    nodes: Mapping[str, str] | None = None,
) -> Matched:
    """Return the features of two networks after checking them.

    Args:
        student: the network that is trained.
        teacher: in eval mode, on the CPU.
        features: names of the student's nodes, and the teacher's for each.
        images: a few, ``float32 (N, C, H, W)`` on the CPU.
        nodes: see `with_features`, for the student.

    Raises:
        UserError: a node does not exist, or the shapes do not fit.
    """
    own, others = list(features), list(features.values())
    ours = with_features(_graph(student, "the student", images, training=True), own, "the student", nodes)
    theirs = with_features(_graph(teacher, "the teacher", images), others, "the teacher")
    sizes = _shapes(student, ours, own, images), _shapes(teacher, theirs, others, images)
    return Matched(ours, fx.GraphModule(teacher, theirs), nn.ModuleList(projections(features, *sizes)))


def _each(shape: torch.Size) -> str:
    return "x".join(map(str, shape[1:]))


class Student(nn.Module):
    """A network in training, with its features in the teacher's widths.

    Its layers are the network's own, and so are their weights. The projections are its only other parameters.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, projections: nn.ModuleList) -> None:
        super().__init__()
        self.network = fx.GraphModule(module, graph)
        self.projections = projections

    def forward(self, images: torch.Tensor) -> Outputs:
        """See `Outputs`."""
        logits, values = self.network(images)
        return logits, tuple(project(value) for project, value in zip(self.projections, values, strict=True))


def relative_error(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of each image's feature from the teacher's, relative to its square, as a mean.

    It has no unit, so that layers of any scale have equal weight. Each image counts by itself, so that the division of
    a batch does not matter.
    """
    distance = (student - teacher).square().flatten(1).sum(1)
    return (distance / teacher.square().flatten(1).sum(1).clamp_min(1e-12)).mean()
