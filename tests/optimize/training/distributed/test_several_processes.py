"""Several processes train what one would: the same batches, gradients, norms and ranges, to rounding."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

from optimize.context import Context
from optimize.data.loading import loader
from optimize.data.splits import part
from optimize.errors import PassError
from optimize.listener import Silent
from optimize.models.teacher import Teacher
from optimize.passes.qat import QAT
from optimize.passes.qat_lowbit import QAT_LOWBIT
from optimize.training.config import TrainingConfig
from optimize.training.distil import Distil
from optimize.training.distributed.batch_norms import AllReducedBatchNorm, synchronise
from optimize.training.loop import train
from serve.runtime.errors import UserError
from tests.optimize.training.test_training_loop import brightness
from tests.optimize.workbench import CPU, GREY16, noise, noise_context, parent_of, with_running_statistics
from tests.programs import Programs


@pytest.fixture(autouse=True)
def forked(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process finds its imports done."""
    monkeypatch.setattr(sys, "executable", str(programs.executable))


class Normed(nn.Module):
    """One norm that is trained over all images of a step, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.trained = nn.Conv2d(1, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6)
        self.second, self.frozen = nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.trained(self.first(x)))
        return self.head(torch.flatten(torch.relu(self.frozen(self.second(x))), 1))


def freeze(module: nn.Module, epoch: int, training: bool) -> None:
    module.get_submodule("frozen").eval()


def uneven() -> Context:
    """An epoch of 84 images: in steps of 27 the last has three, too few for two processes; nine are held out."""
    context = brightness(4 * 33)
    some = [number for number in range(4 * 33) if number < 33 or number % 33 < 20]
    split = part(context.data.train, np.array(some))
    return dataclasses.replace(context, data=dataclasses.replace(context.data, train=split))


class Heard(Silent):
    def __init__(self) -> None:
        self.fractions: list[float] = []

    def progressed(self, fraction: float, message: str) -> None:
        self.fractions.append(fraction)


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    assert one.keys() == other.keys()
    return {name: (one[name].double() - other[name].double()).abs().max().item() for name in one if one[name].numel()}


def test_two_processes_train_what_one_does():
    """With a teacher, whose features reach the network through a projection that is trained, too."""
    context, results, states, heard = uneven(), [], [], Heard()
    torch.manual_seed(1)
    master = nn.Sequential(nn.Conv2d(1, 5, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 49, 4))
    context = dataclasses.replace(context, teacher=Teacher("master", "", master.eval(), GREY16.mean, GREY16.std))
    distil = Distil(teacher="master", features={"relu": "_1"})
    config = TrainingConfig(epochs=2, batch_size=27, learning_rate=0.1, ema=0.8, clip_norm=1.0, distil=distil)
    for processes in (1, 2):
        torch.manual_seed(0)
        module = with_running_statistics(Normed())
        module.second.weight.data[:, ::2] = 0  # as a pruning leaves them
        before = {name: value.clone() for name, value in module.state_dict().items()}
        there = dataclasses.replace(
            context, processes=processes, listener=heard if processes == 2 else context.listener
        )
        results.append(train(module, there, config, set_mode=freeze, keep_zeros=True))
        states.append(module.state_dict())
        assert not module.training
    moved = differences(states[0], before)
    assert moved["first.weight"] > 1e-3
    assert moved["trained.running_var"] > 1e-3
    assert moved["frozen.running_var"] == 0
    assert all(torch.equal(state["second.weight"] == 0, before["second.weight"] == 0) for state in states)
    assert max(differences(*states).values()) < 1e-5
    one, two = results
    assert [epoch.held_out_score for epoch in two.epochs] == [epoch.held_out_score for epoch in one.epochs]
    assert [epoch.loss for epoch in two.epochs] == pytest.approx([epoch.loss for epoch in one.epochs], abs=1e-5)
    for mine, theirs in zip(two.history.points, one.history.points, strict=True):
        assert dataclasses.replace(mine, loss=theirs.loss) == theirs
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert (one.history.processes, one.history.times.communication) == (1, 0)
    assert two.history.processes == 2
    assert all(epoch.times.communication > 0 for epoch in two.epochs)
    assert (two.best, two.held_out_images, two.kept) == (one.best, one.held_out_images, one.kept)
    assert two.held_out_images == 9
    assert any(0 < epoch.held_out_score < 1 for epoch in two.epochs), "an image that counts twice would be seen"
    assert heard.fractions == sorted(heard.fractions)
    assert heard.fractions[-1] == 1.0


LOW = {"weight_bits": 3, "activation_bits": 3, "ends_int8": False, "min_sqnr": -20.0, "min_agreement": 0.0}


@pytest.mark.parametrize(
    ("of_pass", "more", "learned"),
    [(QAT, {}, "activation_post_process.max_val"), (QAT_LOWBIT, LOW, "weight_fake_quant.step")],
    ids=["qat", "qat-lowbit"],
)
def test_two_processes_train_for_integers_what_one_does(of_pass, more, learned, tmp_path, monkeypatch):
    """For a few steps: later a difference in the last digit turns a rounding, which is a whole step of an integer."""
    states: list[dict[str, Any]] = []

    def recording(module, *given, **options):
        result = train(module, *given, **options)
        states.append({name: value.clone() for name, value in module.state_dict().items()})
        return result

    monkeypatch.setattr(sys.modules[of_pass.apply.__module__], "train", recording)
    context = brightness()
    for processes in (1, 2):
        torch.manual_seed(0)
        folder = tmp_path / str(processes)
        parent = parent_of(with_running_statistics(Normed()).eval(), context, folder / "parent")
        settings = of_pass.config(
            epochs=1, max_steps=5, batch_size=16, learning_rate=0.02, images=32, augment=False, **more
        )
        of_pass.apply(parent, settings, dataclasses.replace(context, processes=processes), folder)
    assert any(learned in name for name in states[0])
    assert max(differences(*states).values()) < 1e-5


class Ended(nn.Module):
    """Its second process is killed in the middle of training."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.head(torch.flatten(x, 1))


