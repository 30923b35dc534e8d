"""Attention written out: it computes what it computed, its projections and products become int8, its scores do not."""

from __future__ import annotations

import dataclasses
import importlib.util
import operator
from pathlib import Path

import onnx
import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from optimize.context import Context
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.precision.quantizable_layers import layers_of
from optimize.quantization.calibration import calibrate
from optimize.quantization.choices import check_choices, resolve
from optimize.quantization.convert import prepare, trace_calls
from optimize.quantization.graph.explicit_quantizers import quantizing
from optimize.quantization.lowering.openvino.norm_floors import raise_floors
from optimize.quantization.lowering.qdq import reference_form
from optimize.quantization.observers import settle_weights
from optimize.quantization.placement.attention_scores import free_scores
from optimize.quantization.rewrites.attention import write_out_attention
from optimize.quantization.static import calibrating, observing
from optimize.quantization.targets import TargetName, target_named
from optimize.statistics import sqnr_db
from optimize.store.artifact import Artifact
from optimize.tracing.folding import fuse_module
from optimize.tracing.trace import trace
from serve.runtime.card.card import Preprocessing
from tests.optimize.families import build
from tests.optimize.workbench import noise_context, parent_of

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(7))


def shaken(module: nn.Module, seed: int = 1) -> nn.Module:
    """Every parameter and buffer in floats moved away from what it starts as (0, 1, equal scales)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        spread = 1.0 if "relative_position_bias_table" in name else 0.1
        parameter.data += spread * torch.randn(parameter.shape, generator=generator)
    return module.eval()


class Grid(nn.Module):
    """A stem that makes tokens of an image ``(N, 3, 32, 32)`` for attention: ``(N, 16, 24)``."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.stem, self.attention, self.head = nn.Conv2d(3, 24, 8, 8), attention, nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


class TimesFirst(nn.Module):
    """Attention of sequences that lie first, of keys and values with widths of their own, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(24, 12), nn.Linear(24, 20)
        self.inner = nn.MultiheadAttention(24, 3, bias=False, kdim=12, vdim=20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        mixed, _ = self.inner(x, self.keys(x), self.values(x))
        return mixed.transpose(0, 1)


class Fused(nn.Module):
    """As timm calls it, with scores of places or without."""

    def __init__(self, scale: float | None = None, *, places: bool = False) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(24, 72), scale
        self.places = nn.Parameter(torch.randn(4, 16, 16)) if places else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        query, key, value = self.qkv(x).reshape(n, length, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, self.places, scale=self.scale)
        return mixed.transpose(1, 2).reshape(n, length, 24)


class ByHand(nn.Module):
    """As it stands in many a repository, with an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = (query @ key.transpose(-2, -1)) * 24**-0.5
        return torch.bmm(scores.softmax(dim=-1), value)


CASES = {
    "vit": lambda: build("vit"),
    "swin": lambda: build("swin"),
    "swin_v2": lambda: build("swin_v2"),
    "maxvit": lambda: build("maxvit"),
    "times first": lambda: Grid(TimesFirst()),
    "fused": lambda: Grid(Fused()),
    "fused, scaled": lambda: Grid(Fused(0.3)),
    "fused, with places": lambda: Grid(Fused(places=True)),
    "by hand": lambda: Grid(ByHand()),
}
#: How many attentions each has.
ATTENTIONS = {"vit": 2, "swin": 4, "swin_v2": 4, "maxvit": 4}


def written(module: nn.Module, images: torch.Tensor = IMAGES) -> fx.GraphModule:
    graph_module = trace(module)
    write_out_attention(graph_module, images)
    return graph_module


def calls(module: fx.GraphModule, target: object) -> int:
    return sum(node.target is target for node in module.graph.nodes)


