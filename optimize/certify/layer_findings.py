"""What was found of each layer: how many of its integers are the reference's, and why the others are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

#: Share of a layer's outputs that must be the reference's integers, and how many steps the others may be off.
LEAST_EQUAL: Final = 0.9999
MOST_STEPS: Final = 1

#: Why a layer diverges. ``rounding``: exact arithmetic lies at a tie, and either integer is as near; ``lost clamp``:
#: the engine's integers are those that exact arithmetic gives without a clamp; ``saturation``: with inputs of 7 bits it
#: is right; ``kernel``: none of them explains it, it computes something else.
Why = Literal["rounding", "lost clamp", "saturation", "kernel"]


@dataclass(frozen=True)
class Cause:
    """Why a layer diverges, and the experiment that says so."""

    why: Why
    said: str


@dataclass(frozen=True)
class LayerParity:
    """A layer of an engine, run alone on the integers that the reference gives it.

    Attributes:
        number: its place in the reference program, from 0.
        name: its operators there.
        outputs: how many integers were compared.
        different: how many were not the reference's.
        steps: the largest difference, in integers.
        cause: why it diverges; None where it does not.
    """

    number: int
    name: str
    outputs: int
    different: int
    steps: int
    cause: Cause | None = None

    @property
    def equal(self) -> float:
        """Share of equal integers."""
        return 1 - self.different / self.outputs

    @property
    def holds(self) -> bool:
        """Whether enough integers are equal, and none is too far off."""
        return agrees(self.outputs, self.different, self.steps)


@dataclass(frozen=True)
class Unable:
    """A layer that an engine could not run alone, and why, in a line."""

    number: int
    name: str
    reason: str


@dataclass(frozen=True)
class Engine:
    """All layers of an artifact as one engine computes them.

    Attributes:
        execution: the engine, in the words of its executions.
        layers: those that were compared, in the program's order.
        unable: those that could not be run alone, or not be judged.
        apart: why layers of the program are not among them, in a line; None if all are.
        reason: why nothing was run; None if it was.
    """

    execution: str
    layers: tuple[LayerParity, ...] = ()
    unable: tuple[Unable, ...] = ()
    apart: str | None = None
    reason: str | None = None

    @property
    def first(self) -> LayerParity | None:
        """The first layer that diverges."""
        return next((layer for layer in self.layers if not layer.holds), None)

    @property
    def sound(self) -> bool:
        """Whether no layer computes something else than its integers mean; a tie is either of two."""
        return all(layer.cause is None or layer.cause.why == "rounding" for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads them back to an equal record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Engine:
        """Read what `to_json` wrote."""
        layers = (
            LayerParity(**{**layer, "cause": Cause(**layer["cause"]) if layer["cause"] else None})
            for layer in body["layers"]
        )
        unable = tuple(Unable(**layer) for layer in body["unable"])
        return cls(**{**body, "layers": tuple(layers), "unable": unable})


def agrees(outputs: int, different: int, steps: int) -> bool:
    """Whether a layer's integers are near enough to the reference's."""
    return steps <= MOST_STEPS and different <= round((1 - LEAST_EQUAL) * outputs, 6)
