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
from optimize.measure.statistics import paired_difference, sqnr_db
from optimize.tracing.equivalence import output_values
from serve.runtime.card.card import LOGITS
from serve.runtime.outputs import Outputs, joined

#: The number of images whose logits are kept for parity. They are spread over the split, which may be sorted by class.
PARITY_IMAGES = 512

_FILE, _OTHER = "answers.safetensors", "other_"


@dataclass(frozen=True)
class Answers:
    """An artifact's answers on the validation split in its order, without the images that cannot be read.

    Attributes:
        first: ``bool (N,)``, whether the best class is the right one.
        five: ``bool (N,)``, whether the right class is among the best five.
        predicted: ``int64 (N,)``, the best class.
        logits: ``float32 (min(N, 512), classes)``, of images at equal distances.
        left_out: ``int64``, rows of the split that cannot be read.
        others: the network's outputs behind the logits, ``float32 (min(N, 512), …)`` each, of the same images.
    """

    first: torch.Tensor
    five: torch.Tensor
    predicted: torch.Tensor
    logits: torch.Tensor
    left_out: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    others: Outputs = ()

    @property
    def top1(self) -> float:
        """Return the share of images whose best class is right."""
        return self.first.double().mean().item()

    @property
    def top5(self) -> float:
        """Return the share of images whose right class is among the best five."""
        return self.five.double().mean().item()


def answer(score: Call, context: Context, max_batch: int) -> Answers:
    """Run a network over the validation split.

    Args:
        score: ``uint8 (N, C, H, W)`` to outputs. The first is logits ``float32 (N, classes)``.
        context: data and preprocessing.
        max_batch: the largest batch.

    Raises:
        PassError: an output is NaN or infinite.
        UserError: images cannot be read, and the context does not allow leaving them out.
    """
    count = len(context.data.val)
    kept = torch.zeros(count, dtype=torch.bool)
    kept[torch.arange(min(count, PARITY_IMAGES)) * count // min(count, PARITY_IMAGES)] = True
    batches = context.evaluation(max_batch, torch.device("cpu"))
    first, five, predicted, outputs = [], [], [], []
    for done, (rows, images, labels) in enumerate(batches.numbered(), start=1):
        found = score(images)
        if broken := [number for number, output in enumerate(found) if not output.isfinite().all()]:
            raise PassError(f"its {output_values(broken[0])} are NaN or infinite on validation images")
        # int8 often gives equal logits. The server sorts them by index, so this sort must be stable. topk is not.
        best = found[0].sort(dim=1, descending=True, stable=True).indices[:, :5]
        right = best == labels[:, None]
        first.append(right[:, 0])
        five.append(right.any(dim=1))
        predicted.append(best[:, 0])
        outputs.append(tuple(output[kept[rows]] for output in found))
        context.listener.progressed(done / len(batches), "accuracy")
    left_out = torch.tensor(sorted(batches.left_out), dtype=torch.int64)
    logits, *others = joined(outputs)
    return Answers(torch.cat(first), torch.cat(five), torch.cat(predicted), logits, left_out, tuple(others))


def save_answers(answers: Answers, folder: Path) -> None:
    """Write answers into an object's folder."""
    named = {name: tensor for name, tensor in vars(answers).items() if name != "others"}
    named |= {f"{_OTHER}{number}": output for number, output in enumerate(answers.others)}
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, folder / _FILE)


def load_answers(folder: Path) -> Answers:
    """Read what `save_answers` wrote."""
    named = load_file(folder / _FILE)
    others = [named.pop(f"{_OTHER}{number}") for number in range(sum(name.startswith(_OTHER) for name in named))]
    return Answers(**named, others=tuple(others))


def accuracy(answers: Answers, baseline: Answers | None, key: str) -> Accuracy:
    """Compute top-1 and top-5, and the paired difference of top-1 to the baseline on the same images.

    Args:
        answers: the artifact's answers.
        baseline: the baseline's answers, or None if the artifact is the baseline.
        key: the store's key of ``answers``.
    """
    alone = Accuracy(
        top1=answers.top1, top5=answers.top5, images=len(answers.first), left_out=len(answers.left_out), answers=key
    )
    if baseline is None:
        return alone
    difference = Difference.of(paired_difference(baseline.first.numpy(), answers.first.numpy()))
    return alone.model_copy(update={"difference": difference})


def parity(reference: Answers, other: Answers, name: str, outputs: Sequence[str] = (LOGITS,)) -> Parity:
    """Compare the logits of two artifacts on `PARITY_IMAGES` images, and their best classes on all images.

    Args:
        reference: the answers of the artifact called ``name``.
        other: the answers to compare with them.
        name: the name of the reference in the report.
        outputs: names of the network's outputs.
    """
    return Parity(
        reference=name,
        **_closeness(reference.logits, other.logits),
        top1_agreement=(reference.predicted == other.predicted).double().mean().item(),
        images=len(reference.predicted),
        logits_of=len(reference.logits),
        others=tuple(
            OutputParity(output=output, **_closeness(*pair))
            for output, *pair in zip(outputs[1:], reference.others, other.others, strict=True)
        ),
    )


def least_sqnr(reference: Answers, other: Answers) -> float | None:
    """Return the least signal-to-noise ratio of an output in dB. None if all are equal to the last bit."""
    pairs = zip((reference.logits, *reference.others), (other.logits, *other.others), strict=True)
    ratios = [_closeness(*pair)["sqnr_db"] for pair in pairs]
    return min((ratio for ratio in ratios if ratio is not None), default=None)


def _closeness(reference: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
    difference = (reference - other).abs()
    return {
        "max_abs": difference.max().item(),
        "mean_abs": difference.double().mean().item(),
        "sqnr_db": sqnr_db(reference.numpy(), other.numpy()) if reference.any() else None,
    }