@pytest.mark.parametrize("name", CASES)
def test_attention_written_out_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    module = shaken(CASES[name]())
    with torch.no_grad():
        expected = module(IMAGES)
        found = written(module)(IMAGES)
        alone = written(module)(IMAGES[:1])  # the batch stays free
    assert expected.std(0).min() > 0  # else all that follows would hold of a constant
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(alone, expected[:1], rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_each_attention_has_two_products_and_nothing_in_one_piece_is_left(name: str) -> None:
    module = written(CASES[name]())
    assert calls(module, torch.matmul) == 2 * ATTENTIONS.get(name, 1)
    assert not [
        layer for layer in module.modules() if isinstance(layer, nn.MultiheadAttention) and list(layer.children()) == []
    ]
    whole = ("shifted_window_attention", "scaled_dot_product_attention", "einsum")
    assert not [node for node in module.graph.nodes if getattr(node.target, "__name__", "") in whole]
    assert not calls(module, operator.matmul)


@pytest.mark.parametrize(
    ("height", "width", "shift"), [(32, 32, [2, 2]), (40, 24, [2, 2]), (24, 40, [1, 0]), (16, 40, [2, 2])]
)
@pytest.mark.parametrize("version", [1, 2])
def test_windows_that_reach_beyond_the_image_and_shifts_in_one_direction(
    height: int, width: int, shift: list[int], version: int
) -> None:
    from torchvision.models import swin_transformer as swin

    kind = swin.ShiftedWindowAttention if version == 1 else swin.ShiftedWindowAttentionV2

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.attention = nn.Conv2d(3, 16, 4, 4), kind(16, [4, 4], shift, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.stem(x).permute(0, 2, 3, 1)).flatten(1)

    torch.manual_seed(0)
    module = shaken(Windows())
    images = torch.randn(2, 3, height, width)
    with torch.no_grad():
        expected = module(images)
        torch.testing.assert_close(written(module, images)(images), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "equation",
    ["bhid,bhjd->bhij", "b h i j, b h j d -> b h i d", "bhdi,bhjd->bhij", "bhjd,bhid->bhij", "bhdi,bhdj->bhji"],
)
def test_an_einsum_that_is_a_product_becomes_one(equation: str) -> None:
    class Sums(nn.Module):
        def forward(self, first: torch.Tensor) -> torch.Tensor:
            return torch.einsum(equation, first, torch.relu(first))

    x = torch.randn(2, 3, 5, 5)
    module = written(Sums(), x)
    assert calls(module, torch.matmul) == 1
    torch.testing.assert_close(module(x), torch.einsum(equation, x, x.relu()))


@pytest.mark.parametrize("equation", ["bhid,bhjd->bhi", "bhid,chjd->bhij", "bhid,bhid->bhid", "b...d,b...d->b..."])
def test_other_einsums_are_left(equation: str) -> None:
    class Sums(nn.Module):
        def forward(self, first: torch.Tensor) -> torch.Tensor:
            return torch.einsum(equation, first, torch.relu(first))

    assert calls(written(Sums(), torch.randn(3, 3, 5, 5)), torch.einsum) == 1


class Masked(nn.Module):
    """Attention with a mask, or with two kinds of one in one call, and one whose weights are the answer."""

    def __init__(self, asked: str) -> None:
        super().__init__()
        self.inner, self.asked = nn.MultiheadAttention(24, 3, batch_first=True), asked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.asked == "weights":
            return self.inner(x, x, x)[1]
        if self.asked in ("causal", "truths"):
            mask = torch.ones(16, 16, dtype=torch.bool).tril() if self.asked == "truths" else None
            return functional.scaled_dot_product_attention(x, x, x, mask, is_causal=mask is None)
        return self.inner(x, x, x, key_padding_mask=x[:, :, 0] > 0, need_weights=False)[0]


@pytest.mark.parametrize("asked", ["weights", "mask", "causal", "truths"])
def test_attention_of_other_kinds_is_left_as_it_is(asked: str) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.attention = nn.Conv2d(3, 24, 8, 8), Masked(asked)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.stem(x).flatten(2).transpose(1, 2))

    module = Tokens().eval()
    found = written(module)
    assert calls(found, torch.matmul) == 0
    torch.testing.assert_close(found(IMAGES), module(IMAGES))


def test_an_attention_that_is_to_stay_in_float_does() -> None:
    module = trace(build("vit"))
    first = "encoder.layers.encoder_layer_0.self_attention"
    assert write_out_attention(module, IMAGES, lambda name: name == first) == 1
    assert [str(node.target) for node in module.graph.nodes if str(node.target).endswith("self_attention")] == [first]


def colours() -> Context:
    """Noise in three channels of 32x32."""
    return dataclasses.replace(noise_context(), preprocessing=Preprocessing(32, (32, 32)))


def integers_of(module: nn.Module, target: TargetName = "auto") -> fx.GraphModule:
    """The reference form of a module after ``ptq``."""
    context, config = colours(), Ptq(images=32, target=target)
    example = context.example()
    prepared = observing(lambda: module, config, resolve(lambda: module, config), example)("histogram")
    calibrate(prepared, context, calibrating(config, context))
    settle_weights(prepared, example)
    return reference_form(prepared, example, target_named(target).backend_config())


