"""How much ``prune-channels`` leaves by measured time, and the training that makes channels worth little before it."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from optimize.context import Context
from optimize.errors import PassError
from optimize.measure.machine import machine
from optimize.passes.prune_channels import PRUNE_CHANNELS, PruneChannels
from optimize.pruning.groups import group
from optimize.pruning.latency_budget import Latency, Race
from optimize.pruning.propagation import channels_of
from optimize.pruning.regularised import GroupLasso, ScaleL1, Sparsifying, parts_of, sparsify
from optimize.pruning.width_budget import Rounding, removed, widths
from optimize.run.session import Session
from optimize.statistics import RatioInterval
from optimize.store.artifact import Artifact
from optimize.tracing.folding import fuse_module
from serve.runtime.errors import UserError
from tests.optimize.pruning.test_prune_channels import Pair
from tests.optimize.workbench import CPU, noise_context, with_running_statistics

WITHOUT = {"epochs": 0}
#: One thread, whose time the others' work on this machine disturbs least.
FAST = {"execution": {"engine": "torchscript", "threads": 1}, "batch": 64, "rounds": 5, "seconds": 0.02}


_LEAST = """
import math, sys, time, torch
from serve.runtime.card.execution import keep_memory
keep_memory()
torch.set_num_threads(1)
programs, batch, share = [torch.jit.load(path) for path in sys.argv[1:3]], torch.load(sys.argv[3]), float(sys.argv[4])
least = [math.inf, math.inf]
with torch.no_grad():
    for turn in range(400):
        for number, program in enumerate(programs):
            start = time.perf_counter()
            program(batch)
            least[number] = min(least[number], time.perf_counter() - start)
        if turn >= 20 and least[0] < share * least[1]:
            break
print(least[0] / least[1])
"""


def least_share(small: nn.Module, whole: nn.Module, batch: torch.Tensor, enough: float, folder: Path) -> float:
    """One's time as a share of the other's, by the least of many calls in turns, in a process of their own.

    Other processes can only add to a time: as many calls as it needs to be below what is enough, if not more than a
    few hundred.
    """
    for name, module in (("small", small), ("whole", whole)):
        torch.jit.freeze(torch.jit.trace(module.eval(), batch)).save(folder / name)
    torch.save(batch, folder / "batch")
    command = [sys.executable, "-c", _LEAST, *(str(folder / name) for name in ("small", "whole", "batch")), str(enough)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_channels_go_until_the_measured_time_is_the_share_that_was_asked_for(
    session: Session, trained: Artifact, tmp_path: Path
) -> None:
    config = PruneChannels(latency={"share": 0.7, **FAST}, spread="uniform", train=WITHOUT)
    assert (config.macs, PruneChannels().macs) == (None, 0.5)
    made = session.apply(trained, config, "faster")
    (note,) = (note for note in made.artifact.card.notes if note.startswith("time of a batch of 64 in torchscript["))
    found = re.search(r": (\S+) \((\S+) to (\S+)\) of the whole network's, 0.7 requested; (\d+) candidates", note)
    assert found is not None
    median, low, high, tried = map(float, found.groups())
    assert low <= median <= high
    assert median <= 0.7
    assert tried >= 2
    assert note.endswith(f"timed on {machine(CPU)['cpu']}, {machine(CPU)['cores']} cores")
    batch = torch.randn(64, 1, 16, 16)
    small, whole = (fuse_module(artifact.module(), batch) for artifact in (made.artifact, trained))
    assert least_share(small, whole, batch, 0.9, tmp_path) < 0.9
    # Nothing is timed anew: the widths that were found are the answer.
    again = session.apply(trained, config, "faster")
    assert again.cached
    assert again.artifact.card.lineage[-1].structure == made.artifact.card.lineage[-1].structure


def test_a_share_of_time_that_cannot_be_reached_is_refused_with_the_least_that_was_measured(
    session: Session, trained: Artifact, tmp_path: Path
) -> None:
    config = PruneChannels(latency={"share": 0.01, **FAST}, round_to=16, min_width=16, train=WITHOUT)
    with pytest.raises(
        PassError,
        match=r"0.01 of the time of a batch of 64 in torchscript\[threads=1\] cannot be reached: with the minimum "
        r"number of channels it is \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)$",
    ):
        PRUNE_CHANNELS.apply(trained, config, session.context, tmp_path)


def test_what_cannot_be_asked_for_is_told_in_a_line(
    session: Session, trained: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"set exactly one of macs and latency"):
        PruneChannels(macs=0.5, latency={"share": 0.5, "execution": "onnxruntime"})
    with pytest.raises(UserError, match=r"set exactly one of macs and latency"):
        PruneChannels(macs=None)
    with pytest.raises(UserError, match=r"latency: .*field required"):
        PruneChannels(latency={"share": 0.5})
    with pytest.raises(UserError, match=r"latency: .*input should be less than 1 \(it is 60"):
        PruneChannels(latency={"share": 60, "execution": "onnxruntime"})
    with pytest.raises(UserError, match=r"unknown engine 'onnxruntim' \(did you mean onnxruntime "):
        session.apply(trained, PruneChannels(latency={"share": 0.5, "execution": "onnxruntim"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r"onnxruntime-cuda.* cannot be timed on cuda: .* has 0 CUDA devices$"):
        session.apply(trained, PruneChannels(latency={"share": 0.5, "execution": "onnxruntime-cuda"}))
    assert Latency(share=0.5, execution="openvino").format == "onnx"
    assert Latency(share=0.5, execution={"engine": "exported", "threads": 1}).format == "exported_program"


class Scripted:
    """In the place of processes: a candidate's time is the share of channels that it has, but for one lucky draw."""

    def __init__(self, lucky: int) -> None:
        self.lucky, self.asked = lucky, 0

    def of(self, folder: Path) -> RatioInterval:
        self.asked += 1
        share = float((folder / "share").read_text())
        if self.asked == self.lucky:
            share -= 0.3
        return RatioInterval(share, share - 0.02, share + 0.02, 0.98)


