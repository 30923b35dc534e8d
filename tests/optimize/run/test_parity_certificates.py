"""Parity certificates of a run: what they compare, where they stand, and that they are made once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from optimize import cli
from optimize.certify.layer_findings import Engine, LayerParity, Unable
from optimize.certify.reference_program import ReferenceLayers
from optimize.data.formats.base import open_data
from optimize.data.splits import subset
from optimize.measure.accuracy import Answers
from optimize.measure.answer_parity import agreement
from optimize.measure.bench import Bench, Candidate, Kept
from optimize.measure.rows import Skip
from optimize.passes.ptq import PTQ, Ptq
from optimize.report.certification_table import print_engines
from optimize.report.parity_text import explained, parity_lines
from optimize.run.certification import parity_certificates
from optimize.run.certification.on_demand import certify_layers
from optimize.run.certification.parity_certificates import certify as certified_by
from optimize.run.certification.subject import subject
from optimize.store.artifact import REFERENCE_FILE, Artifact
from optimize.store.objects import Store
from optimize.tasks.classification import CLASSIFICATION
from serve.runs.sealed_files import seal
from serve.runtime.card.card import load_card
from serve.runtime.card.certificate import Agreement, Certificate
from serve.runtime.card.execution import Execution
from serve.runtime.errors import UserError
from serve.runtime.model_files.program_file import load_program
from serve.runtime.service.predictor import Predictor
from tests.optimize.runs_fixtures import Heard, TinyRun, command, copied_store, tiny_run
from tests.optimize.workbench import applied, noise_context, parent_of
from tests.programs import Programs

__all__ = ["copied_store", "tiny_run"]  # fixtures

GRAPH = ("onnxruntime", "onnxruntime[optimizations=False]", "openvino", "torchscript")


def answers(logits: torch.Tensor, labels: torch.Tensor) -> Answers:
    return Answers(CLASSIFICATION.evidence((logits,), labels, logits.shape[1]), (logits,))


TORCH = Execution("torchscript")


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A small network as ptq leaves it, measured and not yet certified; what its listener heard."""

    artifact: Artifact
    bench: Bench
    answers: Kept[Answers]
    heard: Heard

    def certify(self, *more: Artifact, **skipped: str) -> parity_certificates.Certified:
        """Certify it, and others; ``skipped`` are engines of its own that were not measured, with the reason."""
        artifacts = [self.artifact, *more]
        absent = [Candidate(self.artifact, Execution(engine)) for engine in skipped]
        pairs = {each.name: [Candidate(each, TORCH)] for each in artifacts}
        pairs[self.artifact.name] += absent
        measured = {Candidate(each, TORCH).id: self.answers for each in artifacts}
        skips = {pair.id: Skip(kind="failed", reason=skipped[pair.execution.engine]) for pair in absent}
        return certified_by(artifacts, pairs, measured, skips, self.bench)


@pytest.fixture
def quantized(tmp_path: Path) -> Quantized:
    heard = Heard()
    context = dataclasses.replace(noise_context(), listener=heard)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(784, 4)).eval()
    parent = parent_of(net, context, tmp_path / "parent")
    config = Ptq(observer="minmax", images=32, min_sqnr=0.0, min_agreement=0.0)
    artifact = applied(PTQ, config, parent, context, tmp_path / "ptq")
    with Bench(Store(tmp_path / "store"), context) as bench:
        kept = bench.answers(Candidate(artifact, TORCH))
    return Quantized(artifact, bench, kept, heard)


def test_a_reason_of_several_lines_costs_no_certificate(quantized: Quantized) -> None:
    found = quantized.certify(openvino="it ended:\n\x1b[31m  segmentation\tfault\x1b[0m").certificates["ptq"]
    assert found.absent == {"openvino": "failed: it ended: [31m segmentation fault [0m"}
    assert [entry.execution for entry in found.agreements] == ["torchscript"]