@pytest.mark.parametrize("name", ["vit", "swin", "swin_v2", "maxvit"])
def test_products_read_integers_and_scores_stay_in_float(name: str) -> None:
    """In the reference form, of which the programs and graphs are made."""
    form = integers_of(shaken(build(name)))
    graph = form.graph
    products = [node for node in graph.nodes if node.target is torch.ops.aten.matmul.default]
    assert len(products) == 2 * ATTENTIONS[name]
    for product in products:
        assert all("dequantize_per_tensor" in _origin(factor) for factor in product.args)
    for softmax in (node for node in graph.nodes if node.target is torch.ops.aten.softmax.int):
        path, node = [], softmax
        while node not in products:
            # Of a sum with a position or a mask, which is a constant, the other addend.
            (node,) = [before for before in node.all_input_nodes if before.op == "call_function"]
            path.append(str(node.target))
        assert not [target for target in path if "quantize" in target]
    # Query and key of cosine attention are divided by their norms, of which OpenVINO makes more than zero.
    assert raise_floors(form) == (2 * ATTENTIONS[name] if name == "swin_v2" else 0)


def _origin(node: fx.Node) -> str:
    """What gives a tensor, looking through views."""
    views = (torch.ops.aten.permute.default, torch.ops.aten.transpose.int, torch.ops.aten.reshape.default)
    while node.target in views:
        node = node.all_input_nodes[0]
    return str(node.target)


@pytest.mark.parametrize("target", ["auto", "tensorrt"])
def test_a_vit_shrinks_to_less_than_a_third(target: str, tmp_path: Path) -> None:
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    module = shaken(VisionTransformer(32, 8, 1, 4, 256, 1024, num_classes=10))
    context, folder = colours(), tmp_path / "ptq"
    folder.mkdir()
    parent = parent_of(module, context, tmp_path / "parent")
    product = PTQ.apply(parent, Ptq(images=32, target=target, min_sqnr=0), context, folder)
    assert not [note for note in product.notes if "left in float" in note]
    card = dataclasses.replace(parent.card, target=product.target)
    artifact = Artifact("ptq", "quantized", "1" * 64, folder, card, parent)
    graph = tmp_path / "graph"
    graph.mkdir()
    ONNX_INT8.apply(artifact, OnnxInt8(min_sqnr=0), context, graph)
    floats = 4 * len(parameters_to_vector(module.parameters()))
    assert (graph / "model.onnx").stat().st_size <= 0.3 * floats
    if target == "auto":  # a program of explicit quantizers has a few hundred kilobytes of them
        assert (folder / product.file).stat().st_size <= 0.3 * floats
    model = onnx.load(graph / "model.onnx")
    producers = {output: node for node in model.graph.node for output in node.output}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    assert len(products) >= 4 + 2 + 2  # projections, two of the MLP, two products
    for node in products:
        assert all(_through_views(producers, name) == "DequantizeLinear" for name in node.input)


def _through_views(producers: dict[str, onnx.NodeProto], name: str) -> str:
    while producers[name].op_type in ("Transpose", "Reshape"):
        name = producers[name].input[0]
    return producers[name].op_type


def test_training_for_int8_reaches_the_projections(tmp_path: Path) -> None:
    context = colours()
    module = shaken(build("vit"))
    product = QAT.apply(
        parent_of(module, context, tmp_path), Qat(epochs=1, images=32, augment=False), context, tmp_path
    )
    # the patches, 4 projections and 2 layers in each of 2 blocks, the head
    assert any(note.startswith("14 quantized layers") for note in product.notes)


def test_keep_float_keeps_a_whole_attention(tmp_path: Path) -> None:
    context = colours()
    config = Ptq(images=32, keep_float=("*encoder_layer_0.self_attention",))
    product = PTQ.apply(parent_of(build("vit"), context, tmp_path), config, context, tmp_path)
    assert any(note.startswith("10 quantized layers") for note in product.notes)
    assert any("encoder_layer_0.self_attention (MultiheadAttention)" in note for note in product.notes)


def test_the_search_names_an_attention_as_keep_float_can(tmp_path: Path) -> None:
    context, module = colours(), build("vit")
    found = layers_of(parent_of(module, context, tmp_path), Ptq(images=32), context)
    attention = "encoder.layers.encoder_layer_0.self_attention"
    assert found[attention] == 3 * 64 * 64
    assert found[f"{attention}.out_proj"] == 64 * 64
    check_choices(lambda: module, Ptq(keep_float=tuple(found)))


def test_attention_is_found_in_a_fused_network() -> None:
    module = shaken(build("swin"))
    found = written(fuse_module(module, IMAGES))
    assert calls(found, torch.matmul) == 2 * ATTENTIONS["swin"]
    with torch.no_grad():
        torch.testing.assert_close(found(IMAGES), module(IMAGES), rtol=0, atol=1e-4)


