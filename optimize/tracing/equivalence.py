"""The check that a changed network still gives the outputs of the network that it was made from."""

from __future__ import annotations

import torch

from optimize.errors import PassError
from serve.runtime.outputs import Answer, as_outputs


def require_alike(actual: Answer, expected: Answer, tolerance: float, who: str, of: str = "the parent's") -> float:
    """Return how far the outputs differ, and refuse them above a tolerance.

    Args:
        actual: float32 outputs of the changed network.
        expected: outputs of the original network for the same images.
        tolerance: largest allowed difference, relative to the largest number of the expected output.
        who: the compared network, for the message.
        of: the owner of the expected outputs, for the message.

    Returns:
        The largest difference of any output, relative to its largest expected number.

    Raises:
        PassError: an output differs by more than the tolerance, or is NaN.
    """
    found, wanted = as_outputs(actual), as_outputs(expected)
    differences = [_difference(*pair) for pair in zip(found, wanted, strict=True)]
    for number, difference in enumerate(differences):
        if not difference <= tolerance:  # also where it is NaN
            raise PassError(
                f"{who}: {output_values(number)} differ from {of} by {difference:.2e} of the largest, more than the "
                f"tolerance {tolerance:g}"
            )
    return max(differences)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def output_values(number: int) -> str:
    """Return the name of an output's values in messages, by the output's place."""
    return "logits" if number == 0 else f"numbers of output {number + 1}"
