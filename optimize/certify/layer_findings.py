"""The results of each layer: how many of its integers equal the reference's, and why the others do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

#: Share of a layer's outputs that must equal the reference's integers, and how many steps the others may be off.
LEAST_EQUAL: Final = 0.9999
MOST_STEPS: Final = 1

#: Why a layer diverges. ``rounding``: exact arithmetic is at a tie, and both integers are equally near. ``lost clamp``:
#: the engine's integers are those of exact arithmetic without a clamp. ``saturation``: with 7-bit inputs the layer is
#: right. ``kernel``: none of these explains it, and the engine computes something else.
Why = Literal["rounding", "lost clamp", "saturation", "kernel"]


@dataclass(frozen=True)
class Cause:
    """Why a layer diverges, and the experiment that shows it."""

    why: Why
    said: str


@dataclass(frozen=True)
class LayerParity:
    """A layer of an engine, run alone on the integers that the reference gives it.

    Attributes:
        number: its position in the reference program, from 0.
        name: its operators there.
        outputs: number of integers compared.
        different: number of integers that differ from the reference's.
        steps: the largest difference, in integers.
        cause: why it diverges. None: it does not.
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
    """A layer that an engine could not run alone, with the reason in one line."""

    number: int
    name: str
    reason: str


@dataclass(frozen=True)
class Engine:
    """All layers of an artifact as one engine computes them.

    Attributes:
        execution: the id of the engine's execution.
        layers: the compared layers, in the program's order.
        unable: the layers that could not be run alone, or not be judged.
        apart: why some layers of the program are missing, in one line. None: none are.
        reason: why nothing was run. None: it was.
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
        """Whether every layer computes what its integers mean. At a tie either integer is right."""
        return all(layer.cause is None or layer.cause.why == "rounding" for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` reads them back to an equal record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Engine:
        """Read the values that `to_json` wrote."""
        layers = (
            LayerParity(**{**layer, "cause": Cause(**layer["cause"]) if layer["cause"] else None})
            for layer in body["layers"]
        )
        unable = tuple(Unable(**layer) for layer in body["unable"])
        return cls(**{**body, "layers": tuple(layers), "unable": unable})


def agrees(outputs: int, different: int, steps: int) -> bool:
    """Tell whether a layer's integers are near enough to the reference's."""
    return steps <= MOST_STEPS and different <= round((1 - LEAST_EQUAL) * outputs, 6)
