"""A network with two outputs goes through the passes, the engines and the comparison, each output by itself."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import optimize as opt
from optimize.measure.accuracy import Answers, accuracy, least_sqnr, load_answers, parity, save_answers
from optimize.measure.answer_parity import agreement
from optimize.measure.figures import Parity
from optimize.models.preprocessing_config import Wish
from optimize.passes.base import pass_of
from optimize.passes.ptq import Ptq
from optimize.passes.qat import QAT
from optimize.quantization.gate import Gate, check_answers, each_sqnr
from optimize.report.parity_text import rows
from optimize.run.finished_run import artifact_of, reopen_run
from optimize.store.artifact import REFERENCE_FILE, Artifact
from optimize.tasks.classification import CLASSIFICATION
from serve.common.config import Config
from serve.runtime.card.card import Card, parse_card
from serve.runtime.card.certificate import Certificate
from serve.runtime.card.json_documents import sealed
from serve.runtime.engines.base import executions_for, unavailable
from serve.runtime.errors import CardError
from serve.runtime.model_files.program_file import load_program
from serve.runtime.service.predictor import Predictor
from tests.optimize.runs_fixtures import Heard, run_recipe, with_stages
from tests.optimize.workbench import applied, noise_context, parent_of, with_running_statistics

NAMES = ("logits", "map")
NETWORK = """
import torch
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.classes, self.map = nn.Linear(8, num_classes), nn.Conv2d(8, 3, 1)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(images)
        return {"map": self.map(features), "kinds": {"best": self.classes(features.mean((2, 3)))}}
"""


class TwoHeads(nn.Module):
    """Classes and a map of 8x8 places, from one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.classes, self.map = nn.Linear(16, 4), nn.Conv2d(16, 3, 1)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``(N, 4)`` and a map ``(N, 3, 8, 8)``."""
        features = self.body(images)
        return self.classes(features.mean((2, 3))), self.map(features)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    torch.manual_seed(0)
    network = with_running_statistics(TwoHeads())
    return parent_of(network, noise_context(), tmp_path_factory.mktemp("two") / "baseline", NAMES)


def expected(parent: Artifact, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The float network's outputs, by its own code."""
    images = (pixels.float() / 255 - 0.5) / 0.25
    with torch.no_grad():
        answer: tuple[torch.Tensor, ...] = parent.module()(images)
    return answer


