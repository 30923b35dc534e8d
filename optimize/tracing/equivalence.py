"""The check that a changed network still gives the logits of the network that it was made from."""

from __future__ import annotations

import torch

from optimize.errors import PassError


def require_alike(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float, who: str, of: str = "the parent's"
) -> float:
    """Return how far logits differ, and refuse them above a tolerance.

    Args:
        actual: float32 logits ``(N, classes)`` of the changed network.
        expected: logits of the original network for the same images.
        tolerance: largest allowed difference, relative to the largest expected logit.
        who: the compared network, for the message.
        of: the owner of the expected logits, for the message.

    Returns:
        The largest difference, relative to the largest expected logit.

    Raises:
        PassError: they differ by more than the tolerance, or a logit is NaN.
    """
    difference = ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()
    if not difference <= tolerance:  # also where it is NaN
        raise PassError(
            f"{who}: logits differ from {of} by {difference:.2e} of the largest, more than the tolerance {tolerance:g}"
        )
    return difference