@pytest.mark.parametrize("lucky", [0, 2])
def test_a_candidate_that_was_only_lucky_is_found_out_when_it_is_timed_again(
    lucky: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 units, the second that is tried is 7 or 8: too many for a third of the time, unless it is lucky."""
    network = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    module = torch.fx.symbolic_trace(network.eval())
    grouping = group(channels_of(module, torch.zeros(2, 1, 16, 16)), {})
    score = [torch.arange(16.0)]

    def written(self: Race, smaller: nn.Module, name: str) -> Path:
        width = cast("nn.Conv2d", smaller.get_submodule("0")).out_channels
        (tmp_path / "share").write_text(str(width / 16))
        return tmp_path

    monkeypatch.setattr(Race, "_written", written)
    race = Race(module, Latency(share=1 / 3, execution="torchscript"), noise_context())
    race._shares = Scripted(lucky)  # type: ignore[assignment]

    def search(reached):
        return widths(grouping, score, Rounding(1, 1), "global", reached)

    assert race.widest(module, grouping, lambda kept: removed(grouping, score, kept), search, 1.0) == [5]
    assert "0.31 (0.29 to 0.33) of the whole network's, 0.333 requested" in race.notes[0]


def test_widths_that_were_found_stay_where_the_run_is_interrupted_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are never twice the same: with other widths the training would begin anew."""
    network = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    module = torch.fx.symbolic_trace(network.eval())
    grouping = group(channels_of(module, torch.zeros(2, 1, 16, 16)), {})
    score = [torch.arange(16.0)]
    context = dataclasses.replace(noise_context(), unfinished=tmp_path / "unfinished")

    def written(self: Race, smaller: nn.Module, name: str) -> Path:
        width = cast("nn.Conv2d", smaller.get_submodule("0")).out_channels
        (tmp_path / "share").write_text(str(width / 16))
        return tmp_path

    def search(reached):
        return widths(grouping, score, Rounding(1, 1), "global", reached)

    def found(whole: torch.fx.GraphModule, part: float = 1.0) -> tuple[list[int], tuple[str, ...], int]:
        race = Race(whole, Latency(share=1 / 3, execution="torchscript"), context)
        race._shares = Scripted(0)  # type: ignore[assignment]
        kept = race.widest(whole, grouping, lambda kept: removed(grouping, score, kept), search, part)
        return kept, race.notes, race._shares.asked  # type: ignore[attr-defined]

    monkeypatch.setattr(Race, "_written", written)
    kept, notes, asked = found(module)
    assert (kept, asked > 2) == ([5], True)
    assert found(module) == (kept, notes, 0)
    (file,) = (tmp_path / "unfinished").glob("widths-*.json")
    for damaged in (file.read_text().replace("5", "6"), "[]", "{"):
        file.write_text(damaged)
        assert found(module) == (kept, notes, asked), "what was changed is looked for anew"
    another = copy.deepcopy(module)
    another.get_parameter("0.weight").data.mul_(2)
    assert found(another)[2] == asked, "of another network nothing is known"
    assert found(module, 0.5)[0] == [9], "nor of another step: a third to the power of a half of 16"


# --- a pull before the pruning


def pair() -> tuple[Pair, torch.fx.GraphModule, Context]:
    torch.manual_seed(0)
    network = with_running_statistics(Pair())
    return network, torch.fx.symbolic_trace(network), noise_context()


def test_the_pulls_are_the_gradients_of_their_penalties() -> None:
    network, traced, context = pair()
    parts, count = parts_of(traced, group(channels_of(traced, context.example(2)), {}))
    assert count == 4
    for parameter in traced.parameters():
        parameter.grad = torch.ones_like(parameter)
    GroupLasso(parts, count, 0.3).add(traced)
    units = [
        torch.cat([tensor.flatten() for tensor in (network.one.weight[c], network.two.weight[c], *rest)])
        for c in range(4)
        for rest in [(network.first.weight[c], network.second.weight[c], network.head.weight[:, c])]
    ]
    penalty = 0.3 * sum((len(unit) ** 0.5 * unit.norm() for unit in units), torch.zeros(()))
    named = dict(network.named_parameters())
    reached = ("one.weight", "two.weight", "first.weight", "second.weight", "head.weight")
    wanted = torch.autograd.grad(penalty, [named[name] for name in reached])
    for name, gradient in zip(reached, wanted, strict=True):
        torch.testing.assert_close(traced.get_parameter(name).grad, 1 + gradient)
    for name in ("head.bias", "first.bias"):
        assert torch.equal(cast("torch.Tensor", traced.get_parameter(name).grad), torch.ones(4))

    for parameter in traced.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        traced.get_parameter("first.weight")[1] *= -1
    ScaleL1([part for part in parts if part.parameter in ("first.weight", "second.weight")], 0.2).add(traced)
    assert traced.get_parameter("first.weight").grad.tolist() == pytest.approx([0.2, -0.2, 0.2, 0.2])  # type: ignore[union-attr]
    assert not traced.get_parameter("one.weight").grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("pull", ["group", "bn"])
def test_training_with_a_pull_makes_channels_smaller_and_keeps_the_last_epoch(pull: str) -> None:
    _, traced, context = pair()
    before = copy.deepcopy(traced)
    grouping = group(channels_of(traced, context.example(2)), {})
    config = Sparsifying(pull=pull, strength=2.0, epochs=2, batch_size=16, learning_rate=0.05, augment=False)
    note, *_ = sparsify(traced, grouping, context, config, keep_zeros=False).notes
    assert note.startswith(f"trained 2 epochs with a pull on channels ({pull}, strength 2): ")
    scales = [module.get_parameter("first.weight").detach().abs() for module in (before, traced)]
    assert bool((scales[1] < scales[0] / 2).all())
    assert not traced.training


def test_a_pull_comes_before_the_first_pruning_and_is_told(made) -> None:
    training = {"epochs": 1, "augment": False, "learning_rate": 0.02, "batch_size": 32}
    artifact: Artifact = made(
        "prune-channels", macs=0.5, round_to=4, min_width=4, train=WITHOUT, sparsify={**training, "strength": 0.003}
    )
    (note,) = (note for note in artifact.card.notes if note.startswith("trained 1 epochs with a pull on channels"))
    assert float(note.split("top-1 ")[1].split()[0]) > 0.5
    with pytest.raises(UserError, match=r"sparsify: .*input should be greater than 0"):
        PruneChannels(sparsify={"strength": 0})