#: For each chain of passes the least SQNR of an output against the float network, in dB.
CHAINS: dict[str, tuple[tuple[Config, ...], float]] = {
    "fuse": ((opt.Fuse(),), 90),
    "bfloat16": ((opt.Half(dtype="bfloat16"),), 25),
    "onnx": ((opt.Onnx(),), 90),
    "onnx of floats": ((opt.Onnx(input="float"),), 90),
    "onnx-half": ((opt.OnnxHalf(),), 45),
    "dynamic": ((opt.Dynamic(),), 25),
    "int8": ((Ptq(observer="minmax", images=32), opt.OnnxInt8()), 20),
    "int8 for TensorRT": ((Ptq(observer="minmax", images=32, target="tensorrt"), opt.OnnxInt8()), 20),
    "int8, observer auto": ((Ptq(observer="auto", images=32),), 20),
    "packed": ((opt.PtqLowbit(images=32), opt.OnnxInt8(), opt.OnnxPacked()), 3),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_both_outputs_pass_through_every_format_and_engine(parent: Artifact, tmp_path: Path, chain: str) -> None:
    passes, least = CHAINS[chain]
    if chain == "bfloat16" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor has no bfloat16")
    context, made = noise_context(), parent
    for number, config in enumerate(passes):
        operation = pass_of(config)
        made = applied(operation, config, made, context, tmp_path / f"{number}")
    pixels = context.pixels(8)
    wanted = expected(parent, pixels)
    compared = 0
    for execution in executions_for(made.card):
        if unavailable(execution.engine, "cpu") is None:
            found = Predictor(made.folder, execution).outputs(pixels)
            assert [tuple(output.shape) for output in found] == [(8, 4), (8, 3, 8, 8)]
            assert min(each_sqnr(wanted, found)) > least, execution.engine
            compared += 1
    assert compared or made.card.device == "cuda"
    if made.card.format == "onnx":
        assert [output.name for output in onnx.load(made.path).graph.output] == [*NAMES]


def test_a_trained_int8_network_keeps_both_outputs(parent: Artifact, tmp_path: Path) -> None:
    context = noise_context()
    made = applied(QAT, opt.Qat(epochs=1, images=32), parent, context, tmp_path / "qat")
    meant = load_program(made.folder / REFERENCE_FILE).module()(context.example(8))
    found = Predictor(made.folder).outputs(context.pixels(8))
    assert min(each_sqnr(meant, found)) > 30


def test_the_gate_refuses_an_artifact_for_one_bad_output_and_names_each() -> None:
    logits, maps = torch.randn(8, 4), torch.randn(8, 3, 8, 8)
    note = check_answers((logits, maps), (logits, maps * 1.01), Gate(), "these", task=CLASSIFICATION, names=NAMES)
    assert note == "these: logits equal, map SQNR 40.0 dB, same top-1 on 8 of 8 training images"
    with pytest.raises(opt.PassError, match=r"map SQNR -3\.0 dB, .*this is broken"):
        check_answers((logits, maps), (logits, maps * (1 + 2**0.5)), Gate(), "these", task=CLASSIFICATION, names=NAMES)
    maps[0, 0, 0, 0] = torch.nan
    with pytest.raises(opt.PassError, match="not finite"):
        check_answers((logits, logits), (logits, maps), Gate(), "these", task=CLASSIFICATION, names=NAMES)


def answers(logits: torch.Tensor, maps: torch.Tensor) -> Answers:
    predicted = logits.argmax(1)
    right = predicted == torch.arange(len(logits)) % logits.shape[1]
    evidence = {"first": right, "five": torch.ones(len(logits), dtype=torch.bool), "predicted": predicted}
    return Answers(evidence, (logits, maps))


def test_each_output_is_compared_with_its_own_step(tmp_path: Path) -> None:
    logits, maps = torch.randn(8, 4), torch.full((8, 3, 8, 8), 2.0)
    other = maps.clone()
    other[0, 0, 0, 0] += 0.5
    save_answers(answers(logits, other), tmp_path)
    found = agreement(
        "any", answers(logits, maps), load_answers(tmp_path), {"logits": 0.1, "map": 0.25}, CLASSIFICATION
    )
    assert (found.sqnr_db, found.steps) == (None, 0.0)
    (of_map,) = found.others
    assert (of_map.output, of_map.max_abs, of_map.steps) == ("map", 0.5, 2.0)
    assert of_map.sqnr_db == pytest.approx(10 * torch.tensor(maps.numel() * 4 / 0.25).log10().item())
    assert [row[0] for row in rows(found)] == ["any", "any, map"]
    assert least_sqnr(answers(logits, maps), answers(logits, other)) == pytest.approx(of_map.sqnr_db)
    certificate = Certificate("a" * 64, 0.1, 8, 8, "b" * 64, (found,))
    assert Certificate.from_json(certificate.to_json()) == certificate


def test_records_of_a_network_with_one_output_have_no_field_for_others() -> None:
    alone = dataclasses.replace(answers(torch.eye(4), torch.eye(4)), outputs=(torch.eye(4),))
    assert "others" not in parity(alone, alone, "x", CLASSIFICATION).to_json()
    found = agreement("any", alone, alone, {"logits": None}, CLASSIFICATION)
    assert "others" not in Certificate("a" * 64, None, 4, 4, "b" * 64, (found,)).to_json()["agreements"][0]
    both = parity(
        answers(torch.eye(4), torch.eye(4)), answers(torch.eye(4), 2 * torch.eye(4)), "x", CLASSIFICATION, NAMES
    )
    assert Parity.from_json(both.to_json()) == both
    assert both.others[0].max_abs == 1.0
    assert accuracy(alone, None, "key", CLASSIFICATION).score == 1.0


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a", 1], "logits"])
def test_a_card_whose_outputs_are_no_different_names_is_refused(parent: Artifact, names: object) -> None:
    body = {**vars(parent.card), "outputs": tuple(names) if isinstance(names, list) else names}
    with pytest.raises(CardError, match=r"card: .*output"):
        Card(**body)


def test_a_card_of_before_has_one_output(parent: Artifact, tmp_path: Path) -> None:
    body = dataclasses.asdict(parent.card)
    del body["outputs"]
    assert parse_card(json.dumps(sealed(body)), tmp_path).outputs == ("logits",)


def test_a_run_names_and_compares_the_users_outputs_and_opens_again_with_them(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NETWORK, encoding="utf-8")
    store = tmp_path / "store"
    outcome, _ = run_recipe(
        store,
        with_stages({"pass": "ptq", "from": "baseline", "config": {"images": 32, "observer": "minmax"}}),
        graphs=False,
        model=f"{tmp_path / 'net.py'}:TwoHeads",
        outputs="kinds.best,map",
        preprocessing=Wish(opt.PreprocessingConfig(resize=16, crop=(16, 16), mean=(0.5,), std=(0.5,))),
    )
    row = next(row for row in outcome.report.rows if row.name == "ptq")
    assert row.measured is not None
    assert row.measured.parity is not None
    assert row.certificate is not None
    assert [each.output for each in row.measured.parity.others] == ["map"]
    assert [[each.output for each in found.others] for found in row.certificate.agreements] == [["map"]]
    assert "torchscript, map" in (store / "tiny" / "report.html").read_text(encoding="utf-8")
    session, _ = reopen_run(store, "tiny", Heard(), device="cpu")
    with closing(session):
        ptq = artifact_of(session, "tiny", "ptq").artifact
        assert ptq.card.outputs == ("kinds.best", "map")
        assert ptq.parent is not None
        assert len(ptq.parent.module()(torch.zeros(1, 1, 16, 16))) == 2


def test_an_output_that_the_network_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NETWORK, encoding="utf-8")
    wanted = r"no 'box'; it returns map \(2, 3, 32, 32\), kinds\.best \(2, 10\)"
    grey = opt.PreprocessingConfig(mean=(0.5,), std=(0.5,))
    with pytest.raises(opt.UserError, match=wanted):
        opt.load(f"{tmp_path / 'net.py'}:TwoHeads", outputs=("box",), preprocessing=grey, store=tmp_path, device="cpu")
