"""Which method of the search takes fewer trials to a target, on ResNet-20 and MobileNetV2 (CIFAR-10), as a table.

``python -m benchmarks.search --data imagefolder:CIFAR10 --resnet FILE --mobilenet FILE --write docs/design/search.md``.
A network that int8 hardly hurts leaves nothing to search for, so the MobileNetV2 is searched once more with its
channels pulled apart (`benchmarks.pulled`). Trials come from the store where they were made before, so that it can be
stopped and goes on; their number stays the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.below import write_below
from benchmarks.commands import command
from benchmarks.here import begun, here
from optimize import noise
from optimize.listener import SILENT
from optimize.measure.timing import Timing
from optimize.passes.ptq import Ptq
from optimize.precision.precision_records import Found
from optimize.precision.precision_table import markdown
from optimize.precision.search import Search, search
from optimize.precision.search_methods import METHODS, MethodName
from optimize.report.number_format import NONE, number, points
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.run.recipe import load_recipe

PULLED = "MobileNetV2, pulled"
_MOBILENET = ("examples/cifar_mobilenet.py:mobilenet_v2", Path("examples/recovery.yaml"))
#: Each network's model, and the recipe that trains it where no checkpoint is given.
NETWORKS = {
    "ResNet-20": ("examples/cifar_resnet.py:resnet20", Path("examples/cifar.yaml")),
    "MobileNetV2": _MOBILENET,
    PULLED: _MOBILENET,
}
#: With scales per channel and with one a tensor.
SETTINGS = {"per channel": Ptq(), "per tensor": Ptq(weights="per-tensor", observer="minmax")}
HEADS = (
    "network, scales",
    "target, points",
    "method",
    "trials to the first that holds",
    "trials in all",
    "fewest not int8",
    "returned",
    "its top-1, other half",
    "less the baseline's (95 %)",
    "its p50 ms",
    "fastest float ms",
)


@dataclass(frozen=True)
class Case:
    """One search: of which network, quantized how, to which target in points of top-1."""

    network: str
    setting: str
    target: float


@dataclass(frozen=True)
class Effort:
    """What a method took for a case.

    Attributes:
        first: number of the first trial that holds; None where none of those that were allowed did.
        trials: all of them, until no layer more can be given back, or as many as were allowed.
        left: layers that are not int8 in the smallest set that holds; all of them where none does.
        layers: of the network.
    """

    first: int | None
    trials: int
    left: int
    layers: int

    @classmethod
    def of(cls, found: Found) -> Effort:
        """That of a search."""
        holding = [trial for trial in found.trials if trial.holds]
        return cls(
            first=holding[0].number if holding else None,
            trials=len(found.trials),
            left=min((len(trial.bits) for trial in holding), default=found.layers),
            layers=found.layers,
        )


def row(case: Case, method: MethodName, found: Found) -> tuple[str, ...]:
    """A search's line of the table."""
    effort = Effort.of(found)
    judged = found.judged
    less = judged.difference if judged else None
    return (
        f"{case.network}, {case.setting}",
        f"{case.target:g}",
        method,
        "not reached" if effort.first is None else str(effort.first),
        str(effort.trials),
        f"{effort.left} of {effort.layers}",
        found.pair or "nothing",
        f"{judged.score * 100:.2f} %" if judged else NONE,
        f"{points(less.delta)} ({points(less.low)} to {points(less.high)})" if less else NONE,
        number(found.p50),
        number(found.fastest_float_p50),
    )


def sooner(efforts: dict[Case, dict[MethodName, Effort]]) -> str:
    """In sentences which method took fewer trials, of the cases that had something to look for."""
    told = [each for each in efforts.values() if any(effort.trials > 1 for effort in each.values())]
    if not told:
        return f"In none of {len(efforts)} cases was there anything to look for: every layer could be int8."
    said = [f"Of {len(efforts)} cases {len(told)} needed more than one trial."]
    for name in METHODS:
        own = [each[name] for each in told]
        reached = [effort.first for effort in own if effort.first is not None]
        wins = sum(_first(each[name]) < min(_first(e) for n, e in each.items() if n != name) for each in told)
        said.append(
            f"`{name}` reached the target in {len(reached)} of these, with {sum(reached)} trials (before the other in "
            f"{wins}), made {sum(effort.trials for effort in own)} trials in all, and left "
            f"{sum(effort.left for effort in own)} of {sum(effort.layers for effort in own)} layers in float."
        )
    return " ".join(said)


