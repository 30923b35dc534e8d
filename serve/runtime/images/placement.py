"""Where a picture lies on the network's input, and the way back for points, boxes and class maps.

Coordinates are continuous. Pixel ``i`` reaches from ``i`` to ``i + 1``, and its centre is ``i + 0.5``. So a resize only
multiplies, and a crop only subtracts. Maps and masks are placed by nearest neighbour: each pixel takes the value at its
centre.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from ..card.card import Preprocessing

#: Height and width in pixels.
Size = tuple[int, int]


def centre_offset(scaled: int, network: int) -> int:
    """Return the first row (or column) of a scaled picture that a crop from its centre keeps.

    Negative if the picture is smaller: the crop begins with as many rows outside it. The rounding is torchvision's, in
    ``center_crop`` (0.19 to 0.29): half to even where it cuts, down where it pads.
    """
    return round((scaled - network) / 2) if scaled >= network else -((network - scaled) // 2)


@dataclass(frozen=True)
class Placement:
    """How one picture lies on the network's input.

    Attributes:
        picture: the picture's own size, after its EXIF orientation.
        scaled: its size after the resize.
        network: the size of the network's input, cut from the centre.
    """

    picture: Size
    scaled: Size
    network: Size

    @classmethod
    def of(cls, height: int, width: int, preprocessing: Preprocessing) -> Placement:
        """Return how an upright picture of this size is placed."""
        return cls((height, width), preprocessing.scaled(height, width), preprocessing.crop)

    @property
    def first(self) -> Size:
        """Row and column of the scaled picture at the network's first pixel. Negative where bars surround it."""
        (height, width), (rows, columns) = self.scaled, self.network
        return centre_offset(height, rows), centre_offset(width, columns)

    @property
    def inside(self) -> tuple[slice, slice]:
        """Rows and columns of the network's input that show the picture. The others are bars."""
        rows, columns = (
            slice(max(0, -first), min(network, scaled - first))
            for first, network, scaled in zip(self.first, self.network, self.scaled, strict=True)
        )
        return rows, columns

    @property
    def seen(self) -> tuple[float, float, float, float]:
        """The part of the picture that the network sees: left, top, right and bottom, in the picture's pixels."""
        rows, columns = self.inside
        corners = torch.tensor([columns.start, rows.start, columns.stop, rows.stop], dtype=torch.float64)
        left, top, right, bottom = self.to_picture(corners).tolist()
        return left, top, right, bottom

    def to_network(self, points: torch.Tensor) -> torch.Tensor:
        """Convert the picture's points to the network's, floats ``(…, 2n)`` of x and y in turn: points or boxes.

        Points may lie outside the network's input.
        """
        scale, first = self._scale_and_first(points)
        return (_pairs(points) * scale - first).flatten(-2)

    def to_picture(self, points: torch.Tensor) -> torch.Tensor:
        """Convert the network's points to the picture's; the inverse of `to_network`.

        Points on bars lie outside the picture.
        """
        scale, first = self._scale_and_first(points)
        return ((_pairs(points) + first) / scale).flatten(-2)

    @property
    def taken(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The network's row at the centre of each row of the picture, and the same of columns, ``int64``, ascending.

        The crop cuts off what is below 0, or not below the network's size.
        """
        rows, columns = (
            _nearest(0, own, scaled, own) - first
            for own, scaled, first in zip(self.picture, self.scaled, self.first, strict=True)
        )
        return rows, columns

    def map_to_picture(self, classes: torch.Tensor, unseen: int, rows: slice = slice(None)) -> torch.Tensor:
        """Scale a class map ``(…, h, w)`` of the network's size to the picture's own size, or to some rows of it.

        Pixels whose centre the crop cuts off get ``unseen``. Bars are dropped.
        """
        _check_size(classes, self.network)
        taken, columns = self.taken
        return _picked(classes, taken[rows], columns, unseen)

    def mask_to_network(self, mask: torch.Tensor, ignore: int) -> torch.Tensor:
        """Place a mask ``(…, H, W)`` of the picture's size on the network's input. Bars get ``ignore``."""
        _check_size(mask, self.picture)
        rows, columns = (
            _nearest(first, first + kept, own, scaled)
            for own, scaled, first, kept in zip(self.picture, self.scaled, self.first, self.network, strict=True)
        )
        return _picked(mask, rows, columns, ignore)

    def _scale_and_first(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the resize's factors and the crop's offset, for x and y, as the points' type."""
        (height, width), (rows, columns), (top, left) = self.picture, self.scaled, self.first
        return points.new_tensor([columns / width, rows / height]), points.new_tensor([left, top])


class PlacedImage(NamedTuple):
    """A picture on the network's input: ``uint8`` pixels of its shape, on the host or a device, and its placement."""

    pixels: torch.Tensor
    placement: Placement


def _pairs(points: torch.Tensor) -> torch.Tensor:
    return points.reshape(*points.shape[:-1], points.shape[-1] // 2, 2)


def _nearest(start: int, stop: int, source: int, scaled: int) -> torch.Tensor:
    """Return the pixel of ``source`` at the centre of each pixel from ``start`` to ``stop`` of ``scaled``."""
    # The product is exact up to 2**53, and then the quotient is never rounded to the next integer.
    return torch.arange(start, stop, dtype=torch.float64).add_(0.5).mul_(source).div_(scaled).floor_().long()


def _check_size(values: torch.Tensor, size: Size) -> None:
    if tuple(values.shape[-2:]) != size:
        raise ValueError(f"a map of {size[0]}x{size[1]} is needed (height x width), this is {tuple(values.shape)}")


def _picked(values: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, outside: int) -> torch.Tensor:
    """Return ``values`` at ascending rows and columns, with ``outside`` where there are none."""
    margins: list[int] = []
    for axis, wanted in ((-1, columns), (-2, rows)):
        before, until = (int((wanted < bound).sum()) for bound in (0, values.shape[axis]))
        values = values.index_select(axis, wanted[before:until].to(values.device))
        margins += [before, len(wanted) - until]
    return pad(values, margins, value=outside) if any(margins) else values
