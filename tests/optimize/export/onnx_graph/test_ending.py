"""What a task computes behind a network is part of its ONNX graph, and every engine gives what the runtime would."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import optimize as opt
from optimize.context import Context
from optimize.data.records import ImageData, Split
from optimize.data.targets import ClassMaps
from optimize.errors import PassError
from optimize.export.onnx_graph import ending
from optimize.measure.bench import Bench
from optimize.measure.timing import Timing
from optimize.models.source import ModelSource
from optimize.run.session import Session, Step
from optimize.store.objects import Store
from optimize.training.config import TrainingConfig
from serve.common.config import Config
from serve.runtime.card.card import Preprocessing
from serve.runtime.engines.base import executions_for, unavailable
from serve.runtime.outputs import Outputs
from serve.runtime.service.predictor import Predictor
from serve.runtime.tasks.segmentation import Segmentation
from tests.optimize.workbench import CPU, png

SIDE, CLASSES = 16, 5
GREY = Preprocessing(SIDE, (SIDE, SIDE), mean=(0.5,), std=(0.25,))
#: The passes of each kind of graph.
GRAPHS: dict[str, tuple[Config, ...]] = {
    "float": (opt.Onnx(),),
    "float16": (opt.OnnxHalf(),),
    "float16 at its ends": (opt.OnnxHalf(io="float16"),),
    "int8": (opt.Ptq(observer="minmax", images=16), opt.OnnxInt8()),
    "packed": (opt.PtqLowbit(images=16, weight_bits=4), opt.OnnxInt8(min_sqnr=0), opt.OnnxPacked()),
}


def context_of(task: str) -> Context:
    def split(seed: int) -> Split:
        rng = np.random.default_rng(seed)
        pictures = [png(one) for one in rng.integers(0, 256, (40, SIDE, SIDE))]
        maps = list(rng.integers(0, CLASSES, (40, SIDE, SIDE)).astype(np.uint8))
        return Split(pictures, ClassMaps(maps, CLASSES))

    return Context(ImageData("maps", task, tuple("abcde"), split(0), split(1), "none", (SIDE, SIDE)), GREY, CPU)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    def network(classes: int, _: int | None) -> nn.Module:
        norms = [nn.Sequential(nn.Conv2d(given, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for given in (1, 8)]
        return nn.Sequential(*norms, nn.Conv2d(8, classes, 1))

    source = ModelSource("tiny", "tiny", "tiny/1", None, origin="own", task="segmentation", factory=network)
    return Session(Store(tmp_path_factory.mktemp("ending")), source, context_of("segmentation"))


@pytest.fixture(scope="module")
def baseline(session: Session) -> Step:
    return session.baseline(TrainingConfig(epochs=1, max_steps=2, crop_scale=None))


@pytest.mark.parametrize("kind", GRAPHS)
def test_every_engine_gives_the_best_classes_of_its_own_logits(kind: str, session: Session, baseline: Step) -> None:
    made = baseline.artifact
    for config in GRAPHS[kind]:
        made = session.apply(made, config).artifact
    assert [output.name for output in onnx.load(made.path).graph.output] == ["logits", "classes", "total"]
    assert made.card.ending == ("classes", "total")
    images = session.context.pixels(6)
    tried = 0
    for execution in executions_for(made.card):
        if unavailable(execution.engine, "cpu") is not None or execution.device != "cpu":
            continue
        predictor = Predictor(made.folder, execution)
        classes, total = predictor.ended(images)
        logits = predictor.logits(images).numpy()
        assert classes.dtype == torch.uint8
        # numpy takes the first of equal logits, too.
        np.testing.assert_array_equal(classes.numpy(), logits.argmax(1), err_msg=execution.engine)
        np.testing.assert_allclose(total.numpy(), logits.sum((1, 2, 3)), rtol=2e-3, atol=0.5)
        tried += 1
    assert tried


def test_a_file_that_is_no_graph_is_ended_by_the_runtime(baseline: Step, session: Session) -> None:
    predictor = Predictor(baseline.artifact.folder)
    images = session.context.pixels(3)
    assert baseline.artifact.card.ending == ()
    np.testing.assert_array_equal(predictor.ended(images)[0].numpy(), predictor.logits(images).numpy().argmax(1))


def test_the_answers_measured_are_those_of_the_graphs_own_ending(session: Session, baseline: Step) -> None:
    graph = session.apply(baseline.artifact, opt.Onnx()).artifact
    timing = Timing(rounds=1, batch_sizes=(1,), seconds=0.001, minimum=1, warm_up=0)
    with Bench(session.store, session.context, timing) as bench:
        for candidate in bench.candidates(graph):
            answers = bench.answers(candidate).value
            predictor = Predictor(graph.folder, candidate.execution)
            images = session.context.evaluation(64, CPU)
            pixels = next(iter(images.numbered()))[1]
            np.testing.assert_array_equal(answers.evidence["predicted"].numpy(), predictor.ended(pixels)[0].numpy())
            torch.testing.assert_close(answers.outputs[0], predictor.outputs(pixels)[0], rtol=1e-4, atol=1e-4)


def test_a_graph_whose_ending_is_another_is_refused(
    session: Session, baseline: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = ending._exported

    def wrong(*given: object) -> onnx.ModelProto:
        """The least instead of the largest."""
        model = exported(*given)  # type: ignore[arg-type]
        for node in model.graph.node:
            node.op_type = node.op_type.replace("ArgMax", "ArgMin")
        return model

    monkeypatch.setattr(ending, "_exported", wrong)
    with pytest.raises(PassError, match="ONNX graph: its ending computes another 'classes' than the runtime"):
        session.apply(baseline.artifact, opt.Onnx(tolerance=2e-3))


def test_the_sum_tells_of_logits_that_are_no_numbers() -> None:
    logits = torch.zeros(3, CLASSES, 4, 4)
    logits[1, 2, 3, 3] = float("nan")
    outputs: Outputs = Segmentation.ending((logits,))
    assert outputs[1].isfinite().tolist() == [True, False, True]
