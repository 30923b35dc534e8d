"""What was found of an artifact's layers, as it is stored and shown. Records only: nothing is measured or worded here.

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
    """What an engine executes as one: a layer, often with the activation or the sum behind it.

    ``ms`` is the median of the calls; ``macs`` and bytes are None where they are not known. ``precision`` is that of
    its arithmetic, ``kind`` the engine's word for what it does. ``start_ms`` is when it began in the last call (None
    where the engine does not say), ``after`` what gave it what it is given.
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
        """All that it reads and writes at least once."""
        parts = [part for part in (self.weights, self.read, self.written) if part is not None]
        return sum(parts) if parts else None


class Peak(Record):
    """The most that this machine was seen to do in the same process, by the execution's threads.

    ``macs_per_s`` is None where it was not measured; ``how`` says by what, or why not.
    """

    precision: str
    macs_per_s: float | None
    how: str


class Profile(Record):
    """An artifact's layers as one execution runs them.

    ``call_ms`` is the median of whole calls that nothing looks into; the layers' times are of ``calls`` others, with
    the engine's own measurement on. ``left_macs`` are those of the network that could be given to no layer.
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
        """All layers together."""
        return sum(layer.ms for layer in self.layers)

    @property
    def macs(self) -> int:
        """All that layers are known to do."""
        return sum(layer.macs or 0 for layer in self.layers) + self.left_macs

    def of_peak(self, layer: Layer) -> float | None:
        """A layer's MACs in its time, as a share of the most that the machine does in its precision."""
        peaks = {peak.precision: peak.macs_per_s for peak in self.peaks}
        peak = peaks.get(layer.precision or "")
        if not layer.macs or not peak or layer.ms <= 0:
            return None
        return layer.macs / (layer.ms / 1e3) / peak

    def of_copy(self, layer: Layer) -> float | None:
        """A layer's bytes in its time, as a share of what copying memory moves; caches may give more than 1."""
        if not layer.bytes or layer.ms <= 0:
            return None
        return layer.bytes / (layer.ms / 1e3) / self.copy_bytes_per_s


class Profiled(Record):
    """Profiles of one artifact, by every execution that tells, and why others do not.

    ``content`` is the artifact's, as `optimize.store.keys.content` has it.
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
