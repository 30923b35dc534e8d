"""Classification: one class for each image. The first output is logits ``(N, classes)``, targets are ``int64 (N,)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optimize.mean_iou import grouped_difference, grouped_share
from optimize.statistics import PairedDifference, paired_difference, wilson_interval
from optimize.tasks.base import ClassScores, Evidence, Likeness, Metric, Task, groups_of, register, rows_of

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from serve.runtime.card.card import Probabilities
    from serve.runtime.outputs import Outputs


#: The other order must be right for this share of the images, and for this much more than the order in use …
_RIGHT, _GAIN = 0.5, 0.1
#: … and more than chance would explain, in standard errors of the paired difference.
_SURE = 5.0


class Classification(Task):
    """See `Task`. This is the evidence of an image.

    - ``first``: ``bool``, whether the best class is the right one
    - ``five``: ``bool``, whether the right class is among the best five
    - ``predicted``: ``int64``, the best class
    - ``target``: ``int64``, the right class.
    """

    name: ClassVar[str] = "classification"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("top1", "top-1", "top-1 accuracy"),
        Metric("top5", "top-5", "top-5 accuracy"),
    )
    agreement: ClassVar[Metric] = Metric("top1_agreement", "same top-1")
    counted: ClassVar[str] = "images"
    of_class: ClassVar[str] = "accuracy"
    method: ClassVar[str] = (
        "Accuracy differences compare the same images under both models; their 95 % interval is Tango's score interval "
        "for paired proportions, and is the wider the more images changed sides (gained and lost). If the data have "
        "groups of images, it is Student's with the jackknife's error over groups."
    )

    def fault_of(self, output: object, inputs: torch.Tensor, classes: int) -> str | None:
        """See `Task`."""
        if tuple(getattr(output, "shape", ())) == (len(inputs), classes):
            return None
        return f"it must give logits of shape ({len(inputs)}, {classes})"

    def loss(
        self, output: torch.Tensor, targets: torch.Tensor, probabilities: Probabilities, smoothing: float = 0.0
    ) -> torch.Tensor:
        """Return the cross-entropy of logits with labels.

        If each class has a probability of its own, it is the binary one, summed over the classes.

        Args:
            output: logits, ``(N, classes)``.
            targets: labels ``int64 (N,)``, or shares ``float32 (N, classes)``.
            probabilities: see `Task`.
            smoothing: see `Task`.
        """
        from torch.nn import functional

        if probabilities == "softmax":
            return functional.cross_entropy(output, targets, label_smoothing=smoothing)
        shares = functional.one_hot(targets, output.shape[1]).to(output) if targets.ndim == 1 else targets
        smooth = shares * (1 - smoothing) + smoothing / output.shape[1]
        return functional.binary_cross_entropy_with_logits(output, smooth, reduction="none").sum(1).mean()

    def soft_loss(
        self, student: torch.Tensor, teacher: torch.Tensor, temperature: float, probabilities: Probabilities = "softmax"
    ) -> torch.Tensor:
        """Return ``T**2 KL(teacher || student)`` of softened logits ``(N, classes)``.

        Hinton et al. 2015 (arXiv:1503.02531), section 2. The factor ``T**2`` keeps its gradients as large as those of
        the labels at any temperature. If each class has a probability of its own, it is the binary cross-entropy with
        the teacher's.
        """
        if probabilities == "sigmoid":
            return self.loss(student / temperature, (teacher / temperature).sigmoid(), probabilities) * temperature**2
        from torch.nn import functional

        own, wanted = (functional.log_softmax(logits / temperature, 1) for logits in (student, teacher))
        return functional.kl_div(own, wanted, reduction="batchmean", log_target=True) * temperature**2

    def shares(self, targets: torch.Tensor, classes: int) -> torch.Tensor:
        """See `Task`."""
        from torch.nn import functional

        return functional.one_hot(targets, classes).float()

    def evidence(self, outputs: Outputs, targets: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
        """See `Task`."""
        # int8 often gives equal logits. The server sorts them by index, so this sort must be stable. topk is not.
        best = outputs[0].sort(dim=1, descending=True, stable=True).indices[:, :5]
        right = best == targets[:, None]
        return {"first": right[:, 0], "five": right.any(dim=1), "predicted": best[:, 0], "target": targets}

    def scores(self, evidence: Evidence) -> dict[str, float]:
        """Return the share of images whose best class is right, and that of those with the right one among five."""
        return {"top1": self.score(evidence), "top5": evidence["five"].double().mean().item()}

    def score(self, evidence: Evidence, weights: NDArray[np.float64] | None = None) -> float:
        """See `Task`."""
        if weights is None:
            return evidence["first"].double().mean().item()
        return float(np.average(evidence["first"].numpy(), weights=weights))

    def difference(self, reference: Evidence, other: Evidence) -> PairedDifference:
        """See `Task`. The interval is Tango's, or the jackknife's if images belong together in groups."""
        right = reference["first"].numpy(), other["first"].numpy()
        groups = groups_of(reference)
        return paired_difference(*right) if groups is None else grouped_difference(*right, groups)

    def interval(self, evidence: Evidence) -> tuple[float, float]:
        """See `Task`. The interval is Wilson's, or the jackknife's if images belong together in groups."""
        if (groups := groups_of(evidence)) is not None:
            return grouped_share(evidence["first"].numpy(), groups)
        return wilson_interval(self.score(evidence), len(evidence["first"]))

    def ease(self, evidence: Evidence) -> NDArray[np.generic]:
        """See `Task`."""
        return evidence["first"].numpy()

    def by_class(self, evidence: Evidence, classes: int) -> ClassScores:
        """Return the share of each class's images whose best class is the right one."""
        target = evidence["target"].numpy()
        counts = np.bincount(target, minlength=classes)
        right = np.bincount(target, weights=evidence["first"].numpy(), minlength=classes)
        return ClassScores(np.where(counts > 0, right / np.maximum(1, counts), np.nan), counts, counts)

    def class_differences(
        self, reference: Evidence, other: Evidence, classes: int
    ) -> Sequence[PairedDifference | None]:
        """See `Task`."""
        rows = [np.flatnonzero(reference["target"].numpy() == place) for place in range(classes)]
        return [self.difference(rows_of(reference, own), rows_of(other, own)) if len(own) else None for own in rows]

    def agreements(self, reference: Evidence, other: Evidence) -> dict[str, float]:
        """Return the share of images with the same best class."""
        return {"top1_agreement": (reference["predicted"] == other["predicted"]).double().mean().item()}

    def likeness(self, expected: Outputs, found: Outputs) -> Likeness:
        """See `Task`."""
        same, of = int((expected[0].argmax(1) == found[0].argmax(1)).sum()), len(found[0])
        return Likeness(same / of, f"same top-1 on {same} of {of} training images")

    def chance(self, classes: int) -> float | None:
        """See `Task`."""
        return 1 / classes

    def remarks(self, evidence: Evidence, targets: torch.Tensor, classes: Sequence[str]) -> list[str]:
        """Return a line if the outputs seem to be in another order than the classes."""
        said = misplaced(evidence["predicted"].numpy(), targets.numpy(), classes)
        return [] if said is None else [said]