def test_a_certificate_that_fails_is_said_in_a_line_and_costs_nothing_else(
    quantized: Quantized, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise AssertionError("a program\nof another form")

    monkeypatch.setattr(parity_certificates, "load_program", refuse)
    assert not quantized.certify().certificates
    said = [line for line in quantized.heard.lines if "certificate" in line]
    assert said == ["ptq: no parity certificate: AssertionError: a program"]


@pytest.mark.parametrize("error", [UserError("an image"), OSError("the disk is full")], ids=["user", "disk"])
def test_what_the_user_must_mend_ends_the_run(
    quantized: Quantized, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(path: Path) -> None:
        raise error

    monkeypatch.setattr(parity_certificates, "load_program", refuse)
    with pytest.raises(type(error), match=str(error)):
        quantized.certify()


def test_answers_that_were_just_taken_are_not_called_cached_by_a_second_reading(quantized: Quantized) -> None:
    again = dataclasses.replace(quantized.artifact, name="again")
    assert not quantized.certify(again).cached
    assert quantized.certify(again).cached


def test_a_graphs_certificate_says_what_torchs_kernels_ran() -> None:
    logits, labels = torch.eye(5), torch.arange(5)
    torchs, openvinos = (
        agreement(name, answers(logits, labels), answers(logits, labels), steps={"logits": None}, task=CLASSIFICATION)
        for name in ("torchscript", "openvino")
    )

    def told(*entries: Agreement, **absent: str) -> bool:
        made = Certificate("a" * 64, None, 5, 5, "b" * 64, entries, absent=absent)
        return "torchscript ran the packed program that the graph was made from" in explained(made, CLASSIFICATION)

    assert told(torchs, openvinos)
    assert told(torchs, openvino="it is not installed")
    assert not told(torchs)
    assert not told(openvinos)


def certificate(run: TinyRun, name: str) -> Certificate:
    found = run.row(name).certificate
    assert found is not None
    return found


def test_an_agreement_counts_steps_of_the_answers_quantizer() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randint(-100, 100, (40, 5), generator=generator) * 0.5
    labels = torch.arange(40) % 5
    other = reference.clone()
    other[3, 2] += 1.5
    other[7, 0] -= 1.0
    found = agreement(
        "any", answers(reference, labels), answers(other, labels), steps={"logits": 0.5}, task=CLASSIFICATION
    )
    assert found.steps == 3.0
    assert found.max_abs == 1.5
    assert found.sqnr_db == pytest.approx(10 * math.log10(float((reference**2).sum()) / (1.5**2 + 1.0)))
    same = (reference.argmax(1) == other.argmax(1)).double().mean().item()
    assert found.agreement == same


def test_an_agreement_without_a_quantizer_of_the_answer_has_no_steps() -> None:
    logits, labels = torch.eye(5), torch.arange(5)
    found = agreement(
        "any", answers(logits, labels), answers(logits, labels), steps={"logits": None}, task=CLASSIFICATION
    )
    assert (found.steps, found.sqnr_db, found.max_abs, found.agreement) == (None, None, 0.0, 1.0)
    assert found.holds


def test_answers_of_a_kernel_that_saturates_do_not_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(400, 10, generator=generator), torch.arange(400) % 10
    found = agreement(
        "any",
        answers(logits, labels),
        answers(logits.clamp(max=0.5), labels),
        steps={"logits": 0.02},
        task=CLASSIFICATION,
    )
    assert not found.holds


@pytest.mark.parametrize("name", ["onnx-int8", "onnx-int8-qat"])
def test_a_graph_is_compared_in_every_engine_and_with_torchs_kernels(tiny_run: TinyRun, name: str) -> None:
    found = certificate(tiny_run, name)
    assert tuple(entry.execution for entry in found.agreements) == GRAPH
    assert not found.absent
    assert found.images == tiny_run.report.data.val
    assert found.data == tiny_run.report.data.val_fingerprint
    assert {"torch", "openvino"} <= set(found.versions)


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_a_packed_program_is_compared_with_its_reference(tiny_run: TinyRun, name: str) -> None:
    found = certificate(tiny_run, name)
    assert [entry.execution for entry in found.agreements] == ["torchscript"]
    reference = tiny_run.folder / "artifacts" / name / REFERENCE_FILE
    assert found.reference == load_card(reference.parent).files[REFERENCE_FILE]
    assert found.step == ReferenceLayers(load_program(reference)).steps[0]


def test_what_has_no_integers_of_its_own_has_none(tiny_run: TinyRun) -> None:
    certified = {row.name for row in tiny_run.report.rows if row.certificate is not None}
    assert certified == {"ptq", "qat", "onnx-int8", "onnx-int8-qat"}


def test_the_figures_are_those_of_the_files(tiny_run: TinyRun, digits) -> None:
    """Reference and graph opened by hand, and compared by numpy."""
    from optimize.data.loading import loader

    folder = tiny_run.folder / "artifacts" / "onnx-int8"
    card = load_card(folder)
    pixels = torch.cat(
        [images for images, _ in loader(digits.val, card.preprocessing, batch_size=64, device=torch.device("cpu"))]
    )
    mean, std = (
        torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (card.preprocessing.mean, card.preprocessing.std)
    )
    program = load_program(tiny_run.folder / "artifacts" / "ptq" / REFERENCE_FILE).module()
    with torch.no_grad():
        meant = program((pixels.float() / 255 - mean) / std)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: pixels.numpy()})
    entry = certificate(tiny_run, "onnx-int8").agreements[1]
    same = (meant.numpy().argmax(1) == found.argmax(1)).mean()
    assert entry.agreement == pytest.approx(same, abs=2 / len(pixels))
    right = [(logits.argmax(1) == digits.val.labels.numpy()).mean() for logits in (meant.numpy(), found)]
    assert entry.delta == pytest.approx(right[1] - right[0], abs=2 / len(pixels))
    assert np.abs(found).max() > 0


