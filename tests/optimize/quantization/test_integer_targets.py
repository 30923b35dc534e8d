"""Integer targets: what a card states, which CPU refuses it, and that 7 bits are 7 bits in every engine."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path

import pytest
import torch

from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import Qat
from optimize.quantization.targets import x86_target
from optimize.store.artifact import Artifact
from serve.runtime.card.execution import Execution
from serve.runtime.device import cpu_integers
from serve.runtime.engines.base import engines, executions_for, open_engine
from serve.runtime.errors import EngineError, UserError
from tests.optimize.quantization.test_int8_kernels import depthwise
from tests.optimize.workbench import applied, noise, noise_context, parent_of, run
from tests.processor import NEEDS_VNNI
from tests.programs import Programs

#: Engines on the CPU for what ptq writes, and for its graph.
ENGINES = {"ptq": ("torchscript",), "onnx-int8": ("onnxruntime", "openvino")}

ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="is about x86 CPUs")

#: Opens each folder with each engine on a CPU that says it has no VNNI, and runs it.
WITHOUT_VNNI = """
import json, sys
sys.path.insert(0, {root!r})
import torch
torch.cpu._is_vnni_supported = lambda: False
from pathlib import Path
from serve.runtime.errors import EngineError
from serve.runtime.card.execution import Execution
from serve.runtime.service.predictor import Predictor
pixels, said = torch.load({pixels!r}), {{}}
for folder, engine in json.loads({pairs!r}):
    try:
        torch.save(Predictor(Path(folder), Execution(engine)).logits(pixels), f"{{folder}}-{{engine}}.logits")
        said[f"{{folder}} {{engine}}"] = None
    except EngineError as error:
        said[f"{{folder}} {{engine}}"] = str(error)
try:
    Predictor(Path(json.loads({pairs!r})[0][0]))
    said["any"] = None
except EngineError as error:
    said["any"] = str(error)
print(json.dumps(said))
"""


def without_vnni(
    pairs: list[tuple[Path, str]], pixels: torch.Tensor, scratch: Path, programs: Programs
) -> dict[str, str | None]:
    """What opening says, by folder and engine; and for the first folder with whatever engine is preferred."""
    torch.save(pixels, scratch / "pixels.pt")
    program = WITHOUT_VNNI.format(
        root=str(Path(__file__).parents[3]),
        pixels=str(scratch / "pixels.pt"),
        pairs=json.dumps([(str(folder), engine) for folder, engine in pairs]),
    )
    done = programs.run("-c", program)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_card_states_which_integers_it_was_built_for(made) -> None:
    own = x86_target().name
    for names in (("ptq",), ("qat",), ("ptq", "onnx-int8")):
        assert made(*names).card.target == own
    assert made("dynamic").card.target == "x86"  # see the next test
    for name in ("onnx", "fuse"):
        assert made(name).card.target is None
    narrow = made("ptq", target="x86")
    assert narrow.card.target == "x86"
    assert "activations 0 to 255, weights -63 to 63 (x86)" in narrow.card.notes[0]


def test_dynamic_layers_take_seven_bits_wherever_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer of one weight of 1 gives is what its input was rounded to."""
    layer = torch.ao.nn.quantized.dynamic.Linear(1, 1, bias_=False)
    engines_here = {"x86", "onednn"} & set(torch.backends.quantized.supported_engines)
    assert engines_here
    for engine in engines_here:
        monkeypatch.setattr(torch.backends.quantized, "engine", engine)
        layer.set_weight_bias(torch.quantize_per_tensor(torch.ones(1, 1), 1.0, 0, torch.qint8), None)
        assert layer(torch.linspace(0, 1, 10_001)[:, None]).unique().numel() == 128


