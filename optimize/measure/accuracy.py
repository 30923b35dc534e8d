"""An artifact's answers on the validation images, and their comparison with another artifact's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from optimize.context import Context
from optimize.errors import PassError
from optimize.measure.figures import Accuracy, Difference, OutputParity, Parity
from optimize.measure.latency import Call
from optimize.statistics import sqnr_db
from optimize.tasks.base import GROUPS, Evidence, Task, joined_evidence
from optimize.tracing.equivalence import output_values
from serve.runtime.card.card import LOGITS
from serve.runtime.outputs import Outputs, joined

#: The number of images whose outputs are kept for parity. They are spread over the split, which may be sorted by class.
PARITY_IMAGES = 512
#: The most numbers of these outputs together, for networks that answer each pixel.
_PARITY_NUMBERS = 1 << 25

_FILE, _EVIDENCE, _OUTPUT, _LEFT_OUT = "answers.safetensors", "evidence.", "output.", "left_out"


@dataclass(frozen=True)
class Answers:
    """An artifact's answers on the validation split in its order, without the images that cannot be read.

    Attributes:
        evidence: what the task keeps of each image's answer; see `optimize.tasks.base`.
        outputs: the network's outputs, ``(M, …)`` each, of images at equal distances: up to 512, and fewer if they are
            large.
        left_out: ``int64``, rows of the split that cannot be read.
    """

    evidence: Evidence
    outputs: Outputs
    left_out: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def images(self) -> int:
        """Return the number of images that were answered."""
        return len(next(iter(self.evidence.values())))


def answer(run: Call, context: Context, max_batch: int, network: Call | None = None) -> Answers:
    """Run a network over the validation split.

    Args:
        run: ``uint8 (N, C, H, W)`` to the tensors of which answers are made.
        context: data, task and preprocessing.
        max_batch: the largest batch.
        network: the same to the network's own outputs, which are kept of some images. None: ``run`` gives them.

    Raises:
        PassError: an output is NaN or infinite.
        UserError: images cannot be read, and the context does not allow leaving them out.
    """
    count, groups = len(context.data.val), context.data.val.groups
    kept = torch.zeros(count, dtype=torch.bool)
    batches = context.evaluation(max_batch, torch.device("cpu"))
    evidence, outputs = [], []
    for done, (rows, images, targets) in enumerate(batches.numbered(), start=1):
        found = _finite(run(images))
        if done == 1:
            one = found if network is None else network(images[:1])
            most = _PARITY_NUMBERS // sum(output[0].numel() for output in one)
            places = max(1, min(count, PARITY_IMAGES, most))
            kept[torch.arange(places) * count // places] = True
            outputs.append(tuple(output[:0] for output in one))
        own = context.task.evidence(found, targets, len(context.data.classes))
        evidence.append(own if groups is None else own | {GROUPS: groups[rows]})
        if network is None:
            outputs.append(tuple(output[kept[rows]] for output in found))
        elif len(chosen := images[kept[rows]]):
            outputs.append(_finite(network(chosen)))
        context.listener.progressed(done / len(batches), "accuracy")
    left_out = torch.tensor(sorted(batches.left_out), dtype=torch.int64)
    return Answers(joined_evidence(evidence), joined(outputs), left_out)


def _finite(outputs: Outputs) -> Outputs:
    if broken := [number for number, output in enumerate(outputs) if not output.isfinite().all()]:
        raise PassError(f"its {output_values(broken[0])} are NaN or infinite on validation images")
    return outputs


def save_answers(answers: Answers, folder: Path) -> None:
    """Write answers into an object's folder."""
    named = {f"{_EVIDENCE}{name}": tensor for name, tensor in answers.evidence.items()}
    named |= {f"{_OUTPUT}{number}": output for number, output in enumerate(answers.outputs)}
    named[_LEFT_OUT] = answers.left_out
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / _FILE)


def load_answers(folder: Path) -> Answers:
    """Read what `save_answers` wrote."""
    named = load_file(folder / _FILE)
    evidence = {name.removeprefix(_EVIDENCE): named[name] for name in named if name.startswith(_EVIDENCE)}
    outputs = sum(name.startswith(_OUTPUT) for name in named)
    return Answers(evidence, tuple(named[f"{_OUTPUT}{number}"] for number in range(outputs)), named[_LEFT_OUT])


def accuracy(answers: Answers, baseline: Answers | None, key: str, task: Task) -> Accuracy:
    """Compute the scores, and the paired difference of the first one to the baseline on the same images.

    Args:
        answers: the artifact's answers.
        baseline: the baseline's answers, or None if the artifact is the baseline.
        key: the store's key of ``answers``.
        task: what the network is for.
    """
    return Accuracy(
        scores=task.scores(answers.evidence),
        interval=task.interval(answers.evidence),
        images=answers.images,
        left_out=len(answers.left_out),
        answers=key,
        difference=None if baseline is None else Difference.of(task.difference(baseline.evidence, answers.evidence)),
    )


def parity(reference: Answers, other: Answers, name: str, task: Task, outputs: Sequence[str] = (LOGITS,)) -> Parity:
    """Compare the outputs of two artifacts on up to `PARITY_IMAGES` images, and their answers on all images.

    Args:
        reference: the answers of the artifact called ``name``.
        other: the answers to compare with them.
        name: the name of the reference in the report.
        task: what the network is for.
        outputs: names of the network's outputs.
    """
    first, *others = zip(reference.outputs, other.outputs, strict=True)
    return Parity(
        reference=name,
        **_closeness(*first),
        agreements=task.agreements(reference.evidence, other.evidence),
        images=reference.images,
        logits_of=len(first[0]),
        others=tuple(
            OutputParity(output=output, **_closeness(*pair)) for output, pair in zip(outputs[1:], others, strict=True)
        ),
    )


def least_sqnr(reference: Answers, other: Answers) -> float | None:
    """Return the least signal-to-noise ratio of an output in dB. None if all are equal to the last bit."""
    pairs = zip(reference.outputs, other.outputs, strict=True)
    ratios = [_closeness(*pair)["sqnr_db"] for pair in pairs]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _closeness(reference: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
    difference = (reference.float() - other.float()).abs()  # classes are integers without a sign
    return {
        "max_abs": difference.max().item(),
        "mean_abs": difference.double().mean().item(),
        "sqnr_db": sqnr_db(reference.numpy(), other.numpy()) if reference.any() else None,
    }
