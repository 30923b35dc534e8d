"""What is kept of a training: its curves, where its time went, and TensorBoard's events of both."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optimize.data.loading import loader
from optimize.data.splits import hold_out
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.run.session import Session
from optimize.store.artifact import PRODUCT_FILE, read_product
from optimize.store.training_history import PARTS, Epoch, History, Point, Times
from optimize.training import loop as training
from optimize.training.loop import train
from optimize.training.tensorboard_events import write_histories
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from tests.optimize.conftest import SHORT
from tests.optimize.training.test_resuming import Heard
from tests.optimize.training.test_training_loop import FAST, brightness, network
from tests.optimize.training.test_training_settings import plain
from tests.optimize.workbench import CPU, GREY16


def test_the_curve_of_a_network_that_does_not_move_is_its_loss():
    context, module, rates = brightness(), plain(), []
    fit, _ = hold_out(context.data.train, FAST.holdout, context.seed)
    ((images, labels),) = loader(fit, GREY16, batch_size=len(fit), device=CPU)
    with torch.no_grad():
        logits = module(normalise(images, GREY16, CPU, torch.float32)).double()
    expected = -logits.log_softmax(1)[torch.arange(len(labels)), labels].mean().item()
    original = torch.optim.SGD.step

    def noted(optimizer: torch.optim.SGD, *given: Any, **named: Any) -> Any:
        rates.append(optimizer.param_groups[0]["lr"])
        return original(optimizer, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", noted)
        history = train(module, context, FAST.model_copy(update={"learning_rate": 1e-12})).history
    assert [epoch.loss for epoch in history.epochs] == pytest.approx([expected] * 2)
    assert [point.step for point in history.points] == list(range(1, 2 * history.steps + 1))
    assert [point.learning_rate for point in history.points] == rates
    sizes = [16] * (len(fit) // 16) + [len(fit) % 16]
    weighted = sum(size * point.loss for size, point in zip(sizes, history.points, strict=False))
    assert weighted / len(fit) == pytest.approx(expected)


def test_a_long_curve_has_points_of_several_steps_and_ends_with_each_epoch(monkeypatch):
    fine = train(network(), brightness(), FAST).history
    monkeypatch.setattr(training, "_POINTS", 4)
    coarse = train(network(), brightness(), FAST).history
    assert fine.steps == coarse.steps == 6
    assert [point.step for point in coarse.points] == [3, 6, 9, 12]
    assert coarse.points[0].loss == pytest.approx(sum(point.loss for point in fine.points[:3]) / 3)
    assert [epoch.loss for epoch in coarse.epochs] == pytest.approx([epoch.loss for epoch in fine.epochs])


def test_the_time_of_an_epoch_is_divided_and_adds_up(monkeypatch):
    now = [100.0]

    class Slow(nn.Sequential):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            now[0] += 2.0 if self.training else 3.0
            return super().forward(batch)

    def slowly(
        batch: torch.Tensor, targets: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        now[0] += 1.0
        return batch, targets

    # A clock that only these move: of the machine's own, no part could be foretold.
    monkeypatch.setattr("optimize.training.stopwatch.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(training, "change", slowly)
    heard = Heard()
    history = train(Slow(*network()), dataclasses.replace(brightness(), listener=heard), FAST).history
    times = history.times  # of 12 steps, and of two judgements by one batch each
    assert times == Times(data=12 * 1.0, compute=12 * 2.0, judgement=2 * 3.0)
    assert times.total == now[0] - 100.0
    assert heard.lines == ["training: 21 s an epoch: data 29 %, compute 57 %, held-out images 14 %"]


def test_what_was_trained_keeps_how_and_its_card_and_files_do_not(session, made):
    first = session.baseline(SHORT)
    (history,) = first.training
    assert len(history.epochs) == SHORT.epochs
    assert (history.before, history.processes) == (None, 1)
    assert history.epochs[history.best].held_out_score == max(epoch.held_out_score for epoch in history.epochs)
    assert session.baseline(SHORT).training == first.training, "from the store"
    qat = made("qat")
    (of_qat,) = read_product(session.store.objects / qat.key).product.training
    assert len(of_qat.epochs) == 2
    assert (of_qat.before or 0) > 0.5, "of the network as it came"
    for artifact in (first.artifact, qat):
        assert PRODUCT_FILE not in artifact.card.files
        assert '"points"' not in (artifact.folder / "card.json").read_text()
    as_json = json.loads(json.dumps(dataclasses.asdict(of_qat)))
    assert History.from_json(as_json) == of_qat


def test_the_parts_of_the_time_have_names():
    assert list(PARTS) == [field.name for field in dataclasses.fields(Times)]
    assert Times(1, 2, 3, 4, 5) + Times(data=1) == Times(2, 2, 3, 4, 5)


# --- TensorBoard -------------------------------------------------------------------------------------------------


def test_without_tensorboard_its_events_are_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    job = Job(model="resnet18", store=tmp_path / "store", tensorboard=tmp_path / "logs")
    with pytest.raises(
        UserError, match=r"^writing a training's curves for TensorBoard needs the package tensorboard: "
    ):
        open_job(job, Heard())
    assert not (tmp_path / "store").exists()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads in a folder, by tag."""
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_curves_of_a_training_while_it_goes_on(tmp_path):
    pytest.importorskip("tensorboard")
    context = dataclasses.replace(brightness(), tensorboard=tmp_path)
    for _ in range(2):  # the second time in the place of the first
        history = train(network(), context, FAST).history
    found = scalars(tmp_path)
    assert [step for step, _ in found["loss"]] == [point.step for point in history.points]
    assert [value for _, value in found["loss"]] == pytest.approx([point.loss for point in history.points])
    assert [value for _, value in found["learning-rate"]] == pytest.approx(
        [point.learning_rate for point in history.points]
    )
    scores = [epoch.held_out_score for epoch in history.epochs]
    assert [step for step, _ in found["held-out-score"]] == [6, 12]
    assert [value for _, value in found["held-out-score"]] == pytest.approx(scores)
    assert {f"seconds/{name}" for name in PARTS} < found.keys()
    write_histories([history], tmp_path / "again")
    assert scalars(tmp_path / "again") == found


def test_events_of_what_is_in_the_store_are_written_and_change_no_key(session, tmp_path):
    pytest.importorskip("tensorboard")
    context = dataclasses.replace(session.context, tensorboard=tmp_path)
    key = session.baseline(SHORT).artifact.key
    step = Session(session.store, session.source, context).baseline(SHORT)
    assert (step.cached, step.artifact.key) == (True, key)
    assert len(scalars(tmp_path / "baseline")["held-out-score"]) == SHORT.epochs


def test_several_trainings_of_one_artifact_have_a_folder_each(tmp_path):
    pytest.importorskip("tensorboard")
    history = History((Epoch(1.0, 0.5, Times(1)),), (Point(3, 1.0, 0.1),), 3, 0)
    write_histories([history, history], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    assert scalars(tmp_path / "2")["loss"] == [(3, 1.0)]
