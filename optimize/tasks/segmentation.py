"""Semantic segmentation: a class for each pixel. The first output is logits ``(N, classes, H, W)`` of the input size.

Targets are class maps ``(N, H, W)``, ``uint8`` up to 255 classes and ``int16`` for more. A value that is no class does
not count: data use the largest value of the type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from optimize.jackknife import JackknifeDifference
from optimize.mean_iou import class_iou_differences, class_ious, iou_difference, iou_interval, mean_iou
from optimize.small_pictures import coloured, photograph
from optimize.tasks.base import (
    ClassScores,
    Evidence,
    Example,
    Likeness,
    Metric,
    Panel,
    Task,
    groups_of,
    register,
)
from optimize.tasks.classification import misplaced
from serve.runtime.errors import listed
from serve.runtime.tasks.segmentation import palette

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from optimize.statistics import PairedDifference
    from serve.runtime.card.card import Probabilities
    from serve.runtime.outputs import Outputs

#: The most classes whose maps are ``uint8``, because data use 255 for pixels that do not count.
_NARROW = 255
#: What a pixel's class in the second of two answers is to that in the first, the most important last.
_CHANGES = ("as before", "wrong in another way", "right now", "right before")
#: Their colours. Each can be told from the others with any colour vision, and from a light and a dark page.
_SHADES = (0, 0, 0, 128, 134, 142, 46, 134, 222, 224, 96, 16)
_UNCOUNTED = "does not count"
#: About so many pixels show whether the order of the classes is right.
_SAMPLED = 100_000


class Segmentation(Task):
    """See `Task`. This is the evidence of an image.

    - ``confusion``: ``int32 (classes, classes)``, its pixels by their class and by the class that they were given
    - ``predicted``: ``(H, W)``, the best class of each pixel, ``uint8`` up to 255 classes and ``int16`` for more.
    """

    name: ClassVar[str] = "segmentation"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("miou", "mIoU"), Metric("pixel_accuracy", "pixel accuracy"))
    agreement: ClassVar[Metric] = Metric("pixel_agreement", "same class")
    counted: ClassVar[str] = "pixels"
    of_class: ClassVar[str] = "IoU"
    answered: ClassVar[str] = "pixels"
    drawn: ClassVar[str] = (
        "The last panel shows the pixels that count and have another class than before: orange if it was right before, "
        "blue if it is right now, grey if neither is. All others are empty."
    )
    whole: ClassVar[bool] = True
    # Whole pictures are large and few: few of them fit into memory, and few of them make few steps.
    training: ClassVar[Mapping[str, Any]] = {
        "optimizer": "adamw",
        "learning_rate": 2e-3,
        "weight_decay": 0.01,
        "batch_size": 8,
        "epochs": 30,
        "crop_scale": 0.25,
        "channels_last": True,
    }
    method: ClassVar[str] = (
        "mIoU is the mean over classes of intersection over union, of the pixels of all images together. Its "
        "differences compare the same images under both models. Their 95 % interval is Student's with the jackknife's "
        "error over images, or over scenes if the data name them, and is never narrower than what so many images "
        "cannot exclude. An image counts as gained or lost if it has more or fewer right pixels."
    )

    def fault_of(self, output: object, inputs: torch.Tensor, classes: int) -> str | None:
        """See `Task`."""
        wanted = (len(inputs), classes, *inputs.shape[2:])
        if tuple(getattr(output, "shape", ())) == wanted:
            return None
        return f"it must give logits of shape {wanted}: one for each class and pixel of its input"

    def loss(
        self, output: torch.Tensor, targets: torch.Tensor, probabilities: Probabilities, smoothing: float = 0.0
    ) -> torch.Tensor:
        """Return the cross-entropy over the pixels that count: the mean of each image, then of the images.

        So an image has the same weight in a batch of any size. An image without such pixels has a loss of 0. If each
        class has a probability of its own, it is the binary cross-entropy, summed over the classes.

        Args:
            output: logits, ``(N, classes, H, W)``.
            targets: class maps ``(N, H, W)``, or the shares of `shares`.
            probabilities: see `Task`.
            smoothing: see `Task`.
        """
        import torch
        from torch.nn import functional

        classes = output.shape[1]
        if targets.ndim == 3 and probabilities == "softmax":
            counts = _counts(targets, classes)
            labels = torch.where(counts, targets.long(), -100)
            each = functional.cross_entropy(output, labels, reduction="none", label_smoothing=smoothing)
            return _mean_of_images(each, counts.to(each))
        shares = self.shares(targets, classes).to(output) if targets.ndim == 3 else targets
        weights = shares.sum(1)
        smooth = shares * (1 - smoothing) + weights[:, None] * (smoothing / classes)
        if probabilities == "softmax":
            each = -(smooth * functional.log_softmax(output, 1)).sum(1)
        else:
            binary = functional.binary_cross_entropy_with_logits(output, smooth, reduction="none")
            each = (binary * (weights[:, None] > 0)).sum(1)
        return _mean_of_images(each, weights)

    def soft_loss(
        self, student: torch.Tensor, teacher: torch.Tensor, temperature: float, probabilities: Probabilities = "softmax"
    ) -> torch.Tensor:
        """Return ``T**2 KL(teacher || student)`` of the softened logits of each pixel, as the mean over all pixels.

        See `Classification.soft_loss`. A teacher answers the pixels that do not count, too.
        """
        from torch.nn import functional

        if probabilities == "sigmoid":
            wanted = (teacher / temperature).sigmoid()
            each = functional.binary_cross_entropy_with_logits(student / temperature, wanted, reduction="none")
        else:
            own, other = (functional.log_softmax(logits / temperature, 1) for logits in (student, teacher))
            each = functional.kl_div(own, other, reduction="none", log_target=True)
        return each.sum(1).mean() * temperature**2

    def shares(self, targets: torch.Tensor, classes: int) -> torch.Tensor:
        """See `Task`. The shares of a pixel that does not count are 0."""
        import torch

        counts = _counts(targets, classes)
        found = torch.zeros(len(targets), classes, *targets.shape[1:], device=targets.device)
        return found.scatter_(1, torch.where(counts, targets, 0).long()[:, None], counts[:, None].to(found))

    def evidence(self, outputs: Outputs, targets: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
        """See `Task`. The first output may also be classes of pixels, ``(N, H, W)``, from the runtime's ending."""
        import torch

        first = outputs[0]
        # The first of equal logits, as the server takes it.
        predicted = first.argmax(1) if first.ndim == 4 else first.long()
        counts = _counts(targets, classes)
        images = torch.arange(len(targets))[:, None, None].expand_as(targets)
        places = (images * classes + targets) * classes + predicted
        found = torch.bincount(places[counts], minlength=len(targets) * classes * classes)
        return {
            "confusion": found.view(len(targets), classes, classes).to(torch.int32),
            "predicted": predicted.to(torch.uint8 if classes <= _NARROW else torch.int16),
        }

    def scores(self, evidence: Evidence) -> dict[str, float]:
        """Return the mIoU, and the share of right pixels of those that count."""
        pixels = evidence["confusion"].numpy().sum(0, dtype=np.int64)
        return {"miou": self.score(evidence), "pixel_accuracy": float(np.trace(pixels) / max(1, pixels.sum()))}

    def score(self, evidence: Evidence, weights: NDArray[np.float64] | None = None) -> float:
        """Return the mIoU; see `optimize.mean_iou.mean_iou`."""
        return mean_iou(evidence["confusion"].numpy(), weights)

    def by_class(self, evidence: Evidence, classes: int) -> ClassScores:
        """Return the intersection over union of each class."""
        confusion = evidence["confusion"].numpy()
        own = confusion.sum(2, dtype=np.int64)
        return ClassScores(class_ious(confusion), own.sum(0), (own > 0).sum(0))

    def class_differences(
        self, reference: Evidence, other: Evidence, classes: int
    ) -> Sequence[PairedDifference | None]:
        """See `Task` and `optimize.mean_iou.class_iou_differences`."""
        confusions = reference["confusion"].numpy(), other["confusion"].numpy()
        return class_iou_differences(*confusions, groups_of(reference))

    def example(
        self,
        image: NDArray[np.uint8],
        target: NDArray[np.integer],
        answers: Mapping[str, Evidence],
        classes: Sequence[str],
    ) -> Example:
        """Draw the image, its target, both class maps, and their difference."""
        maps = {"target": target} | {name: each["predicted"][0].numpy() for name, each in answers.items()}
        colours = palette()
        panels = [Panel("image", photograph(image), "the image as the network gets it")]
        legend: dict[str, tuple[str, int]] = {}
        for name, each in maps.items():
            shades = _shades(each, len(classes))
            panels.append(Panel(name, coloured(shades, colours), _shares(each, [*classes, _UNCOUNTED])))
            for place, pixels in zip(*np.unique(each, return_counts=True), strict=True):
                label = classes[place] if 0 <= place < len(classes) else _UNCOUNTED
                shade = int(_shades(place, len(classes)))
                _, known = legend.get(label, ("", 0))
                legend[label] = "#{:02x}{:02x}{:02x}".format(*colours[3 * shade :][:3]), known + int(pixels)
        before, now = (maps[name] for name in answers)
        changes = _changes(target, before, now, len(classes))
        panels.append(Panel("difference", coloured(changes, _SHADES, above=0), _shares(changes, _CHANGES)))
        return Example(tuple(panels), legend)

    def difference(self, reference: Evidence, other: Evidence) -> JackknifeDifference:
        """See `Task` and `optimize.mean_iou.iou_difference`."""
        return iou_difference(reference["confusion"].numpy(), other["confusion"].numpy(), groups_of(reference))

    def interval(self, evidence: Evidence) -> tuple[float, float]:
        """See `Task` and `optimize.mean_iou.iou_interval`."""
        return iou_interval(evidence["confusion"].numpy(), groups_of(evidence))

    def ease(self, evidence: Evidence) -> NDArray[np.generic]:
        """Return the share of each image's right pixels."""
        confusion = evidence["confusion"].numpy()
        right: NDArray[np.float64] = np.trace(confusion, axis1=1, axis2=2) / np.maximum(1, confusion.sum((1, 2)))
        return right

    def agreements(self, reference: Evidence, other: Evidence) -> dict[str, float]:
        """Return the share of all pixels with the same class, and that of the image with the smallest share."""
        alike = _alike(reference["predicted"], other["predicted"])
        return {"pixel_agreement": float(alike.mean()), "worst_image_agreement": float(alike.min())}

    def likeness(self, expected: Outputs, found: Outputs) -> Likeness:
        """Compare the classes of pixels: their share in the worst image, and the mean over the expected classes.

        The smaller of the two counts. If most pixels are background, a network that answers nothing else has most
        pixels right, but not most classes.
        """
        classes = expected[0].shape[1]
        evidence = self.evidence(found, expected[0].argmax(1), classes)
        confusion = evidence["confusion"].numpy()
        worst, mean = float(self.ease(evidence).min()), mean_iou(confusion)
        same = confusion.sum(0, dtype=np.int64)
        said = (
            f"same class on {np.trace(same) / same.sum():.1%} of the pixels of {len(confusion)} training images, on "
            f"{worst:.1%} in the worst of them, mIoU of these answers {mean:.1%}"
        )
        return Likeness(min(worst, mean), said)

    def chance(self, classes: int) -> float | None:
        """Return the most that answers without a look at the image can have: one class has all pixels, and is right."""
        return 1 / classes

    def remarks(self, evidence: Evidence, targets: torch.Tensor, classes: Sequence[str]) -> list[str]:
        """Return a line if another order of the classes fits, or else if some classes are in no answer."""
        pixels = evidence["confusion"].numpy().sum(0, dtype=np.int64)
        if (said := _misplaced(pixels, classes)) is not None:
            return [said]
        never = np.flatnonzero((pixels.sum(1) > 0) & (pixels.sum(0) == 0)).tolist()
        if not never:
            return []
        shown = int((pixels.sum(1) > 0).sum())
        return [
            f"the network gives no pixel of the evaluation images {len(never)} of their {shown} classes: "
            f"{listed([classes[place] for place in never], 6)}"
        ]