def _first(effort: Effort) -> float:
    return float("inf") if effort.first is None else effort.first


def searches(options: argparse.Namespace, timing: Timing) -> Iterator[tuple[Case, MethodName, Found]]:
    """Every search, one after another."""
    for network in options.networks:
        model, recipe = NETWORKS[network]
        job = Job(
            model=model,
            checkpoint=options.resnet if network == "ResNet-20" else options.mobilenet,
            data=options.data,
            val_images=options.val_images,
            store=options.store,
            device="cpu",
            measure="cpu",
            trust_checkpoint=options.trust_checkpoint,
        )
        if network == PULLED:
            from benchmarks.recovery import pulled  # which registers a pass, for who asks for it alone

            job = job.model_copy(update={"checkpoint": pulled(job)})
        opened = open_job(job, SILENT)
        with contextlib.closing(opened.session) as session:
            baseline = session.baseline(load_recipe(recipe).baseline, opened.checkpoint, opened.origin)
            for setting, ptq in SETTINGS.items():
                for target in options.targets:
                    for method in METHODS:
                        by = Search(max_drop=target / 100, method=method, max_trials=options.max_trials)
                        found, _ = search(session, baseline, by, ptq=ptq, timing=timing, devices=opened.devices)
                        yield Case(network, setting, target), method, found


def _numbers(words: str) -> tuple[float, ...]:
    return tuple(map(float, words.split(",")))


def main(words: Sequence[str] | None = None) -> int:
    """Run the searches and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="CIFAR-10, such as imagefolder:DIR")
    parser.add_argument("--resnet", type=Path, help="a checkpoint of the ResNet-20; without it that is trained")
    parser.add_argument("--mobilenet", type=Path, help="a checkpoint of the MobileNetV2; without it that is trained")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which to search")
    parser.add_argument("--targets", type=_numbers, default=(1.0, 0.5, 0.1), help="percentage points: 1,0.5,0.1")
    parser.add_argument("--val-images", type=int, help="evaluate on so many images; by default on all")
    parser.add_argument("--max-trials", type=int, help="most trials of a search")
    parser.add_argument("--rounds", type=int, default=Timing().rounds, help="turns that each contestant gets")
    parser.add_argument("--store", type=Path, default=Path("model_store"))
    parser.add_argument("--trust-checkpoint", action="store_true")
    parser.add_argument("--write", type=Path, help="the page to write the table into")
    options = parser.parse_args(words)
    if options.write is not None and not options.write.parent.is_dir():
        parser.error(f"--write {options.write}: there is no folder {options.write.parent}")
    noise.silence()
    began = begun()
    rows, efforts, chose = [], dict[Case, dict[MethodName, Effort]](), 0
    for case, method, found in searches(options, Timing(batch_sizes=(1,), rounds=options.rounds)):
        rows.append(row(case, method, found))
        efforts.setdefault(case, {})[method] = Effort.of(found)
        chose = found.chose
        sys.stderr.write(f"{rows[-1]}\n")
    told = command("benchmarks.search", words if words is not None else sys.argv[1:], without=("--trust-checkpoint",))
    compiled = " `torch.compile` was switched off." if os.environ.get("TORCH_COMPILE_DISABLE") == "1" else ""
    text = (
        f"Made by `{told}` on {began}: {here('torch', 'onnxruntime-gpu', 'openvino')}. {chose:,} images chose and the "
        f"others judged, {options.rounds} rounds timed.{compiled}\n\n{markdown(HEADS, rows)}\n{sooner(efforts)}\n"
    )
    sys.stdout.write(text)
    if options.write is not None:
        write_below(options.write, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