@NEEDS_VNNI
@ON_X86
def test_a_cpu_without_vnni_refuses_eight_bits_in_every_engine(made, digits_context, tmp_path, programs) -> None:
    artifacts = {"ptq": made("ptq"), "onnx-int8": made("ptq", "onnx-int8")}
    pairs = [(artifacts[name].folder, engine) for name, found in ENGINES.items() for engine in found]
    said = without_vnni(pairs, digits_context.pixels(4), tmp_path, programs)
    assert len(said) == 4
    for message in said.values():
        assert message is not None
        assert "built for CPUs with VNNI (target x86-vnni, weights -127 to 127), and this CPU has none" in message
        assert "Build it here, or set target: x86 (weights -63 to 63)" in message
        assert "\n" not in message


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> dict[str, Artifact]:
    """A network whose products are all large and of one sign, with weights of 7 bits, and its graph."""
    root: Path = tmp_path_factory.mktemp("narrow")
    context, module = noise_context(train=noise(64, 1, 100, 140)), depthwise(128, 1)
    for parameter in module.get_submodule("2").parameters():
        parameter.data.fill_(0.1)
    parent = parent_of(module, context, root / "parent")
    config = Ptq(observer="minmax", target="x86", min_sqnr=0, min_agreement=0)
    packed = applied(PTQ, config, parent, context, root / "ptq")
    graph = applied(ONNX_INT8, OnnxInt8(min_sqnr=0, min_agreement=0), packed, context, root / "onnx-int8")
    return {"ptq": packed, "onnx-int8": graph}


@ON_X86
def test_seven_bits_open_there_and_answer_as_everywhere_whatever_comes_in(narrow, tmp_path, programs) -> None:
    """Inputs far brighter and darker than those that were calibrated on, whose integers are all large."""
    pixels = torch.randint(0, 256, (16, 1, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pixels[8:] = 255
    pairs = [(narrow[name].folder, engine) for name, found in ENGINES.items() for engine in found]
    assert set(without_vnni(pairs, pixels, tmp_path, programs).values()) == {None}
    logits = {f"{engine} there": torch.load(f"{folder}-{engine}.logits") for folder, engine in pairs}
    from serve.runtime.service.predictor import infer

    for name, found in ENGINES.items():
        card = narrow[name].card
        for engine in found:
            opened = open_engine(narrow[name].folder, card, Execution(engine))
            (logits[f"{engine} here"],) = infer(opened, pixels, card.preprocessing, getattr(torch, card.input_dtype))
    reference = logits.pop("onnxruntime here")
    assert reference.unique().numel() > 4
    step = min(float(gap) for gap in reference.unique().diff())
    for name, answers in logits.items():
        # Ties of the two roundings that OpenVINO takes in another order; a sum that saturated would be off by far more.
        assert (answers - reference).abs().max() <= 2.01 * step, name


def test_what_cannot_be_checked_here_is_not_built(session, trained, monkeypatch) -> None:
    monkeypatch.setattr(cpu_integers, "has_vnni", lambda: False)
    for config in (Ptq(target="x86-vnni"), Qat(target="x86-vnni")):
        with pytest.raises(UserError, match=r"target: x86-vnni cannot be built here: .* target: x86 runs on every x86"):
            session.apply(trained, config)


def test_engines_refuse_integers_that_they_do_not_compute(made) -> None:
    artifact = made("ptq", "onnx-int8")
    foreign = dataclasses.replace(artifact.card, target="tensorrt")
    for engine in ENGINES["onnx-int8"]:
        expected = rf"{engine} computes integers built for x86 and x86-vnni, not for tensorrt"
        assert engines()[engine].refuses(foreign, "cpu") == expected
        with pytest.raises(EngineError, match=expected):
            open_engine(artifact.folder, foreign, Execution(engine))
    old = dataclasses.replace(artifact.card, target=None)  # written before cards stated it
    assert [entry.engine for entry in executions_for(old)] == [entry.engine for entry in executions_for(artifact.card)]


def test_other_processors_than_x86_have_no_sums_of_16_bits(monkeypatch) -> None:
    monkeypatch.setattr(cpu_integers, "has_vnni", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu_integers.saturates("x86-vnni") is None
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert cpu_integers.saturates("x86-vnni") is not None
    assert cpu_integers.saturates("x86") is cpu_integers.saturates(None) is None


def test_a_network_in_seven_bits_keeps_its_answers(trained, made, digits_context) -> None:
    batch = digits_context.example(256)
    whole, narrow = run(trained, batch), run(made("ptq", target="x86"), batch)
    assert not torch.equal(whole, narrow)
    assert (whole.argmax(1) == narrow.argmax(1)).float().mean() > 0.9


@NEEDS_VNNI
def test_seven_bits_are_not_the_eight_that_this_cpu_computes(made, digits_context) -> None:
    batch = digits_context.example(16)
    assert not torch.equal(run(made("ptq"), batch), run(made("ptq", target="x86"), batch))
