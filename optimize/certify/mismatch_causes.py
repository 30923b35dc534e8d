"""Finds why a layer's integers differ from the reference's. An experiment decides each cause.

Exact arithmetic is the judge: in float64, products and sums of bytes have no rounding error. So the result before its
last rounding is known. Then the layer runs again on other integers, or exact arithmetic runs again without a clamp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from optimize.certify.layer_findings import Cause
from optimize.certify.reference_program import Batch, Layer, ReferenceLayers

#: Steps by which float32, and biases that an engine rounds to integers, may move a value.
NEAR: Final = 1 / 64

#: Largest share of the wrong integers that may remain if an experiment explains them.
_LEFT: Final = 0.01

#: With inputs of 7 bits, two products never overflow 16 bits.
_SEVEN_BITS: Final = 127

#: Runs one layer alone: from a batch to its integers.
Run = Callable[[Batch], torch.Tensor]


def cause_of(
    reference: ReferenceLayers, layer: Layer, run: Run, batch: Batch, found: torch.Tensor, *, astray: Sequence[str]
) -> Cause:
    """Find out why an engine's integers for a layer differ from the reference's.

    Args:
        reference: the program.
        layer: the layer that diverges.
        run: runs the layer in the engine.
        batch: as the reference received it.
        found: the engine's result for it.
        astray: names of earlier layers without a step of their own in the engine, which gave it other integers.
    """
    exact = reference.exact(layer, batch)
    expected = batch.integers[layer.number]
    off = found != expected
    wrong = _wrong(found, exact)
    if not wrong[off].any():
        whole = reference.exact(layer, batch, whole_biases=True)
        biases = "" if torch.equal(whole, exact) else _of_biases(off, found, whole)
        return Cause("rounding", f"{_of_ties(expected, found, exact)}{biases}")
    count = int(wrong.sum())
    share = f"{count:,} of {wrong.numel():,} integers are not those of exact arithmetic"
    if astray:
        return Cause(
            "kernel",
            f"{share}; its inputs already differ; they come from layers without a separate step: {', '.join(astray)}",
        )
    for clamp, options in _clamps(layer):
        if _explained(count, found, reference.exact(layer, batch, **options)):
            return Cause("lost clamp", f"{share}; the engine computes the integers of exact arithmetic without {clamp}")
    if any(int(batch.integers[number].max()) > _SEVEN_BITS for number in layer.before):
        halved = _halved(batch, layer)
        if _explained(count, run(halved), reference.exact(layer, halved)):
            return Cause("saturation", f"{share}; on the same inputs halved, which have 7 bits, the layer is right")
        share += ", nor are they where the inputs are halved to 7 bits"
    return Cause("kernel", f"{share}, and no lost clamp explains them: its arithmetic is wrong")


def _wrong(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Tell for each integer whether it is not nearest to the exact value. At a tie, both neighbours are nearest."""
    return (found.double() - exact).abs() > 0.5 + NEAR


def _explained(count: int, found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Tell whether an experiment leaves almost none of the wrong integers."""
    return int(_wrong(found, exact).sum()) <= _LEFT * count


def _of_ties(expected: torch.Tensor, found: torch.Tensor, exact: torch.Tensor) -> str:
    off = found != expected
    steps = int((expected.double() - found.double()).abs().max())
    distance = (exact - exact.floor() - 0.5).abs()[off].max().item()
    where = f"{distance:.2g} of a step or less from a tie" if distance else "at a tie"
    return (
        f"all {int(off.sum()):,} that differ, by {steps} at most, are as near to what exact arithmetic gives, which "
        f"lies {where}"
    )


def _of_biases(off: torch.Tensor, found: torch.Tensor, whole: torch.Tensor) -> str:
    """Return a sentence if the differing integers are those of exact arithmetic with integer biases, else ''."""
    left = int((whole.round()[off] != found.double()[off]).sum())
    if left > 0.1 * int(off.sum()):
        return ""
    return "; it gives these where biases are rounded to integers of the products' scale"


def _clamps(layer: Layer) -> Iterator[tuple[str, dict[str, bool]]]:
    """Yield each clamp that may be lost, as text, and the options with which exact arithmetic omits it."""
    quantizer = layer.quantizer
    if (quantizer.low, quantizer.high) != quantizer.whole_range:
        yield f"its quantizer's range of {quantizer.low} to {quantizer.high}", {"range_": False}
    yield "its activation", {"activations": False}
    yield "its activation and its quantizer's range", {"activations": False, "range_": False}


def _halved(batch: Batch, layer: Layer) -> Batch:
    """Return a batch whose integers, for one layer, stay within 7 bits."""
    given = {number: batch.integers[number] for number in layer.before}
    halved = {number: each.div(2, rounding_mode="floor").to(each.dtype) for number, each in given.items()}
    return dataclasses.replace(batch, integers={**batch.integers, **halved})