def test_a_process_that_is_ended_ends_the_training_with_its_reason():
    context = dataclasses.replace(brightness(), processes=2)
    with pytest.raises(PassError, match="process 1 of the 2 training processes was ended by SIGKILL"):
        train(Ended(), context, TrainingConfig(epochs=1, batch_size=16))


def test_more_processes_than_pairs_of_images_in_a_step_are_refused():
    context = dataclasses.replace(noise_context(), processes=9)
    with pytest.raises(
        UserError, match=r"processes: 9 cannot share steps of 16 images \(batch_size\): each needs at least two"
    ):
        train(nn.Linear(1, 1), context, TrainingConfig(batch_size=16))


def test_a_model_that_cannot_be_sent_is_refused_in_one_line():
    module = nn.Linear(1, 1)
    module.__dict__["generator"] = (each for each in range(3))
    with pytest.raises(UserError, match=r"this model or its data cannot be sent to other processes .*; train in one"):
        train(module, dataclasses.replace(noise_context(), processes=2), TrainingConfig(batch_size=16))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("unreadable", [False, True])
def test_the_parts_of_processes_are_the_whole_batch_each_image_once(count, unreadable):
    split = noise(47)
    if unreadable:
        split = dataclasses.replace(split, sources=(*split.sources[:40], b"no image", *split.sources[41:]))
    options: dict[str, Any] = {"batch_size": 12, "device": CPU, "shuffle": True, "seed": 3, "skip_unreadable": 0.1}
    whole = list(loader(split, GREY16, **options).placed(1))
    parts = [list(loader(split, GREY16, share=(number, count), **options).placed(1)) for number in range(count)]
    for batch, *mine in zip(whole, *parts, strict=True):
        assert all(part.place == batch.place for part in mine)
        assert torch.equal(torch.cat([part.rows for part in mine]), batch.rows)
        assert torch.equal(torch.cat([part.images for part in mine]), batch.images)
        assert torch.equal(torch.cat([part.targets for part in mine]), batch.targets)
        assert all(len(part.rows) >= 2 and part.copies == 1 for part in mine)


def test_a_batch_that_is_too_small_to_be_divided_is_everybodys():
    batches = loader(noise(15), GREY16, batch_size=12, device=CPU, shuffle=True, share=(1, 2))
    first, last = batches.placed(0)
    assert (len(first.rows), first.copies, len(last.rows), last.copies) == (6, 1, 3, 2)


@pytest.mark.parametrize("shape", [(8, 5), (4, 5, 7), (4, 5, 6, 3)])
def test_the_norm_over_processes_is_torchs_own_where_there_is_one(shape):
    torch.manual_seed(0)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    plain = kind(5, momentum=0.3)
    nn.init.uniform_(plain.weight)
    (ours,) = synchronise(nn.Sequential(kind(5, momentum=0.3)), CPU).children()
    ours.load_state_dict(plain.state_dict())
    assert isinstance(ours, AllReducedBatchNorm)
    found: list[tuple[torch.Tensor, ...]] = []
    for norm in (plain, ours):
        torch.manual_seed(1)
        inputs = (torch.randn(shape) * 3 + 100).requires_grad_()
        loss = (norm(inputs) * torch.randn(shape)).sum()
        found.append(torch.autograd.grad(loss, [inputs, *norm.parameters()]))
    for gradient, expected in zip(*found, strict=True):
        assert torch.allclose(gradient, expected, atol=1e-4)
    for name, value in plain.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, rtol=1e-5), name
    assert torch.allclose(ours.eval()(inputs), plain.eval()(inputs), atol=1e-5)


def test_on_gpus_norms_are_torchs_own_over_processes_and_layers_and_norms_stay_one():
    """Here in one process, in which it is a plain norm: torch's refuses CPUs only where there are several."""
    torch.manual_seed(0)
    module, images = with_running_statistics(Normed()).eval(), torch.randn(4, 1, 16, 16)
    assert QAT.learner is not None
    plain, _ = QAT.learner(module, QAT.config(), lambda: module, images)
    ours = synchronise(copy.deepcopy(plain), torch.device("cuda"))
    norms = {name: layer for name, layer in ours.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
    assert [name.rpartition(".")[2] for name in norms] == ["bn", "bn"], "each within the layer that was fused with it"
    assert {type(norm) for norm in norms.values()} == {nn.SyncBatchNorm}
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for training in (True, False):
        torch.testing.assert_close(ours.train(training)(images), plain.train(training)(images), rtol=0, atol=0)
    assert max(differences(ours.state_dict(), plain.state_dict()).values()) == 0, (
        "statistics, too, that both have moved"
    )
