"""With target x86 two products of every layer fit into 16 bits: in the reference, packed, in the graph.

That is what a CPU without VNNI adds them in; those of 255 and 127 do not.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from optimize.context import Context
from optimize.lint.base import lint
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat_lowbit import QAT_LOWBIT, QatLowbit
from optimize.quantization.graph.explicit_quantizers import quantizing
from optimize.quantization.lowering.integer_biases import WEIGHTED
from optimize.quantization.lowering.qdq import lower
from optimize.quantization.targets import target_named
from optimize.store.artifact import REFERENCE_FILE
from optimize.tracing.folding import fuse_module
from serve.runtime.card.card import Preprocessing
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.errors import UserError
from serve.runtime.model_files.program_file import load_program
from tests.optimize.families import FAMILIES
from tests.optimize.workbench import CPU, image_data, noise, parent_of, with_running_statistics

COLOUR32 = Preprocessing(32, (32, 32), mean=(0.5,) * 3, std=(0.25,) * 3)


class Shares(nn.Module):
    """A softmax that is a module, beside one that is a function, in front of layers with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.softmax = nn.Conv2d(3, 8, 3, stride=4), nn.Softmax(2)
        self.second, self.last = nn.Conv2d(8, 8, 1), nn.Linear(8 * 64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.softmax(self.first(x)))
        return self.last(torch.flatten(x.softmax(1), 1))


class Overwritten(nn.Module):
    """A tanh that writes into what another layer has read before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        before = self.second(x)
        return (before + self.third(x.tanh_())).mean((2, 3))


NETS: dict[str, Callable[[], nn.Module]] = {
    "shares": Shares,
    "overwritten": Overwritten,
    **{name: FAMILIES[name] for name in ("googlenet", "mobilenet_v3")},
}


def in_program(folder: Path) -> list[tuple[int, int]]:
    """The largest integer that each layer with int8 weights can read, by the reference program, and of its weight."""
    module, found = load_program(folder / REFERENCE_FILE).module(), []
    for node in module.graph.nodes:
        if node.target in WEIGHTED and quantizing(node.args[1]):
            assert quantizing(node.args[0]) == "dequantize_per_tensor", f"{node} reads floats"
            weight: torch.Tensor = attrgetter(node.args[1].args[0].target)(module)
            assert weight.dtype == torch.int8
            found.append((node.args[0].args[4], widest(weight)))
    assert found
    return found


def in_packed(path: Path, batch: torch.Tensor) -> list[tuple[int, int]]:
    """The same of what each layer of torch's packed program is given, of a batch ``(N, C, H, W)``."""
    use_int8_kernels()
    script: Any = torch.jit.load(str(path))
    graph = script.inlined_graph
    layers = [node for node in graph.nodes() if node.kind().startswith(("quantized::conv", "quantized::linear"))]
    both = graph.create("prim::TupleConstruct", [*graph.outputs(), *(next(iter(node.inputs())) for node in layers)])
    graph.appendNode(both)
    both.output().setType(torch._C.TupleType([each.type() for each in both.inputs()]))
    graph.eraseOutput(0)
    graph.registerOutput(both.output())
    with torch.no_grad():
        _, *given = torch._C._create_function_from_graph("given", graph)(script._c, batch)
    assert given
    packed = [[*node.inputs()][1].toIValue() for node in layers]
    return [
        (int(each.int_repr().max()), widest(own.unpack()[0].int_repr()))
        for each, own in zip(given, packed, strict=True)
    ]


def widest(weight: torch.Tensor) -> int:
    return int(weight.int().abs().max())


def fit(layers: list[tuple[int, int]]) -> bool:
    return all(2 * given * weight < 2**15 for given, weight in layers)


@pytest.mark.parametrize("name", NETS)
def test_products_fit_after_ptq(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    context = Context(image_data(noise(24, 1), noise(8, 2), 4), COLOUR32, CPU)
    net = fuse_module(with_running_statistics(NETS[name]()), context.example())
    config = Ptq(observer="minmax", images=24, target="x86", min_sqnr=-99, min_agreement=0)
    (tmp_path / "ptq").mkdir()
    product = PTQ.apply(parent_of(net, context, tmp_path / "parent"), config, context, tmp_path / "ptq")
    assert set(in_program(tmp_path / "ptq")) == {(255, 63)}
    # Ten times as bright and as dark as any image: integers are as large as they get.
    found = in_packed(tmp_path / "ptq" / product.file, 10 * context.example(8))
    assert len(found) == len(in_program(tmp_path / "ptq"))
    assert max(found) == (255, 63)
    assert fit(found)
    lower(load_program(tmp_path / "ptq" / REFERENCE_FILE), context.example(4), tmp_path / "g.onnx", target_named("x86"))
    assert [found for found in lint(onnx.load(tmp_path / "g.onnx"), "x86") if found.severity == "error"] == []


@pytest.mark.parametrize("name", ["qat", "ptq-lowbit", "qat-lowbit"])
def test_nor_after_passes_that_train_or_take_fewer_bits(name: str, made: Any, digits_context: Any) -> None:
    training = {"epochs": 1, "images": 64, "augment": False} if name == "qat-lowbit" else {}
    artifact = made(name, target="x86", **training)
    for found in (in_program(artifact.folder), in_packed(artifact.path, 10 * digits_context.example(8))):
        assert fit(found)
        assert max(given for given, _ in found) == 255, "the first layer and the last"


def test_more_than_fits_is_refused_before_anything_is_trained() -> None:
    config = QatLowbit(target="x86", weight_quantizer="dorefa", weight_bits=7, activation_bits=8)
    assert QAT_LOWBIT.check is not None
    with pytest.raises(
        UserError, match=r"dorefa of 7 bits has integers up to 127, .* or activation_bits to at most 7$"
    ):
        QAT_LOWBIT.check(Shares, config)
    QAT_LOWBIT.check(Shares, config.model_copy(update={"activation_bits": 7}))
