"""Whether a changed network still answers as the one that it was made of."""

from __future__ import annotations

import torch

from optimize.errors import PassError


def require_alike(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float, who: str, of: str = "the parent's"
) -> float:
    """Refuse logits that differ.

    Args:
        actual: float32 logits ``(N, classes)`` of the changed network.
        expected: those of the other one, for the same images.
        tolerance: largest allowed difference, relative to the largest of them.
        who: what is compared, for the message.
        of: whose logits the expected ones are, for the message.

    Returns:
        The largest difference, relative to the largest expected logit.

    Raises:
        PassError: they differ by more, or one is not a number.
    """
    difference = ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
    if not difference <= tolerance:  # also where it is NaN
        raise PassError(
            f"{who}: logits differ from {of} by {difference:.2e} of the largest, more than the tolerance {tolerance:g}"
        )
    return difference