def test_it_stands_in_the_card_and_travels_in_the_archive(tiny_run: TinyRun, tmp_path: Path) -> None:
    import zipfile

    found = certificate(tiny_run, "onnx-int8")
    folder = tiny_run.folder / "artifacts" / "onnx-int8"
    assert load_card(folder).certificate == found
    assert Predictor(folder).describe()["certificate"] == found.to_json()
    (archive,) = (tiny_run.folder / "archives").glob("*-onnx-int8.mar")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path)
    assert load_card(tmp_path).certificate == found


def test_it_is_kept_in_the_store_and_by_the_run(tiny_run: TinyRun) -> None:
    found = certificate(tiny_run, "onnx-int8")
    stored = Store(tiny_run.store).open(found.key)
    assert stored is not None
    kept = Certificate.from_json(json.loads((stored.folder / "certificate.json").read_text()))
    assert dataclasses.replace(kept, key=found.key) == found
    assert found.key in json.loads((tiny_run.folder / "objects.json").read_text())


def test_the_page_and_the_terminal_show_it(tiny_run: TinyRun) -> None:
    page = (tiny_run.folder / "report.html").read_text()
    assert page.count("parity with what its integers mean") == 4
    assert "onnxruntime[optimizations=False]" in page
    lines = list(parity_lines(tiny_run.report))
    assert [line.split(" ")[0] for line in lines] == ["ptq", "qat", "onnx-int8", "onnx-int8-qat"]
    assert all("steps apart" in line for line in lines)
    packed = [line.count("torchscript (on ") for line in lines]
    assert packed == [0, 0, 1, 1], "a program of its own is not another artifact's"
    assert "torchscript (on ptq)" in lines[2]
    assert "torchscript (on qat)" in lines[3]
    graph = next(row for row in tiny_run.report.rows if row.name == "onnx-int8")
    smaller = graph.model_copy(update={"name": "onnx-packed", "parent": "onnx-int8"})
    later = tiny_run.report.model_copy(update={"rows": (*tiny_run.report.rows, smaller)})
    assert "torchscript (on ptq)" in list(parity_lines(later))[-1], "a graph of a graph has its program"


def test_layers_are_run_once_for_artifact_engine_and_images(copied_store: Path) -> None:
    for cached in (False, True):
        heard = Heard()
        (engine,) = certify_layers(copied_store, subject(copied_store, "tiny/ptq"), images=2, listener=heard)
        assert heard.steps == [("layers of torchscript", cached, None)]
        assert engine.sound
        assert [layer.outputs > 0 for layer in engine.layers] == [True] * len(engine.layers)
        assert engine.layers


def layers_of(store: Path, **options: Any) -> Engine:
    (engine,) = certify_layers(store, subject(store, "tiny/ptq"), images=1, listener=Heard(), **options)
    return engine