def test_what_one_layer_gives_stays_in_integers_before_a_softmax() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.softmax(self.layer(x.mean((1, 2))) * 2.0, dim=-1)

    target = target_named("x86")
    prepared = prepare(trace_calls(Head(), IMAGES), target.post_training("minmax"), IMAGES, target)
    assert free_scores(prepared) == 0
    # It has been asked before, in `prepare`: what stands in the form is what counts.
    assert rounded(Head().eval(), "x86") == ["aten.mean.dim", "aten.linear.default"]


class Shares(nn.Module):
    """Mixes 256 tokens by shares of scores that a layer gives and an offset moves, as a state space does it."""

    def __init__(self, softmax: nn.Module, offset: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.scores, self.head = nn.Conv2d(3, 16, 2, 2), nn.Conv2d(16, 16, 1), nn.Linear(256, 4)
        self.softmax = softmax
        self.register_buffer("offset", offset * torch.linspace(-1, 1, 16)[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        shares = self.softmax(self.scores(x).flatten(2) + self.offset)
        return self.head(torch.matmul(x.flatten(2), shares.transpose(1, 2)).flatten(1))


class Along(nn.Module):
    """A softmax that is a function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)


def kept(module: nn.Module, target: TargetName) -> float:
    """How much of what differs between images integers keep, in dB."""
    torch.manual_seed(0)
    form, images = integers_of(module, target), colours().example(32)
    with torch.no_grad():
        wanted, found = (each - each.mean(0) for each in (module(images), form(images)))
    ratio = sqnr_db(wanted.numpy(), found.numpy())
    assert ratio is not None
    return ratio


@pytest.mark.parametrize("target", ["x86", "x86-vnni", "tensorrt"])
def test_a_softmax_that_is_a_module_is_the_function(target: TargetName) -> None:
    """Each share of 256 tokens is about one step of the 1/256 that torch.ao gives the module."""
    module, function = (Shares(softmax).eval() for softmax in (nn.Softmax(-1), Along()))
    assert kept(module, target) == pytest.approx(kept(function, target), abs=1e-3)


@pytest.mark.parametrize("target", ["x86", "x86-vnni", "tensorrt"])
def test_an_offset_that_no_share_depends_on_costs_nothing(target: TargetName) -> None:
    plain, moved = (Shares(Along(), offset).eval() for offset in (0.0, 50.0))
    with torch.no_grad():
        torch.testing.assert_close(plain(IMAGES), moved(IMAGES), rtol=0, atol=1e-4)
    assert kept(moved, target) > kept(plain, target) - 0.5


class Stream(nn.Module):
    """Blocks that add to one tensor from the stem to the head, which norms read; and a layer, if one is given."""

    def __init__(self, reader: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.drop, self.places = (
            nn.Conv2d(3, 24, 8, 8),
            nn.Dropout(0.1),
            nn.Parameter(torch.randn(1, 16, 24)),
        )
        self.norms = nn.ModuleList([nn.LayerNorm(24) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])
        self.scale, self.reader = nn.Parameter(torch.rand(24)), reader
        self.last, self.head = nn.LayerNorm(24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.stem(x).flatten(2).transpose(1, 2) + self.places)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.drop(layer(norm(x)) * self.scale)
        read = self.last(x) if self.reader is None else self.last(x) + self.reader(x)
        return self.head(read[:, 0])


def rounded(module: nn.Module, target: TargetName) -> list[str]:
    """What gives the tensors that are rounded."""
    nodes = integers_of(module, target).graph.nodes
    return [_origin(node.args[0]) for node in nodes if quantizing(node) == "quantize_per_tensor"]


@pytest.mark.parametrize("target", ["x86", "x86-vnni", "tensorrt"])
def test_a_transformers_stream_is_not_rounded_and_what_its_layers_read_is(target: TargetName) -> None:
    found = rounded(Stream().eval(), target)
    assert found.count("aten.layer_norm.default") == 3  # and of the last what the head reads
    assert found.count("aten.select.int") == 1
    assert "aten.add.Tensor" not in found
    assert "aten.mul.Tensor" not in found


@pytest.mark.parametrize("target", ["x86", "x86-vnni", "tensorrt"])
def test_a_sum_that_a_layer_reads_is_rounded_for_it(target: TargetName) -> None:
    assert rounded(Stream(nn.Linear(24, 24)).eval(), target).count("aten.add.Tensor") == 5


@needs_timm
def test_timms_vit_is_written_out() -> None:
    import timm

    torch.manual_seed(0)
    module = shaken(timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=4, depth=2))
    found = written(module)
    assert calls(found, torch.matmul) == 4
    with torch.no_grad():
        torch.testing.assert_close(found(IMAGES), module(IMAGES), rtol=0, atol=1e-5)
