"""Multi-label classification: any number of classes for each image. The first output is logits ``(N, classes)``.

Targets are ``uint8 (N, classes)``: 1 for each class that the image has. Each class has a probability of its own, the
sigmoid of its logit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optimize.average_precision import (
    class_precisions,
    image_precisions,
    mean_precision,
    precision_difference,
    precision_interval,
)
from optimize.jackknife import JackknifeDifference
from optimize.tasks.base import ClassScores, Evidence, Likeness, Metric, Task, groups_of, register
from serve.runtime.errors import listed

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from optimize.statistics import PairedDifference
    from serve.runtime.card.card import Probabilities
    from serve.runtime.outputs import Outputs

#: The logit of the probability from which a class is answered, 0.5.
_THRESHOLD: Final = 0.0
#: The largest difference of a sum of probabilities in float32 from 1.
_SUM: Final = 1e-3


class MultiLabel(Task):
    """See `Task`. This is the evidence of an image.

    - ``logits``: ``float32 (classes,)``
    - ``truth``: ``bool (classes,)``, which classes it has.
    """

    name: ClassVar[str] = "multilabel"
    networks_for: ClassVar[str] = "classification"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("map", "mAP"), Metric("f1", "F1"))
    agreement: ClassVar[Metric] = Metric("label_agreement", "same labels")
    counted: ClassVar[str] = "labels of an image"
    of_class: ClassVar[str] = "AP"
    whole: ClassVar[bool] = True
    endings: ClassVar[Mapping[str, Probabilities]] = {"logits": "sigmoid", "sigmoid": "sigmoid"}
    method: ClassVar[str] = (
        "mAP is the mean over classes of the average precision, and F1 that of all labels together at a probability of "
        "0.5. Differences of the mAP compare the same images under both models. Their 95 % interval is Student's with "
        "the jackknife's error over images or groups, and is never narrower than what so many images cannot exclude. "
        "An image counts as gained or lost if the mean precision at the ranks of its labels is higher or lower."
    )

    def fault_of(self, output: object, inputs: torch.Tensor, classes: int) -> str | None:
        """See `Task`."""
        import torch

        if not isinstance(output, torch.Tensor) or tuple(output.shape) != (len(inputs), classes):
            return f"it must give logits of shape ({len(inputs)}, {classes})"
        if classes > 1 and (output >= 0).all() and ((output.sum(1) - 1).abs() < _SUM).all():
            return "an image may have several classes, and these numbers sum to one: remove the softmax"
        return None

    def loss(
        self, output: torch.Tensor, targets: torch.Tensor, probabilities: Probabilities, smoothing: float = 0.0
    ) -> torch.Tensor:
        """Return the binary cross-entropy of logits ``(N, classes)``, summed over the classes.

        Args:
            output: logits.
            targets: ``uint8 (N, classes)``, or the shares of `shares`.
            probabilities: always those of a sigmoid.
            smoothing: a class that an image has or lacks is so much nearer to a half.
        """
        from torch.nn import functional

        smooth = targets.to(output) * (1 - smoothing) + smoothing / 2
        return functional.binary_cross_entropy_with_logits(output, smooth, reduction="none").sum(1).mean()

    def soft_loss(
        self, student: torch.Tensor, teacher: torch.Tensor, temperature: float, probabilities: Probabilities = "sigmoid"
    ) -> torch.Tensor:
        """Return the binary cross-entropy with the teacher's softened probabilities, times ``T**2``."""
        return self.loss(student / temperature, (teacher / temperature).sigmoid(), "sigmoid") * temperature**2

    def shares(self, targets: torch.Tensor, classes: int) -> torch.Tensor:
        """See `Task`."""
        return targets.float()

    def evidence(self, outputs: Outputs, targets: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
        """See `Task`."""
        return {"logits": outputs[0].float(), "truth": targets.bool()}

    def scores(self, evidence: Evidence) -> dict[str, float]:
        """Return the mAP, and F1 of all labels together: twice the right ones over those answered and those true."""
        answered, truth = _answered(evidence), evidence["truth"].numpy()
        both = answered.sum() + truth.sum()
        return {"map": self.score(evidence), "f1": float(2 * (answered & truth).sum() / both) if both else 1.0}

    def score(self, evidence: Evidence, weights: NDArray[np.float64] | None = None) -> float:
        """Return the mAP; see `optimize.average_precision`."""
        return mean_precision(*_both(evidence), weights)

    def by_class(self, evidence: Evidence, classes: int) -> ClassScores:
        """Return the average precision of each class."""
        images = evidence["truth"].numpy().sum(0, dtype=np.int64)
        return ClassScores(class_precisions(*_both(evidence)), images, images)

    def class_differences(
        self, reference: Evidence, other: Evidence, classes: int
    ) -> Sequence[PairedDifference | None]:
        """See `Task` and `optimize.average_precision.precision_difference`."""
        (first, truth), (second, _), groups = _both(reference), _both(other), groups_of(reference)
        found: list[PairedDifference | None] = []
        for place, own in enumerate(truth.T):
            if not own.any():
                found.append(None)
                continue
            one = slice(place, place + 1)
            difference = precision_difference(first[:, one], second[:, one], truth[:, one], groups)
            found.append(difference.among(own, groups))
        return found

    def difference(self, reference: Evidence, other: Evidence) -> JackknifeDifference:
        """See `Task` and `optimize.average_precision.precision_difference`."""
        first, truth = _both(reference)
        return precision_difference(first, _both(other)[0], truth, groups_of(reference))

    def interval(self, evidence: Evidence) -> tuple[float, float]:
        """See `Task` and `optimize.average_precision.precision_interval`."""
        return precision_interval(*_both(evidence), groups_of(evidence))

    def ease(self, evidence: Evidence) -> NDArray[np.generic]:
        """Return the mean precision at the ranks of each image's labels."""
        return image_precisions(*_both(evidence))

    def agreements(self, reference: Evidence, other: Evidence) -> dict[str, float]:
        """Return the share of the labels of either answer that both have: the mean over images."""
        return {"label_agreement": _alike(_answered(reference), _answered(other))}

    def likeness(self, expected: Outputs, found: Outputs) -> Likeness:
        """See `Task`."""
        share = _alike(*((outputs[0] > _THRESHOLD).numpy() for outputs in (expected, found)))
        return Likeness(share, f"{share:.1%} of the labels of {len(found[0])} training images alike")

    def remarks(self, evidence: Evidence, targets: torch.Tensor, classes: Sequence[str]) -> list[str]:
        """Return a line if some classes are in no answer."""
        truth, answered = evidence["truth"].numpy().any(0), _answered(evidence).any(0)
        never = np.flatnonzero(truth & ~answered).tolist()
        if not never:
            return []
        return [
            f"the network gives none of the evaluation images {len(never)} of their {int(truth.sum())} classes: "
            f"{listed([classes[place] for place in never], 6)}"
        ]


MULTILABEL = MultiLabel()
register(MULTILABEL)


def _both(evidence: Evidence) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return logits and truth."""
    return evidence["logits"].numpy(), evidence["truth"].numpy()


def _answered(evidence: Evidence) -> NDArray[np.bool_]:
    """Return the classes that images are answered with, ``(N, classes)``."""
    found: NDArray[np.bool_] = (evidence["logits"] > _THRESHOLD).numpy()
    return found


def _alike(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> float:
    """Return the mean over images of the labels in both answers over those in either. It is 1 if neither has any."""
    both, either = (first & second).sum(1), (first | second).sum(1)
    return float(np.where(either > 0, both / np.maximum(either, 1), 1.0).mean())
