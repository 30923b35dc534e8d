"""The records of profiles as they are stored and shown. Nothing is measured or formatted here.

Times are milliseconds of a batch, sizes bytes, rates per second.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Final

from optimize.measure.figures import Record
from optimize.measure.rows import RunBy
from optimize.report.number_format import number

#: Version of a profile's JSON.
SCHEMA: Final = 1


class Layer(Record):
    """A unit that an engine executes: a layer, often with the activation or the sum after it.

    ``ms`` is the median of the calls. ``macs`` and bytes are None if they are unknown. ``precision`` is that of its
    arithmetic, ``kind`` the engine's word for its operation. ``start_ms`` is when it began in the last call (None if
    the engine does not report it). ``after`` names the layers that produce its inputs.
    """

    name: str
    kind: str
    precision: str | None
    ms: float
    macs: int | None = None
    weights: int | None = None
    read: int | None = None
    written: int | None = None
    start_ms: float | None = None
    after: tuple[str, ...] = ()

    @property
    def bytes(self) -> int | None:
        """Return all bytes that it reads and writes at least once."""
        parts = [part for part in (self.weights, self.read, self.written) if part is not None]
        return sum(parts) if parts else None


class Peak(Record):
    """The machine's best rate in the same process, with the execution's threads.

    ``macs_per_s`` is None if it was not measured. ``how`` says how it was measured, or why not.
    """

    precision: str
    macs_per_s: float | None
    how: str


class Profile(Record):
    """An artifact's layers in one execution.

    ``call_ms`` is the median of whole calls without measurement inside. The layers' times come from ``calls`` other
    calls, with the engine's own measurement on. ``left_macs`` are MACs of the network that belong to no layer.
    """

    runs_on: str
    execution: RunBy
    provider: str
    calls: int
    call_ms: float
    layers: tuple[Layer, ...]
    left_macs: int
    peaks: tuple[Peak, ...]
    copy_bytes_per_s: float
    note: str = ""

    @property
    def layers_ms(self) -> float:
        """Return the time of all layers together."""
        return sum(layer.ms for layer in self.layers)

    @property
    def macs(self) -> int:
        """Return the known MACs of all layers."""
        return sum(layer.macs or 0 for layer in self.layers) + self.left_macs

    def of_peak(self, layer: Layer) -> float | None:
        """Return a layer's rate of MACs as a share of the machine's peak in its precision."""
        peaks = {peak.precision: peak.macs_per_s for peak in self.peaks}
        peak = peaks.get(layer.precision or "")
        if not layer.macs or not peak or layer.ms <= 0:
            return None
        return layer.macs / (layer.ms / 1e3) / peak

    def of_copy(self, layer: Layer) -> float | None:
        """Return a layer's rate of bytes as a share of the rate of copying memory. Caches may give more than 1."""
        if not layer.bytes or layer.ms <= 0:
            return None
        return layer.bytes / (layer.ms / 1e3) / self.copy_bytes_per_s


class Profiled(Record):
    """Profiles of one artifact, for every execution that reports layers, and the reasons for the others.

    ``content`` is the artifact's, as in `optimize.store.keys.content`.
    """

    schema_version: int = SCHEMA
    title: str
    artifact: str
    content: str = ""
    precision: str
    batch: int
    profiles: tuple[Profile, ...]
    unable: Mapping[str, str] = {}
    cpu: str
    versions: Mapping[str, str] = {}
    taken: datetime.datetime

    def _facts(self) -> dict[str, str]:
        times = {one.runs_on: f"{len(one.layers)} layers, {number(one.call_ms, 'ms')}" for one in self.profiles}
        return {"title": self.title, "artifact": self.artifact, "batch": str(self.batch)} | times

    def _more(self) -> dict[str, str]:
        slowest = {
            f"slowest of {one.runs_on}": ", ".join(
                f"{layer.name} {number(layer.ms, 'ms')}"
                for layer in sorted(one.layers, key=lambda layer: -layer.ms)[:3]
            )
            for one in self.profiles
        }
        return slowest | dict(self.unable)
