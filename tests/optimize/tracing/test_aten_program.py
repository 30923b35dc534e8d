"""Programs that were exported, and changed, as programs again."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.nn import functional

from optimize.export.onnx_graph.pixel_input import FromPixels, entered
from optimize.tracing.aten_program import is_program, program_of
from serve.runtime.card.card import Preprocessing

IMAGES = torch.randn(2, 3, 8, 8)
KINDS = ("PARAMETER", "BUFFER", "CONSTANT_TENSOR", "USER_INPUT")
DYNAMIC = ({0: torch.export.Dim.DYNAMIC},)
GIVEN = Preprocessing(8, (8, 8), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


class Network(nn.Module):
    """With parameters, buffers and a tensor that is neither; sizes are asked, and what is shared is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.factor = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Parameter(torch.randn(4, 1, 1))
        self.register_buffer("places", torch.randn(1, 36))
        self.shift = torch.randn(36)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = (self.norm(self.stem(x)) * self.factor).relu() + self.factor
        first, second = maps.reshape(x.shape[0], -1, 2, 36).unbind(2)
        return (first - second + self.places).mean(1) + self.shift


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network().eval()


def traced(module: nn.Module, images: torch.Tensor = IMAGES) -> torch.export.ExportedProgram:
    return torch.export.export(module, (images,), dynamic_shapes=DYNAMIC)


def graph_of(program: torch.export.ExportedProgram) -> fx.GraphModule:
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    return module


def calls(program: torch.export.ExportedProgram) -> list[tuple[str, list[str], str]]:
    """Each operator that computes, what it is given, and the shape that it gives.

    Where the number of images is asked, and that pixels are pixels, does not count.
    """
    names = {spec.arg.name: spec.target or "images" for spec in program.graph_signature.input_specs}
    found: list[tuple[str, list[str], str]] = []
    for node in program.graph.nodes:
        if node.target == torch.ops.aten.sym_size.int:
            names[node.name] = "number"
        elif node.op == "call_function" and node.target != torch.ops.aten._assert_tensor_metadata.default:
            names[node.name] = str(len(found))
            shape = re.sub(r"s\d+", "N", str(node.meta["val"]))
            found.append((str(node.target), [names[before.name] for before in node.all_input_nodes], shape))
    return found


def never(*given: object, **settings: object) -> None:
    raise AssertionError("it was traced")


def test_a_programs_graph_is_the_program_that_tracing_makes_of_it_and_is_not_traced(monkeypatch):
    graph = graph_of(traced(network()))
    expected = traced(graph)
    monkeypatch.setattr(torch.export, "export", never)
    program = program_of(graph, IMAGES)
    assert calls(program) == calls(expected)
    kinds = {spec.target: spec.kind for spec in program.graph_signature.input_specs}
    read = {spec.target: spec.kind for spec in expected.graph_signature.input_specs if spec.target in kinds}
    assert kinds == read
    assert set(kinds.values()) == {getattr(InputKind, name) for name in KINDS}
    assert str(program.range_constraints) == str(expected.range_constraints)
    assert str(program.call_spec) == str(expected.call_spec)


