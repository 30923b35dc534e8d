"""Embeddings: a vector for each image, so that images of one class are near each other. The first output is ``(N, D)``.

Vectors are compared by their cosine, so their length does not matter. Targets are the classes, ``int64 (N,)``. The
number of outputs is not that of the classes, which may be others when the vectors are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optimize.jackknife import JackknifeDifference
from optimize.retrieval import (
    Retrieved,
    mean_average_precision,
    nearest,
    recall_difference,
    recall_interval,
    retrieve,
)
from optimize.tasks.base import Evidence, Likeness, Metric, Task, groups_of, register
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from serve.runtime.card.card import Probabilities
    from serve.runtime.outputs import Outputs

#: The outputs of a network that is built here.
OUTPUTS: Final = 64
#: What cosines are divided by in the loss. The authors recommend it.
_TEMPERATURE: Final = 0.1
#: Two networks give the same vector from this cosine on.
_SAME: Final = 0.99


class Embeddings(Task):
    """See `Task`. This is the evidence of an image.

    - ``vector``: ``float32 (D,)`` of length one
    - ``label``: ``int64``, its class.

    An image is retrieved among all images of the evidence. So the scores of a part of them are not those of the whole.
    """

    name: ClassVar[str] = "embeddings"
    networks_for: ClassVar[str] = "classification"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("recall1", "recall@1"),
        Metric("recall5", "recall@5"),
        Metric("map", "mAP"),
    )
    agreement: ClassVar[Metric] = Metric("cosine_agreement", "cosine of 0.99")
    counted: ClassVar[str] = "images"
    endings: ClassVar[Mapping[str, Probabilities]] = {}
    method: ClassVar[str] = (
        "Each evaluation image is searched among the others, or those of other groups, by the cosine of their vectors. "
        "Recall@k is the share with an image of their class among the k nearest, and mAP the mean average precision of "
        "all. Differences of recall@1 compare the same images under both models. Their 95 % interval is Student's with "
        "the error of halves of the images or groups, and is never narrower than what so many images cannot exclude."
    )

    def outputs(self, classes: int) -> int:
        """Return `OUTPUTS`."""
        return OUTPUTS

    def fault_of(self, output: object, inputs: torch.Tensor, classes: int) -> str | None:
        """See `Task`."""
        shape = tuple(getattr(output, "shape", ()))
        if len(shape) == 2 and shape[0] == len(inputs) and shape[1] > 1:
            return None
        return f"it must give a vector for each image, of shape ({len(inputs)}, any size from 2)"

    def loss(
        self, output: torch.Tensor, targets: torch.Tensor, probabilities: Probabilities, smoothing: float = 0.0
    ) -> torch.Tensor:
        """Return the supervised contrastive loss of a batch.

        Khosla et al. 2020 (arXiv:2004.11362), equation 2: the cross-entropy of the softmax over the cosines of an image
        with the others against those of its class. Images without another of their class in the batch do not count. So
        a batch needs more images than there are classes.

        Args:
            output: vectors of any length, ``(N, D)``.
            targets: classes ``int64 (N,)``, or shares ``float32 (N, classes)``: two images are of one class to the
                extent of their shares' product.
            probabilities: has no meaning here.
            smoothing: see `Task`.

        Raises:
            UserError: there is smoothing, which the classes of other images have no use for.
        """
        import torch
        from torch.nn import functional

        if smoothing:
            raise UserError(f"label_smoothing is {smoothing:g}, and embeddings have no probabilities: leave it at 0")
        vectors = functional.normalize(output.float(), dim=1)
        itself = torch.eye(len(vectors), dtype=torch.bool, device=output.device)
        cosines = (vectors @ vectors.T / _TEMPERATURE).masked_fill(itself, -1e9)
        same = targets @ targets.T if targets.ndim == 2 else (targets[:, None] == targets).to(cosines)
        same = same.masked_fill(itself, 0)
        weights = same.sum(1)
        each = -(same * functional.log_softmax(cosines, 1)).sum(1) / weights.clamp_min(1e-6)
        return each.sum() / (weights > 0).sum().clamp_min(1)

    def soft_loss(
        self, student: torch.Tensor, teacher: torch.Tensor, temperature: float, probabilities: Probabilities = "softmax"
    ) -> torch.Tensor:
        """Return one minus the cosine of a student's and its teacher's vectors, so that they can be compared.

        Raises:
            UserError: their lengths differ.
        """
        from torch.nn import functional

        if student.shape != teacher.shape:
            raise UserError(
                f"distil: the teacher gives vectors of {teacher.shape[1]} numbers and the student of "
                f"{student.shape[1]}: choose networks with as many outputs"
            )
        return (1 - functional.cosine_similarity(student.float(), teacher.float())).mean()

    def shares(self, targets: torch.Tensor, classes: int) -> torch.Tensor:
        """See `Task`."""
        from torch.nn import functional

        return functional.one_hot(targets, classes).float()

    def evidence(self, outputs: Outputs, targets: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
        """See `Task`."""
        from torch.nn import functional

        return {"vector": functional.normalize(outputs[0].float(), dim=1), "label": targets.long()}

    def scores(self, evidence: Evidence) -> dict[str, float]:
        """Return recall@1, recall@5, and the mean average precision of the ranked images."""
        found = _retrieved(evidence)
        return {"recall1": found.recall(1), "recall5": found.recall(5), "map": mean_average_precision(*_all(evidence))}

    def score(self, evidence: Evidence, weights: NDArray[np.float64] | None = None) -> float:
        """Return recall@1; see `optimize.retrieval`. ``weights (N,)``: how often each image is searched for."""
        return _retrieved(evidence).recall(1, weights)

    def difference(self, reference: Evidence, other: Evidence) -> JackknifeDifference:
        """See `Task` and `optimize.retrieval.recall_difference`."""
        return recall_difference(_retrieved(reference), _retrieved(other))

    def interval(self, evidence: Evidence) -> tuple[float, float]:
        """See `Task` and `optimize.retrieval.recall_interval`."""
        return recall_interval(_retrieved(evidence))

    def ease(self, evidence: Evidence) -> NDArray[np.generic]:
        """Return whether the nearest image is of the same class."""
        return _retrieved(evidence).hits(1)

    def agreements(self, reference: Evidence, other: Evidence) -> dict[str, float]:
        """Return the share of images whose vectors have a cosine of at least 0.99."""
        cosines = (reference["vector"] * other["vector"]).sum(1)
        return {"cosine_agreement": (cosines >= _SAME).double().mean().item()}

    def likeness(self, expected: Outputs, found: Outputs) -> Likeness:
        """Compare which of the other images is the nearest."""
        from torch.nn import functional

        own, wanted = (functional.normalize(outputs[0].float(), dim=1).numpy() for outputs in (found, expected))
        same, of = int((nearest(own) == nearest(wanted)).sum()), len(own)
        return Likeness(same / of, f"same nearest image for {same} of {of} training images")

    def chance(self, classes: int) -> float | None:
        """See `Task`."""
        return 1 / classes


EMBEDDINGS = Embeddings()
register(EMBEDDINGS)


def _all(
    evidence: Evidence,
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64] | None]:
    """Return vectors, labels and groups."""
    return evidence["vector"].numpy(), evidence["label"].numpy(), groups_of(evidence)


def _retrieved(evidence: Evidence) -> Retrieved:
    return retrieve(*_all(evidence))