def with_data(store: Path, **changes: object) -> None:
    """Let the run's report say other things of its images."""
    path = store / "tiny" / "report.json"
    report = json.loads(path.read_text())
    report["data"] |= changes
    path.write_text(json.dumps(report))
    seal(path.parent)


def test_layers_are_run_on_no_other_images_than_the_run_was_measured_on(copied_store: Path) -> None:
    with pytest.raises(UserError, match=r"not those that tiny was measured on.* a --seed different from 3; .*--data"):
        layers_of(copied_store, seed=3)
    with_data(copied_store, val_fingerprint="0123")
    with pytest.raises(UserError, match="a --seed different from 0"):
        layers_of(copied_store)
    assert layers_of(copied_store, data="digits").layers, "images that are named may be any"


def test_of_a_run_that_measured_on_a_part_of_the_images_layers_are_run_on_that_part(copied_store: Path) -> None:
    val = open_data("digits", seed=0).val
    with_data(copied_store, val=100, val_of=len(val), val_fingerprint=subset(val, 100, 0).fingerprint)
    assert layers_of(copied_store).layers
    with pytest.raises(UserError, match="a --seed different from 1"):
        layers_of(copied_store, seed=1)


@pytest.mark.slow
def test_the_command_shows_layers_and_the_whole(tiny_run: TinyRun, copied_store: Path, programs: Programs) -> None:
    words = ["certify", "tiny/onnx-int8", "--layers", "--images", "4", "--store", str(copied_store)]
    ran = programs.run(*command(*words, "--json"))
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["certificate"] == json.loads(json.dumps(certificate(tiny_run, "onnx-int8").to_json()))
    assert sorted(engine["execution"] for engine in said["layers"]) == list(GRAPH[:3])
    assert all(engine["layers"] and engine["reason"] is None for engine in said["layers"])
    shown = CliRunner().invoke(cli.app, words, catch_exceptions=False).stdout
    assert "openvino, layer by layer" in shown
    assert "tiny/onnx-int8, end to end" in shown
    assert "openvino: all " in shown or "is the first that diverges" in shown


@pytest.mark.parametrize("name", ["ptq", "onnx-int8"])
def test_what_is_certified_knows_the_program_that_says_what_its_integers_mean(tiny_run: TinyRun, name: str) -> None:
    found = subject(tiny_run.store, f"tiny/{name}")
    assert found.reference == tiny_run.folder / "artifacts" / "ptq" / "reference.pt2"
    assert found.reference_sha256 == hashlib.sha256(found.reference.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--images", "4"), "error: --images: only single layers"),
        (("--data", "digits"), "error: --data: only single layers"),
        (("--seed", "0"), "error: --seed: only single layers"),
        (("--images", "8", "--data", "digits"), "error: --images and --data: only single layers"),
    ],
)
def test_images_that_no_layer_would_be_run_on_are_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["certify", "tiny/onnx-int8", *words, "--store", str(tmp_path)])
    assert result.exit_code == 2
    assert said in result.stderr
    assert "add --layers" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_pipe_gets_the_lines_of_layers_whole_in_the_programs_order(capsys: pytest.CaptureFixture[str]) -> None:
    name = "layer4.1.conv2: " + " ".join(f"conv2d_{number}" for number in range(60))
    compared = tuple(LayerParity(number, f"{number} {name}", 4096, 0, 0) for number in (0, 2))
    print_engines([Engine("openvino", compared, (Unable(1, "fc: linear", "no kernel [for it]"),))])
    said = capsys.readouterr().out
    assert name in said
    shown = [said.index(line) for line in (f"0 {name}", "could not be run alone: no kernel [for it]", f"2 {name}")]
    assert shown == sorted(shown)
    assert "all 2 layers that could be run give" in said
    assert said.rstrip().endswith("; 1 layer could not be run alone")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny", "certify takes RUN/ARTIFACT"),
        ("tiny/fuse", "has no static integers to certify"),
        ("tiny/dynamic", "has no static integers to certify"),
        ("tiny/onnx-int9", r"has no artifact 'onnx-int9' \(did you mean onnx-int8"),
        ("tinny/onnx-int8", "no run 'tinny'"),
    ],
)
def test_what_cannot_be_certified_is_said_in_a_line(tiny_run: TinyRun, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        subject(tiny_run.store, name)
    assert "\n" not in str(raised.value)