SEGMENTATION = Segmentation()
register(SEGMENTATION)


def _counts(targets: torch.Tensor, classes: int) -> torch.Tensor:
    """Return which pixels count, ``bool`` of the targets' shape."""
    return (targets >= 0) & (targets < classes)


def _shades(places: NDArray[np.integer], classes: int) -> NDArray[np.uint8]:
    """Return the number in the palette of each pixel. More than 255 classes share colours."""
    counts = (places >= 0) & (places < classes)
    return np.where(counts, places % 255, 255).astype(np.uint8)


def _changes(
    target: NDArray[np.integer], before: NDArray[np.integer], now: NDArray[np.integer], classes: int
) -> NDArray[np.uint8]:
    """Return the place of each pixel in `_CHANGES`. Pixels that do not count have not changed."""
    counts = (target >= 0) & (target < classes)
    found = np.where(before == target, 3, np.where(now == target, 2, 1))
    return np.where(counts & (before != now), found, 0).astype(np.uint8)


def _shares(values: NDArray[np.integer], labels: Sequence[str]) -> str:
    """Return the shares of the most frequent values, which are places in ``labels``. Others count as its last."""
    counts = np.bincount(np.clip(values, 0, len(labels) - 1).ravel(), minlength=len(labels))
    order = [place for place in np.argsort(-counts, kind="stable")[:4].tolist() if counts[place]]
    return ", ".join(f"{labels[place]} {counts[place] / values.size:.1%}" for place in order)


def _misplaced(pixels: NDArray[np.int64], classes: Sequence[str]) -> str | None:
    """Return what `misplaced` says of a sample of the pixels, given the counts of all of them."""
    step = max(1, int(pixels.sum()) // _SAMPLED)
    pairs = np.repeat(np.arange(pixels.size), pixels.flatten() // step)
    labels, predicted = np.divmod(np.random.default_rng(0).permutation(pairs), len(classes))
    return misplaced(predicted, labels, classes, "pixel accuracy")


def _mean_of_images(each: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the mean over images of the weighted mean over pixels. ``each`` is weighted already."""
    return (each.flatten(1).sum(1) / weights.flatten(1).sum(1).clamp_min(1e-6)).mean()


def _alike(first: torch.Tensor, second: torch.Tensor) -> NDArray[np.float64]:
    """Return the share of equal pixels of each image."""
    return (first == second).flatten(1).double().mean(1).numpy()
