"""``half`` is what its label says, ``dynamic`` is int8 where it says, and every file opens without the model's code."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._export.serde import serialize
from torch.export.pt2_archive._package import load_pt2
from torch.nn import functional

from optimize.errors import NotApplicableError, PassError
from optimize.export import half
from optimize.export.half import check_half
from optimize.export.program import write_program
from optimize.measure.worker import OPENED_LATER
from optimize.passes.dynamic import DYNAMIC, Dynamic
from optimize.passes.half import HALF, Half
from optimize.passes.onnx_half import ONNX_HALF
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import open_engine
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.errors import EngineError
from serve.runtime.model_files.program_file import load_program
from tests.narrow import layer
from tests.optimize.workbench import noise_context, parent_of, run
from tests.processor import NEEDS_BF16

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def stored_types(path: Path) -> set[torch.dtype]:
    return {tensor.dtype for tensor in load_program(path).state_dict.values() if tensor.is_floating_point()}


# --- half --------------------------------------------------------------------------------------------------------


def test_fp16_is_stored_in_fp16_and_labelled_for_cuda(trained, made):
    artifact = made("half")
    assert stored_types(artifact.path) == {torch.float16}
    card = artifact.card
    assert (card.precision, card.input_dtype, card.device) == ("float16", "float16", "cuda")
    with pytest.raises(EngineError, match="runs on cuda only"):
        open_engine(artifact.folder, card, Execution("exported"))


def test_the_fp16_program_holds_the_parents_weights_rounded(trained, made):
    wanted = trained.module().state_dict()
    for name, tensor in load_program(made("half").path).state_dict.items():
        if tensor.is_floating_point():
            assert torch.equal(tensor, wanted[name].half()), name


@NEEDS_BF16
def test_bfloat16_is_stored_in_bfloat16_and_runs_here(session, trained, digits_context):
    artifact = session.apply(trained, Half(dtype="bfloat16"), "bf16").artifact
    assert stored_types(artifact.path) == {torch.bfloat16}
    assert (artifact.card.precision, artifact.card.input_dtype, artifact.card.device) == ("bfloat16", "bfloat16", "any")
    batch = digits_context.example(16)
    logits = run(artifact, batch.bfloat16())
    assert logits.dtype == torch.bfloat16
    with torch.no_grad():
        wanted = trained.module()(batch)
    assert 0 < (logits.float() - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert run(artifact, batch[:1].bfloat16()).shape == (1, 10)


def test_bfloat16_is_not_applicable_on_a_cpu_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    context = noise_context()
    parent = parent_of(nn.Flatten(), context, tmp_path / "parent")
    with pytest.raises(NotApplicableError, match="bfloat16 needs a CPU with AVX-512 BF16, or CUDA"):
        HALF.apply(parent, Half(dtype="bfloat16"), context, tmp_path)


@pytest.mark.parametrize("value", [1e6, -7e4, float("inf")])
def test_a_weight_beyond_fp16_is_named(tmp_path, value):
    module = nn.Sequential(nn.Flatten(), nn.Linear(256, 4)).eval()
    layer(module, 1, nn.Linear).bias.data[3] = value
    context = noise_context()
    with pytest.raises(NotApplicableError, match=r"weight 1\.bias holds"):
        HALF.apply(parent_of(module, context, tmp_path / "parent"), Half(), context, tmp_path)


class Overflowing(nn.Module):
    """The second layer's values are in FP32's range and not in FP16's; the answers are small again."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 4)
        self.first.weight.data.fill_(factor)
        self.second.weight.data.fill_(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return self.head((x / x.abs().amax((1, 2, 3), keepdim=True)).mean((2, 3)))


class Underflowing(nn.Module):
    """A guard against division by zero that FP16 rounds to zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = (x - x).mean((1, 2, 3))[:, None]
        return (zero / (zero + 1e-9)).expand(-1, 4) + x.mean((2, 3))


@pytest.mark.parametrize("entry", [HALF, ONNX_HALF], ids=lambda entry: entry.name)
def test_a_layer_that_leaves_fp16s_range_on_real_images_is_named(entry, tmp_path):
    torch.manual_seed(0)
    context, module = noise_context(), Overflowing(100.0).eval()
    with torch.no_grad():
        reached = module.second(module.first(context.example(16))).abs().max().item()
        assert reached > 65504
        assert module(context.example(16)).isfinite().all()
    with pytest.raises(
        NotApplicableError, match=r"second reaches [0-9.e+]+ on training images, more than float16's 65504"
    ):
        entry.apply(parent_of(module, context, tmp_path / "parent"), entry.config(), context, tmp_path)
    (tmp_path / "calm").mkdir()
    parent = parent_of(Overflowing(1.0).eval(), context, tmp_path / "calm" / "parent")
    entry.apply(parent, entry.config(), context, tmp_path / "calm")


@pytest.mark.parametrize("entry", [HALF, ONNX_HALF], ids=lambda entry: entry.name)
def test_answers_that_are_not_finite_in_fp16_fail(entry, tmp_path):
    context = noise_context()
    parent = parent_of(Underflowing().eval(), context, tmp_path / "parent")
    with pytest.raises(PassError, match="in float16 the outputs of 8 of 8 training images are not finite"):
        entry.apply(parent, entry.config(), context, tmp_path)


class Masked(nn.Module):
    """What is infinite in FP32 too is meant: a mask before a softmax, and memory that is written later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x[:, 0].masked_fill(torch.eye(16, dtype=torch.bool), float("-inf")).softmax(-1)
        out = torch.empty_like(scores)
        out.copy_(scores).mul_(2.0).relu_()
        return out[None].expand(2, -1, -1, -1).mean((0, 2))


def test_masks_and_operations_in_place_are_no_overflow():
    check_half(Masked().eval(), torch.float16, noise_context().example(16))


def test_the_emulated_arithmetic_is_that_of_fp16(trained, digits_context):
    module, images = trained.module(), digits_context.example(8)
    rounding = half._Rounding(torch.float16)
    with torch.no_grad():
        with rounding:
            emulated = copy.deepcopy(module).half().float()(images.half().float())
        real, exact = copy.deepcopy(module).half()(images.half()).float(), module(images)
    assert (emulated - real).abs().max() < 0.5 * (exact - real).abs().max() + 1e-3 * exact.abs().max()
    assert torch.equal(emulated, emulated.half().float())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("engine", ["exported", "torch-cudagraph"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_half_program_agrees_with_its_parent_on_cuda(dtype, engine, session, trained, digits_context):
    cuda = torch.device("cuda")
    on_cuda = dataclasses.replace(session, context=dataclasses.replace(digits_context, device=cuda))
    artifact = on_cuda.apply(trained, Half(dtype=dtype), f"half-{dtype}").artifact
    opened = open_engine(artifact.folder, artifact.card, Execution(engine, "cuda"))
    batch = digits_context.example(16)
    with torch.no_grad():
        (logits,) = opened.run(batch.to(cuda, getattr(torch, dtype)))
        wanted = trained.module()(batch)
    assert logits.dtype == getattr(torch, dtype)
    assert logits.device.type == "cuda"
    bound = 0.02 if dtype == "float16" else 0.05
    assert (logits.float().cpu() - wanted).abs().max() < bound * wanted.abs().max()
    assert (logits.argmax(1).cpu() == wanted.argmax(1)).all()


@pytest.mark.gpu
@NEEDS_GPU
def test_the_fp16_graph_agrees_with_its_parent_on_cuda(trained, made, digits_context):
    artifact = made("onnx-half")
    assert artifact.card.input_dtype == "uint8"  # the graph normalises
    engine = open_engine(artifact.folder, artifact.card, Execution("onnxruntime-cuda", "cuda"))
    with torch.no_grad():
        logits = engine.run(digits_context.pixels(16).cuda())[0].cpu()
        wanted = trained.module()(digits_context.example(16))
    assert engine.provider == "onnxruntime/CUDAExecutionProvider"
    assert (logits - wanted).abs().max() < 0.02 * wanted.abs().max()


# --- dynamic -----------------------------------------------------------------------------------------------------


def test_dynamic_quantizes_the_linear_layers_and_says_which(trained, made, digits_context):
    artifact = made("dynamic")
    use_int8_kernels()
    nodes = list(torch.jit.load(str(artifact.path)).inlined_graph.nodes())
    kinds = [node.kind() for node in nodes]
    assert kinds.count("quantized::linear_dynamic") == 1
    assert "aten::linear" not in kinds
    assert "1 layers quantized: head" in artifact.card.notes[0]
    assert "int8" in artifact.card.precision
    assert "linear" in artifact.card.precision
    assert artifact.card.device == "cpu"
    batch = digits_context.example(16)
    with torch.no_grad():
        wanted = trained.module()(batch)
    assert 0 < (run(artifact, batch) - wanted).abs().max() < 0.05 * wanted.abs().max()
    for count in (1, 3):
        assert run(artifact, batch[:count]).shape == (count, 10)


@pytest.mark.parametrize("per_channel", [True, False])
def test_dynamic_weights_have_a_scale_for_each_output_or_one_for_all(tmp_path, per_channel):
    module = nn.Sequential(nn.Flatten(), nn.Linear(256, 4)).eval()
    layer(module, 1, nn.Linear).weight.data *= torch.tensor([1.0, 10.0, 100.0, 1000.0])[:, None]
    context = noise_context()
    parent = parent_of(module, context, tmp_path / "parent")
    DYNAMIC.apply(parent, Dynamic(per_channel=per_channel), context, tmp_path)
    batch = context.example(8)
    use_int8_kernels()
    with torch.no_grad():
        logits, wanted = torch.jit.load(str(tmp_path / "model.pt"))(batch), module(batch)
    error = (logits - wanted).abs().amax(0) / wanted.abs().amax(0)
    # With one scale for all, the smallest row's 127 steps shrink to a fraction of one.
    assert error[3] < 0.05
    assert (error[0] < 0.05) == per_channel


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(16, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[:, 0])[0][:, -1, :4]


def test_dynamic_quantizes_recurrent_layers(tmp_path):
    torch.manual_seed(0)
    module, context = Recurrent().eval(), noise_context()
    DYNAMIC.apply(parent_of(module, context, tmp_path / "parent"), Dynamic(), context, tmp_path)
    batch = context.example(6)
    use_int8_kernels()
    program = torch.jit.load(str(tmp_path / "model.pt"))
    assert "aten::quantized_lstm" in [node.kind() for node in program.inlined_graph.nodes()]
    with torch.no_grad():
        assert 0 < (program(batch) - module(batch)).abs().max() < 0.05
        assert program(batch[:1]).shape == (1, 4)


class Unbiased(nn.Module):
    """Recurrent layers of every kind, whose sums begin with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, num_layers=2, bias=False, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(16, 8, bias=False, batch_first=True)
        self.lstm_cell, self.gru_cell = nn.LSTMCell(8, 8, bias=False), nn.GRUCell(8, 8, bias=False)
        self.plain_cell = nn.RNNCell(8, 4, bias=False, nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.gru(self.lstm(x[:, 0])[0])[0][:, -1]
        return self.plain_cell(self.gru_cell(self.lstm_cell(last)[0]))


def test_dynamic_takes_recurrent_layers_without_biases(tmp_path):
    torch.manual_seed(0)
    module, context = Unbiased().eval(), noise_context()
    product = DYNAMIC.apply(parent_of(module, context, tmp_path / "parent"), Dynamic(), context, tmp_path)
    assert product.notes[0].startswith("5 layers quantized")
    batch = context.example(6)
    use_int8_kernels()
    with torch.no_grad():
        found, wanted = torch.jit.load(str(tmp_path / "model.pt"))(batch), module(batch)
    assert 0 < (found - wanted).abs().max() < 0.05 * wanted.abs().max()


class Reads(nn.Module):
    """Calls one linear layer and reads the weight of another, as Swin's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(256, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(functional.linear(torch.flatten(x, 1), self.read.weight, self.read.bias))


def test_dynamic_leaves_alone_what_is_not_called(tmp_path):
    module, context = Reads().eval(), noise_context()
    product = DYNAMIC.apply(parent_of(module, context, tmp_path / "parent"), Dynamic(), context, tmp_path)
    assert product.notes[0] == "1 layers quantized: called"
    assert product.notes[1].startswith("int8 linear layers against float arithmetic: SQNR ")
    batch = context.example(8)
    use_int8_kernels()
    with torch.no_grad():
        difference = torch.jit.load(str(tmp_path / "model.pt"))(batch) - module(batch)
    assert 0 < difference.abs().max() < 0.05 * module(batch).abs().max()


def test_dynamic_has_nothing_to_do_without_linear_layers(tmp_path):
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    context = noise_context()
    with pytest.raises(NotApplicableError, match="no linear or recurrent layer"):
        DYNAMIC.apply(parent_of(module, context, tmp_path / "parent"), Dynamic(), context, tmp_path)


# --- files -------------------------------------------------------------------------------------------------------

OPEN = """
import importlib, json, os, sys
sys.path.insert(0, {root!r})
import torch
for name in {later!r}:  # which each would import
    importlib.import_module(name)
from pathlib import Path
from serve.runtime.card.card import load_card
from serve.runtime.engines.base import open_engine, preferred
for folder, out in json.loads({folders!r}):
    if child := os.fork():  # a process for each, that need not import torch again
        assert os.waitpid(child, 0)[1] == 0, folder
        continue
    card = load_card(Path(folder))
    engine = open_engine(Path(folder), card, preferred(card, "cpu"))
    batch = torch.load({batch!r})["pixels" if card.input_dtype == "uint8" else "floats"]
    torch.save(engine.run(batch)[0].detach().float(), out)
    assert not [name for name in sys.modules if "tiny_net" in name or name.split(".")[0] in ("optimize", "tests")]
    sys.exit()
"""


def test_the_files_open_without_the_models_code(made, digits_context, tmp_path):
    passes = [(), ("fuse",), ("dynamic",), ("ptq",), ("qat",), ("onnx",), ("onnx-half",), ("ptq", "onnx-int8")]
    artifacts = [made(*names) for names in passes]
    batches = {"pixels": digits_context.pixels(5), "floats": digits_context.example(5)}
    torch.save(batches, tmp_path / "batch.pt")
    outs = [tmp_path / f"{number}.pt" for number in range(len(artifacts))]
    folders = [(str(artifact.folder), str(out)) for artifact, out in zip(artifacts, outs, strict=True)]
    (tmp_path / "open.py").write_text(
        OPEN.format(
            root=str(Path(__file__).parents[3]),
            later=OPENED_LATER,
            folders=json.dumps(folders),
            batch=str(tmp_path / "batch.pt"),
        )
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "open.py")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for artifact, out in zip(artifacts, outs, strict=True):
        batch = batches["pixels" if artifact.card.input_dtype == "uint8" else "floats"]
        torch.testing.assert_close(torch.load(out), run(artifact, batch), rtol=1e-4, atol=1e-4)


def test_a_program_opens_as_torch_itself_opens_it(made):
    path = made("fuse").folder / "model.pt2"
    ours, own = load_program(path), load_pt2(str(path)).exported_programs["model"]
    assert str(ours) == str(own)
    assert len(ours.graph.nodes) > 10
    assert [str(node.meta.get("val")) for node in ours.graph.nodes] == [
        str(node.meta.get("val")) for node in own.graph.nodes
    ]
    assert all(torch.equal(value, own.state_dict[name]) for name, value in ours.state_dict.items())
    assert vars(serialize)["typing"] is typing


class NotExportable(nn.Module):
    """Branches on a value, which torch.export refuses and tracing settles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)) if x.abs().sum().item() >= 0 else x.sum((2, 3))


def test_a_model_that_cannot_be_exported_is_traced_instead(tmp_path):
    batch = torch.randn(4, 3, 8, 8)
    assert write_program(NotExportable().eval(), batch, tmp_path) == ("model.pt", "torchscript")
    program = torch.jit.load(str(tmp_path / "model.pt"))
    other = torch.randn(7, 3, 8, 8)
    torch.testing.assert_close(program(other), other.mean((2, 3)))


class Nowhere(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the model's own complaint\nover two lines")


def test_a_model_that_nothing_can_write_is_refused_in_one_line(tmp_path):
    with pytest.raises(PassError, match=r"neither torch\.export nor torch\.jit\.trace can write this model") as caught:
        write_program(Nowhere(), torch.randn(2, 3, 4, 4), tmp_path)
    assert "\n" not in str(caught.value)
