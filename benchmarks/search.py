"""Which method of the search takes fewer trials to a target, on ResNet-20 and MobileNetV2 (CIFAR-10), as a table.

``python -m benchmarks.search --data imagefolder:CIFAR10 --resnet FILE --mobilenet FILE --write docs/search.md``. Trials
come from the store where they were made before, so that it can be stopped and goes on; their number stays the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import optimize as opt
from optimize.precision.methods import METHODS, MethodName
from optimize.precision.records import Found
from optimize.precision.table import markdown
from optimize.report.words import number, points

MODELS = {
    "ResNet-20": "examples/cifar_resnet.py:resnet20",
    "MobileNetV2": "examples/cifar_mobilenet.py:mobilenet_v2",
}
#: Percentage points of top-1.
TARGETS = (1.0, 0.5, 0.1)
#: With scales per channel and with one a tensor: a network that int8 hardly hurts leaves nothing to search for.
SETTINGS = {"per channel": opt.Ptq(), "per tensor": opt.Ptq(weights="per-tensor", observer="minmax")}
HEADS = (
    "network, scales",
    "target, points",
    "method",
    "trials",
    "not int8",
    "top-1, other half",
    "p50 ms",
    "fastest float ms",
    "returned",
)
_MARK = "<!-- measured -->"


@dataclass(frozen=True)
class Case:
    """One search: of which network, quantized how, to which target, by which method."""

    network: str
    setting: str
    target: float
    method: str

    def row(self, found: Found) -> tuple[str, ...]:
        """Its line of the table."""
        wide = [trial.bits for trial in found.trials if trial.holds]
        smallest = min((len(bits) for bits in wide), default=found.layers)
        judged = found.judged.difference if found.judged else None
        return (
            f"{self.network}, {self.setting}",
            f"{self.target:g}",
            self.method,
            str(len(found.trials)),
            f"{smallest} of {found.layers}",
            points(judged.delta) if judged else "–",
            number(found.p50),
            number(found.fastest_float_p50),
            found.pair or "nothing",
        )


def sooner(counts: dict[tuple[str, str, float], dict[MethodName, int]]) -> str:
    """In a sentence which method took fewer trials, of the searches that had something to find."""
    told = {case: trials for case, trials in counts.items() if max(trials.values()) > 1}
    wins = {
        name: sum(trials[name] < min(v for k, v in trials.items() if k != name) for trials in told.values())
        for name in METHODS
    }
    sums = {name: sum(trials[name] for trials in told.values()) for name in METHODS}
    said = ", ".join(f"`{name}` fewer in {wins[name]} ({sums[name]} trials in all)" for name in METHODS)
    return f"Of {len(counts)} searches {len(told)} needed more than one trial: {said}."


def main(words: Sequence[str] | None = None) -> int:
    """Run the searches and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="CIFAR-10, such as imagefolder:DIR")
    parser.add_argument("--resnet", help="a checkpoint of the ResNet-20; without it that is trained")
    parser.add_argument("--mobilenet", help="a checkpoint of the MobileNetV2; without it that is trained")
    parser.add_argument("--store", default="model_store")
    parser.add_argument("--trust-checkpoint", action="store_true")
    parser.add_argument("--write", type=Path, help="the page to write the table into")
    options = parser.parse_args(words)
    checkpoints = {"ResNet-20": options.resnet, "MobileNetV2": options.mobilenet}
    rows, counts = [], {}
    for network, model in MODELS.items():
        base = opt.load(
            model,
            checkpoint=checkpoints[network],
            data=options.data,
            store=options.store,
            device="cpu",
            trust_checkpoint=options.trust_checkpoint,
        )
        for setting, ptq in SETTINGS.items():
            for target in TARGETS:
                counts[network, setting, target] = trials = dict.fromkeys(METHODS, 0)
                for method in METHODS:
                    found = opt.search(base, max_drop=target / 100, method=method, ptq=ptq, measure="cpu").found
                    rows.append(Case(network, setting, target, method).row(found))
                    trials[method] = len(found.trials)
                    sys.stderr.write(f"{rows[-1]}\n")
    text = f"{markdown(HEADS, rows)}\n{sooner(counts)} On {found.cpu}.\n"
    sys.stdout.write(text)
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(f"{page.partition(_MARK)[0]}{_MARK}\n\n{text}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
