"""Regression: one or several numbers for each image. The first output is these numbers, ``(N, K)``, in their own units.

Targets are ``float32 (N, K)``. The data's ``classes`` are the names of the numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np

from optimize.explained_error import (
    error_difference,
    error_interval,
    errors_of_images,
    explained_error,
    explained_shares,
    spreads,
)
from optimize.jackknife import JackknifeDifference
from optimize.statistics import PairedDifference
from optimize.tasks.base import ClassScores, Evidence, Likeness, Metric, Task, groups_of, register
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import nn

    from optimize.data.records import ImageData
    from serve.runtime.card.card import Probabilities
    from serve.runtime.outputs import Outputs

#: Two networks give the same number if they differ by at most this share of the targets' spread.
_SAME: Final = 0.1
#: Up to this share of the spread the loss is quadratic, so that it has a gradient of zero without an error.
_QUADRATIC: Final = 0.1


class Regression(Task):
    """See `Task`. This is the evidence of an image.

    - ``answers``: ``float32 (K,)``, the network's numbers
    - ``targets``: ``float32 (K,)``, the right ones.

    Args:
        middle: the median of each number in the training images, ``(K,)``.
        spread: their mean distance from it.
    """

    name: ClassVar[str] = "regression"
    networks_for: ClassVar[str] = "classification"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("d2", "D²", "D² (explained absolute error)"),
        Metric("mae", "MAE", share=False),
        Metric("rmse", "RMSE", share=False),
    )
    agreement: ClassVar[Metric] = Metric("number_agreement", "same numbers")
    counted: ClassVar[str] = "numbers"
    entry: ClassVar[str] = "number"
    named: ClassVar[str] = "numbers"
    of_class: ClassVar[str] = "D²"
    guess: ClassVar[str] = "one answer for all images"
    whole: ClassVar[bool] = True
    endings: ClassVar[Mapping[str, Probabilities]] = {}
    method: ClassVar[str] = (
        "D² is the share of the absolute error that a network explains: one minus its MAE over that of the best "
        "constant, the median of the targets. A point is a hundredth of the constant's MAE. Of several numbers, D², "
        "MAE and RMSE are the means. Differences of D² compare the same images under both models. Their 95 % interval "
        "is Student's with the jackknife's error over images or groups, and is never narrower than what so many images "
        "cannot exclude. An image counts as gained or lost if its error is smaller or larger."
    )

    def __init__(self, middle: NDArray[np.float64] | None = None, spread: NDArray[np.float64] | None = None) -> None:
        self._middle, self._spread = middle, spread

    def of(self, data: ImageData) -> Self:
        """Return this task with the median and the spread of the training targets, for losses in units of the spread.

        Raises:
            UserError: the data have no numbers.
        """
        from optimize.data.targets import Vectors

        if not isinstance(data.train.targets, Vectors):
            raise UserError(f"{data.name}: regression needs a vector of numbers for each image")
        middle, spread = spreads(data.train.targets.values.double().numpy())
        return type(self)(middle, np.where(spread > 0, spread, 1.0))

    def facts(self) -> dict[str, Any]:
        """Return the spread of each number. A difference in an answer is large or small beside it."""
        return {} if self._spread is None else {"spread": [float(f"{value:.6g}") for value in self._spread.tolist()]}

    @contextlib.contextmanager
    def fresh(self, module: nn.Module) -> Iterator[None]:
        """Let the last linear layer give numbers in units of their spread from their median, whatever their unit is.

        So weights of the usual size, and steps of the usual size, suit any unit. Then they are folded into the layer.
        """
        import torch
        from torch import nn

        count = 0 if self._spread is None else len(self._spread)
        heads = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        if not heads or heads[-1].out_features != count or heads[-1].bias is None:
            yield
            return
        head, scaled = heads[-1], _Scaled(torch.tensor(self._middle), torch.tensor(self._spread))
        hook = head.register_forward_hook(scaled)
        try:
            yield
        finally:
            hook.remove()
        with torch.no_grad():
            head.bias.copy_(scaled(head, (), head.bias))
            head.weight.mul_(scaled.unit.to(head.weight)[:, None])

    def fault_of(self, output: object, inputs: torch.Tensor, classes: int) -> str | None:
        """See `Task`."""
        if tuple(getattr(output, "shape", ())) == (len(inputs), classes):
            return None
        return f"it must give numbers of shape ({len(inputs)}, {classes})"

    def loss(
        self, output: torch.Tensor, targets: torch.Tensor, probabilities: Probabilities, smoothing: float = 0.0
    ) -> torch.Tensor:
        """Return the mean absolute error in units of the spread, which is quadratic for small errors.

        Raises:
            UserError: there is smoothing, which numbers cannot have.
        """
        from torch.nn import functional

        if smoothing:
            raise UserError(f"label_smoothing is {smoothing:g}, and regression has no labels: leave it at 0")
        unit = output.new_tensor(1.0 if self._spread is None else self._spread.tolist())
        return functional.smooth_l1_loss(output / unit, targets.to(output) / unit, beta=_QUADRATIC)

    def soft_loss(
        self, student: torch.Tensor, teacher: torch.Tensor, temperature: float, probabilities: Probabilities = "softmax"
    ) -> torch.Tensor:
        """Return the loss against the teacher's numbers. Numbers have no temperature."""
        return self.loss(student, teacher, probabilities)

    def shares(self, targets: torch.Tensor, classes: int) -> torch.Tensor:
        """Return the numbers themselves: those of mixed images are mixed alike."""
        return targets

    def evidence(self, outputs: Outputs, targets: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
        """See `Task`."""
        return {"answers": outputs[0].float(), "targets": targets.float()}

    def scores(self, evidence: Evidence) -> dict[str, float]:
        """Return D², the mean absolute error, and the root of the mean squared error: means over the numbers."""
        answers, targets = _both(evidence)
        errors = answers - targets
        return {
            "d2": self.score(evidence),
            "mae": float(np.abs(errors).mean()),
            "rmse": float(np.sqrt((errors**2).mean(0)).mean()),
        }

    def score(self, evidence: Evidence, weights: NDArray[np.float64] | None = None) -> float:
        """Return D²; see `optimize.explained_error`."""
        return explained_error(*_both(evidence), weights)

    def by_class(self, evidence: Evidence, classes: int) -> ClassScores:
        """Return D² of each number. All images have it."""
        images = np.full(classes, len(evidence["targets"]), np.int64)
        return ClassScores(explained_shares(*_both(evidence)), images, images)

    def class_differences(
        self, reference: Evidence, other: Evidence, classes: int
    ) -> Sequence[PairedDifference | None]:
        """See `Task` and `optimize.explained_error.error_difference`."""
        (first, targets), (second, _), groups = _both(reference), _both(other), groups_of(reference)
        parts = (slice(place, place + 1) for place in range(classes))
        return [error_difference(first[:, one], second[:, one], targets[:, one], groups) for one in parts]

    def difference(self, reference: Evidence, other: Evidence) -> JackknifeDifference:
        """See `Task` and `optimize.explained_error.error_difference`."""
        first, targets = _both(reference)
        return error_difference(first, _both(other)[0], targets, groups_of(reference))

    def interval(self, evidence: Evidence) -> tuple[float, float]:
        """See `Task` and `optimize.explained_error.error_interval`."""
        return error_interval(*_both(evidence), groups_of(evidence))

    def ease(self, evidence: Evidence) -> NDArray[np.generic]:
        """Return minus the error of each image."""
        return -errors_of_images(*_both(evidence))

    def agreements(self, reference: Evidence, other: Evidence) -> dict[str, float]:
        """Return the share of the numbers that differ by at most a tenth of the targets' spread."""
        first, targets = _both(reference)
        same = np.abs(first - _both(other)[0]) <= _SAME * spreads(targets)[1]
        return {"number_agreement": float(same.mean())}

    def likeness(self, expected: Outputs, found: Outputs) -> Likeness:
        """Return D² of the answers against the expected ones."""
        own, wanted = (outputs[0].double().numpy() for outputs in (found, expected))
        share = explained_error(own, wanted)
        return Likeness(share, f"D² of these answers {share:.1%} on {len(own)} training images")

    def chance(self, classes: int) -> float | None:
        """Return what the best constant has."""
        return 0.0


REGRESSION = Regression()
register(REGRESSION)


@dataclass(frozen=True)
class _Scaled:
    """A hook of a layer that gives numbers ``(…, K)``: they are in this unit, from the middle."""

    middle: torch.Tensor
    unit: torch.Tensor

    def __call__(self, layer: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * self.unit.to(output) + self.middle.to(output)


def _both(evidence: Evidence) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return answers and targets."""
    return evidence["answers"].double().numpy(), evidence["targets"].double().numpy()
