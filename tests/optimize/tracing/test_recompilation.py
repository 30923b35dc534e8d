"""A table of rewrites writes a graph's code once, and nobody can see that it did not do so after each of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

from optimize.tracing.recompilation import recompiled_once
from optimize.tracing.rewrite_table import Rewrite, Table, by_graph_alone

IMAGES = torch.tensor([[-1.0, 2.0]])


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.fixture
def graph() -> fx.GraphModule:
    return fx.symbolic_trace(Doubled())


def tripled(graph: fx.GraphModule) -> None:
    """x + x becomes (x + x) + x, with the code that says so."""
    (output,) = graph.graph.find_nodes(op="output")
    (images,) = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_before(output):
        added = graph.graph.call_function(torch.add, (output.args[0], images))
    output.args = (added,)
    graph.recompile()


def test_a_table_compiles_the_code_of_all_its_rewrites_once(graph, monkeypatch):
    compiled = []
    compile_it = fx.GraphModule.recompile

    def noted(self: fx.GraphModule) -> object:
        compiled.append(self)
        return compile_it(self)

    monkeypatch.setattr(fx.GraphModule, "recompile", noted)
    rewrites = tuple(Rewrite(name, "Adds its input.", by_graph_alone(tripled)) for name in ("first", "second", "third"))
    Table[fx.GraphModule, None]("sums", rewrites).run(graph, None)
    assert compiled == [graph]
    assert torch.equal(graph(IMAGES), 5 * IMAGES)


def test_a_rewrite_that_calls_the_graph_calls_it_as_it_is_by_then(graph):
    with recompiled_once(graph):
        tripled(graph)
        assert torch.equal(graph(IMAGES), 3 * IMAGES)
        tripled(graph)
        assert torch.equal(copy.deepcopy(graph)(IMAGES), 4 * IMAGES)
        assert torch.equal(graph(IMAGES), 4 * IMAGES)
        tripled(graph)
    assert torch.equal(graph(IMAGES), 5 * IMAGES)


def test_a_graph_is_whole_after_a_rewrite_that_fails(graph):
    def failing() -> None:
        with recompiled_once(graph):
            tripled(graph)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert torch.equal(graph(IMAGES), 3 * IMAGES)
    tripled(graph)
    assert torch.equal(graph(IMAGES), 4 * IMAGES)


def test_a_table_within_a_table_leaves_the_code_to_the_outer_one(graph):
    with recompiled_once(graph):
        with recompiled_once(graph):
            tripled(graph)
        tripled(graph)
    assert torch.equal(graph(IMAGES), 4 * IMAGES)