CLASSIFICATION = register(Classification())


def misplaced(
    predicted: NDArray[np.int64], labels: NDArray[np.int64], classes: Sequence[str], figure: str = "top-1"
) -> str | None:
    """Return a message if another class order fits the answers far better than the one in use, else None.

    Each half of the images is judged by the order that fits the other half best. So an order that only fits chance
    gains nothing.

    Args:
        predicted: ``(N,)``, the best output for each image.
        labels: ``(N,)``, the class of each image.
        classes: the names of the classes in the order in use.
        figure: the name of the share of right answers.
    """
    even = np.arange(len(labels)) % 2 == 0
    right = np.empty(len(labels), bool)
    for half in (even, ~even):
        right[half] = _meant(predicted[~half], labels[~half], len(classes))[predicted[half]] == labels[half]
    used = predicted == labels
    gain = right.astype(np.float64) - used
    majority = np.bincount(labels, minlength=1).max() / max(1, len(labels))
    if len(gain) < 2 or right.mean() < max(_RIGHT, used.mean() + _GAIN, majority + _GAIN):
        return None
    if gain.mean() * np.sqrt(len(gain)) < _SURE * max(float(gain.std()), 1 / np.sqrt(len(gain))):
        return None
    from optimize.data.class_order import ORDER_FLAG, ORDERS  # imports torch, see `base`

    meant = _meant(predicted, labels, len(classes))
    order = [classes[place] for place in meant]
    word = next((word for word, ordered in ORDERS.items() if list(ordered(classes)) == order), None)
    moved = np.flatnonzero(meant != np.arange(len(classes)))
    which = ", ".join(f"{place} is {order[place]!r} and not {classes[place]!r}" for place in moved[:3].tolist())
    return (
        f"the network's outputs seem to be in another order than the classes: {figure} is {used.mean():.1%}, and "
        f"would be {right.mean():.1%} if output {which}{' …' if len(moved) > 3 else ''}; give the order by "
        f"{ORDER_FLAG} " + (word or "FILE, with one name per line")
    )


def _meant(predicted: NDArray[np.int64], labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Assign a different class to each output, taking the most frequent pairs first."""
    pairs, counts = np.unique(predicted * classes + labels, return_counts=True)
    meant = np.full(classes, -1)
    free = np.ones(classes, bool)
    for pair in pairs[np.argsort(-counts, kind="stable")].tolist():
        output, label = divmod(pair, classes)
        if meant[output] < 0 and free[label]:
            meant[output], free[label] = label, False
    # An output without a pair keeps its class if that is free.
    for output in np.flatnonzero(meant < 0).tolist():
        if free[output]:
            meant[output], free[output] = output, False
    meant[meant < 0] = np.flatnonzero(free)
    return meant
