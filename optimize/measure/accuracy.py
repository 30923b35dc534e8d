"""An artifact's answers on the validation images, and their comparison with another artifact's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from optimize.context import Context
from optimize.errors import PassError
from optimize.measure.figures import Accuracy, Difference, Parity
from optimize.measure.latency import Call
from optimize.measure.statistics import paired_difference, sqnr_db

#: The number of images whose logits are kept for parity. They are spread over the split, which may be sorted by class.
PARITY_IMAGES = 512

_FILE = "answers.safetensors"


@dataclass(frozen=True)
class Answers:
    """An artifact's answers on the validation split in its order, without the images that cannot be read.

    Attributes:
        first: ``bool (N,)``, whether the best class is the right one.
        five: ``bool (N,)``, whether the right class is among the best five.
        predicted: ``int64 (N,)``, the best class.
        logits: ``float32 (min(N, 512), classes)``, of images at equal distances.
        left_out: ``int64``, rows of the split that cannot be read.
    """

    first: torch.Tensor
    five: torch.Tensor
    predicted: torch.Tensor
    logits: torch.Tensor
    left_out: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

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
        score: ``uint8 (N, C, H, W)`` to logits ``float32 (N, classes)``.
        context: data and preprocessing.
        max_batch: the largest batch.

    Raises:
        PassError: a logit is NaN or infinite.
        UserError: images cannot be read, and the context does not allow leaving them out.
    """
    count = len(context.data.val)
    kept = torch.zeros(count, dtype=torch.bool)
    kept[torch.arange(min(count, PARITY_IMAGES)) * count // min(count, PARITY_IMAGES)] = True
    batches = context.evaluation(max_batch, torch.device("cpu"))
    first, five, predicted, logits = [], [], [], []
    for done, (rows, images, labels) in enumerate(batches.numbered(), start=1):
        scores = score(images)
        if not torch.isfinite(scores).all():
            raise PassError("its logits are NaN or infinite on validation images")
        # int8 often gives equal logits. The server sorts them by index, so this sort must be stable. topk is not.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :5]
        right = best == labels[:, None]
        first.append(right[:, 0])
        five.append(right.any(dim=1))
        predicted.append(best[:, 0])
        logits.append(scores[kept[rows]])
        context.listener.progressed(done / len(batches), "accuracy")
    left_out = torch.tensor(sorted(batches.left_out), dtype=torch.int64)
    return Answers(torch.cat(first), torch.cat(five), torch.cat(predicted), torch.cat(logits), left_out)


def save_answers(answers: Answers, folder: Path) -> None:
    """Write answers into an object's folder."""
    save_file({name: tensor.contiguous() for name, tensor in vars(answers).items()}, folder / _FILE)


def load_answers(folder: Path) -> Answers:
    """Read what `save_answers` wrote."""
    return Answers(**load_file(folder / _FILE))


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


def parity(reference: Answers, other: Answers, name: str) -> Parity:
    """Compare the logits of two artifacts on `PARITY_IMAGES` images, and their best classes on all images.

    Args:
        reference: the answers of the artifact called ``name``.
        other: the answers to compare with them.
        name: the name of the reference in the report.
    """
    difference = (reference.logits - other.logits).abs()
    return Parity(
        reference=name,
        max_abs=difference.max().item(),
        mean_abs=difference.double().mean().item(),
        sqnr_db=sqnr_db(reference.logits.numpy(), other.logits.numpy()) if reference.logits.any() else None,
        top1_agreement=(reference.predicted == other.predicted).double().mean().item(),
        images=len(reference.predicted),
        logits_of=len(reference.logits),
    )