@pytest.mark.parametrize("count", [2, 5, 40])
def test_it_answers_as_the_graph_whatever_the_number_of_images(count):
    graph, images = graph_of(traced(network())), torch.randn(count, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(program_of(graph, IMAGES).module()(images), network()(images))


def test_what_was_changed_has_the_shape_and_the_type_that_it_gives():
    graph = graph_of(traced(network()))
    (relu,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    with graph.graph.inserting_after(relu):
        wide = graph.graph.call_function(torch.ops.aten.to.dtype, (relu, torch.float64))
    relu.replace_all_uses_with(wide, lambda reader: reader is not wide)
    program = program_of(graph, IMAGES)
    (found,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype)
    (behind,) = found.users
    assert found.meta["val"].shape[1:] == behind.meta["val"].shape[1:] == (4, 6, 6)
    assert found.meta["val"].dtype == behind.meta["val"].dtype == torch.float64


def test_one_thread_narrows_no_number_of_images():
    """torch.export's own tracing asks nothing of it; a convolution chooses its kernel by it (torch 2.14)."""
    graph, threads = graph_of(traced(network())), torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            (found,) = program_of(graph, IMAGES).range_constraints.values()
            assert (found.lower, str(found.upper)) == (2, "int_oo")
    finally:
        torch.set_num_threads(threads)


class Blocked(nn.Module):
    """Torch keeps what lies under ``no_grad`` as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x.mean((1, 2)) * 2
        return self.head(x)


def test_a_program_with_blocks_is_left_to_torch():
    module = Blocked().eval()
    with torch.enable_grad():
        graph = graph_of(traced(module))
    assert not is_program(graph)
    images = torch.randn(3, 3, 8, 8)
    torch.testing.assert_close(program_of(graph, IMAGES).module()(images), module(images))


def test_a_program_of_a_fixed_number_of_images_is_left_to_torch():
    graph = graph_of(torch.export.export(network(), (IMAGES,)))
    assert not is_program(graph)


def test_what_torch_fx_traced_is_no_program():
    assert not is_program(fx.symbolic_trace(network()))
    assert not is_program(network())


@pytest.mark.skipif(not hasattr(torch.fx.config, "do_not_emit_stack_traces"), reason="torch 2.11 cannot be told")
def test_no_operator_says_which_sources_it_is_from():
    """To look that up takes a tenth of the way to an int8 graph; afterwards torch does as it did before."""
    before = torch.fx.config.do_not_emit_stack_traces
    program = program_of(network(), IMAGES)
    assert not any("test_aten" in (node.stack_trace or "") for node in program.graph.nodes)
    assert torch.fx.config.do_not_emit_stack_traces == before


class Rounded(nn.Module):
    """Quantizers, their counterparts and clamps of integers and of floats, of tensors in any order in memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized = torch.ops.quantized_decomposed
        range_ = (0.1, 3, 0, 127, torch.uint8)
        whole = quantized.quantize_per_tensor(x.transpose(1, 3), *range_).clamp(3, 100).clamp(None, 90)
        floats = quantized.dequantize_per_tensor(whole, *range_).clamp(0, 6)
        channels = (torch.full((8,), 0.1), torch.zeros(8, dtype=torch.int64), 1, -127, 127, torch.int8)
        again = quantized.dequantize_per_channel(quantized.quantize_per_channel(floats, *channels), *channels)
        return again.mean((1, 2)) + (whole.clamp(1.5, 20) + whole.clamp(max=9.5)).sum((1, 2))


def test_what_is_not_noted_is_what_torch_gives():
    graph = graph_of(traced(Rounded()))
    expected = {node.name: str(node.meta["val"]) for node in graph.graph.nodes if node.op == "call_function"}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            del node.meta["val"]
    program = program_of(graph, IMAGES)
    found = {node.name: str(node.meta["val"]) for node in program.graph.nodes if node.name in expected}
    strides = {node.name: node.meta["val"].stride() for node in program.graph.nodes if "quantize" in node.name}
    assert len(found) >= 10
    assert found.items() <= expected.items()
    images = torch.randn(3, 3, 8, 8)
    assert torch.equal(program.module()(images), Rounded()(images))
    assert {str(stride) for name, stride in strides.items() if "tensor" in name} == {"(192, 1, 8, 64)"}


class Moved(nn.Module):
    """A function of a map, in the middle of a network."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x.relu()).sigmoid()


@pytest.mark.parametrize(
    "function",
    [
        *(lambda x: functional.pad(x, (0, 0, 0, 0, 1, 1)), lambda x: functional.pad(x, (1, 1), value=0.5)),
        *(lambda x: functional.pad(x, (1, 1, 1, 1), "reflect"), lambda x: functional.pad(x, (2, 2, 2, 2), "circular")),
        *(lambda x: functional.interpolate(x, scale_factor=2), lambda x: functional.unfold(x, 2, stride=2)),
        *(lambda x: functional.pixel_unshuffle(x, 2), lambda x: functional.group_norm(x, 3), lambda x: x.roll(1, 2)),
        *(functional.instance_norm, lambda x: torch.cat(x.chunk(3, 1), 2), lambda x: x.flip(1)),
        *(lambda x: functional.avg_pool2d(x, 3, 2, 1), lambda x: functional.conv2d(x, torch.ones(4, 3, 2, 2))),
        *(lambda x: torch.stack([x, x.square()], 1).flatten(1, 2), lambda x: x.flatten(2).cumsum(2)),
    ],
)
def test_what_reads_what_was_written_in_gives_any_number_of_images(function):
    graph = graph_of(traced(Moved(function)))
    (relu,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    with graph.graph.inserting_after(relu):
        written = graph.graph.call_function(torch.ops.aten.neg.default, (relu,))
    relu.replace_all_uses_with(written, lambda reader: reader is not written)
    noted = {node.name: str(node.meta.get("val")) for node in graph.graph.nodes if node.op == "call_function"}
    found = {node.name: str(node.meta.get("val")) for node in program_of(graph, IMAGES).graph.nodes}
    assert len(noted) >= 4
    assert {**noted, written.name: noted["relu"]}.items() <= found.items()


def test_a_border_of_what_was_written_in_counts_no_images():
    """Where it is added to something; it was that of the example's images."""
    wider = Moved(lambda x: torch.cat([x, x], 1) + functional.pad(x, (0, 0, 0, 0, 4, 4)))
    graph = graph_of(traced(nn.Sequential(nn.Conv2d(3, 8, 3), wider).eval()))
    (border,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.pad.default)
    with graph.graph.inserting_before(border):
        written = graph.graph.call_function(torch.ops.aten.neg.default, (border.args[0],))
    border.args = (written, *border.args[1:])
    (found,) = program_of(graph, IMAGES).graph.find_nodes(op="call_function", target=torch.ops.aten.pad.default)
    assert str(found.meta["val"]) == str(border.meta["val"])
    assert isinstance(found.meta["val"].shape[0], torch.SymInt)


def test_a_program_behind_pixels_is_one_graph_and_gives_the_same_bits(monkeypatch):
    graph = graph_of(traced(network()))
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    expected = traced(FromPixels(copy.deepcopy(graph), GIVEN), pixels)
    whole = entered(graph, "uint8", GIVEN)
    monkeypatch.setattr(torch.export, "export", never)
    program = program_of(whole, pixels)
    assert calls(program) == calls(expected)
    more = torch.randint(0, 256, (7, 3, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(program.module()(more), FromPixels(network(), GIVEN)(more))
        assert torch.equal(whole(more), program.module()(more))
