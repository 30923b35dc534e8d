"""The phases of `benchmarks.soak`: capacity, mixed load with faults, the same while memory is watched, overload."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import psutil

from benchmarks.soak_faults import Badly
from serve.load.generator_process import finished, measure, started
from serve.load.plan import Plan, Result, pooled
from serve.load.workload import Workload
from serve.tune.servers import Live, ServerKind

#: Of the mixed load's capacity, the part that is sent while faults are mixed in.
SHARE = 0.6
_CHUNK_S = 10.0
#: How long the machine's own pace is measured after each chunk, and the share of its usual pace below which it is
#: another machine for that while: what it was offered is then no share of what it could do.
_PACE_S = 0.5
_SLOW = 0.8
#: Fewer samples of memory than these say nothing.
_SAMPLES = 3
#: Java collects its heap once in so many chunks, between two of them, so that what is alive in it can be told.
_HEAP_CHUNKS = 3
_JAVA = "java"
_WORKER = "model_service_worker"
#: Load goes on for so long when a worker is killed.
KILLED_S = 30.0
_RECOVERY_S = 90.0
#: What the server is offered in the overload, as multiples of its capacity.
FACTORS = (1.0, 2.0, 4.0)
#: Rounds differ by a twelfth of the rate on a machine that others use too: a verdict of tenths needs several.
_ROUNDS = 8
#: Memory that grows by more in a minute, and by more than a twentieth in all, is a leak.
LEAK_MB_A_MINUTE = 1.0


#: Megabytes over time: seconds and MB of each sample.
Samples = list[tuple[float, float]]


@dataclass(frozen=True)
class Kill:
    """A worker that was killed under load: how long until the server answered again, and what became of the requests.

    Attributes:
        recovery_s: from the kill to the first known answer to a request that was sent after it; infinite: none came.
        counts: the load's requests by verdict.
    """

    recovery_s: float
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Rejected:
    """Requests of a chunk of the mixed load that were told to try again.

    Attributes:
        phase: in which phase.
        at_s: seconds from that phase's beginning to the chunk's.
        count: how many.
        after_kill_s: seconds from the last kill of a worker in this phase to the chunk's beginning; None: none before.
        late_ms: the longest that the generator was kept from sending in it: what was due meanwhile came at once.
        pace: images a second that this machine did in process right after it; None: not measured.
    """

    phase: str
    at_s: float
    count: int
    after_kill_s: float | None
    late_ms: float = 0.0
    pace: float | None = None

    @property
    def line(self) -> str:
        """It, as the page says it."""
        pace = "" if self.pace is None else f" Right after it the machine did {self.pace:.0f} images/s in process."
        after = "" if self.after_kill_s is None else f", {self.after_kill_s:.0f} s after a worker was killed"
        return (
            f"{self.count} told to try again in the {_CHUNK_S:.0f} s from second {self.at_s:.0f} of {self.phase}{after}"
            f". The generator was late by {self.late_ms:.0f} ms at most.{pace}"
        )


@dataclass
class Soaked:
    """What one server did under all of it."""

    kind: ServerKind
    capacity: float = 0.0
    mixed_capacity: float = 0.0
    mixed: Result | None = None
    kills: list[Kill] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)  # images a second in process, after each chunk
    bad_clients: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad_client_faults: list[str] = field(default_factory=list)
    memory: dict[str, Samples] = field(default_factory=dict)  # resident, of each program
    live_heap: Samples = field(default_factory=list)  # of Java, after a full collection; empty: nobody could ask it
    overload: dict[float, Result] = field(default_factory=dict)
    afterwards: Result | None = None

    def share(self, over: Result) -> float:
        """What was answered under overload, as a share of capacity."""
        return over.throughput / self.capacity if self.capacity else 0.0

    @property
    def usual_pace(self) -> float:
        """Images a second that the machine did in process, the median over the chunks; 0: not measured."""
        return statistics.median(self.paces) if self.paces else 0.0

    @property
    def sheds(self) -> bool | None:
        """Whether requests were told to try again below capacity; None: only where the machine was slower than usual.

        Of a machine that is slower for a while, what it is offered is a larger share.
        """
        usual = [entry for entry in self.rejected if entry.pace is None or entry.pace >= _SLOW * self.usual_pace]
        counted = 0 if self.mixed is None else self.mixed.counts.get("rejected", 0)
        if sum(entry.count for entry in self.rejected) < counted:
            return True
        return True if usual else None if self.rejected else False

    @property
    def watched(self) -> dict[str, Samples]:
        """What must not grow, of each program: of Java what is alive in its heap, which it fills before it collects.

        What Java holds without a heap's bytes, its buffers, has a limit of its own, at which requests are refused.
        """
        return self.memory | ({_JAVA: self.live_heap} if self.heap_told else {})

    @property
    def heap_told(self) -> bool:
        """Whether Java's heap was looked at often enough to say what stays alive in it."""
        return len(self.live_heap) >= _SAMPLES

    @property
    def growth(self) -> float:
        """MB a minute of all programs together."""
        return sum(slope(samples) for samples in self.watched.values())

    @property
    def leaks(self) -> bool | None:
        """Whether memory grows for as long as it is watched; None: that cannot be told.

        What grows by more than `LEAK_MB_A_MINUTE` may fill up and stop. It is a leak where that made a twentieth. A
        Java process whose heap nobody looked into (see `live_heap`) grows until it first collects.
        """
        if any(len(samples) < _SAMPLES for samples in self.watched.values()) or self.growth <= LEAK_MB_A_MINUTE:
            return False
        if self.only_java_grew:
            return None
        minutes = max(samples[-1][0] - samples[0][0] for samples in self.watched.values()) / 60
        return True if minutes > self.telling_minutes else None

    @property
    def only_java_grew(self) -> bool:
        """Whether what grew is a Java process of which nobody could tell what is alive."""
        if self.heap_told or _JAVA not in self.memory:
            return False
        return self.growth - slope(self.memory[_JAVA]) <= LEAK_MB_A_MINUTE

    @property
    def telling_minutes(self) -> float:
        """How long memory would have to grow as it did for a leak."""
        usual = sum(statistics.median(megabytes for _, megabytes in samples) for samples in self.watched.values())
        return usual / 20 / self.growth


def live_heap(pid: int) -> float | None:
    """MB that are alive in a Java process's heap, which collects all of it for that; None: there is no JDK to ask.

    It must be Java: `jcmd` knocks with SIGQUIT, which ends any other process.
    """
    jcmd = shutil.which("jcmd")
    if jcmd is None:
        return None
    # Without `-all` the histogram is of what a full collection leaves.
    asked = subprocess.run([jcmd, str(pid), "GC.class_histogram"], capture_output=True, text=True, check=False)
    total = re.search(r"^Total\s+\d+\s+(\d+)", asked.stdout, re.MULTILINE)
    return int(total[1]) / 1e6 if total else None


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """MB a minute: the median of the slopes between all pairs of samples of seconds and MB (Theil and Sen)."""
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(samples, 2) if t > s]
    return statistics.median(slopes) * 60 if slopes else 0.0


@dataclass(frozen=True)
class Course:
    """How long the phases are, in seconds; how often a worker is killed; and what there is after the overload.

    Attributes:
        capacity_s: of either capacity, in all its rounds together.
        overload_s: of each overload, likewise.
        rest_s: without load.
        afterwards_s: of a load that two clients make.
    """

    capacity_s: float
    faults_s: float
    steady_s: float
    overload_s: float
    kill_every_s: float
    rest_s: float = 2.0
    afterwards_s: float = 3.0


def course(minutes: float) -> Course:
    """The phases of a campaign of so many minutes."""
    whole = minutes * 60
    overload = min(80.0, whole * 0.08)
    capacity = min(48.0, whole * 0.04)
    rest = whole - 3 * overload - 2 * capacity
    return Course(capacity, rest * 0.4, rest * 0.6, overload, max(20.0, rest * 0.4 / 5))


class Phases:
    """One server's campaign.

    Args:
        kind: which server.
        live: it.
        photos: the workload of good single images.
        mixed: that with everything else among them.
        scratch: where workloads are kept for the generator.
        pace: asked after each chunk of the mixed load for so many seconds: how many images this machine does in one, in
            process, without the server.
        say: told where it is.
    """

    def __init__(
        self,
        kind: ServerKind,
        live: Live,
        photos: Workload,
        mixed: Workload,
        *,
        scratch: Path,
        pace: Callable[[float], float],
        say: Callable[[str], None] = lambda line: print(f"  {line}", flush=True),
    ) -> None:
        self._live, self._say, self._pace = live, say, pace
        self._photos = photos.save(scratch / "photos")
        self._mixed = mixed.save(scratch / "mixed")
        self._badly = Badly(live.target, photos)
        self.found = Soaked(kind)

    def run(self, times: Course) -> Soaked:
        """All phases, in order."""
        found = self.found
        self._measure(self._mixed, None, min(5.0, times.capacity_s))  # what is first used is loaded now
        found.mixed_capacity = self._measure(self._mixed, None, times.capacity_s).throughput
        self._say(f"mixed load: {found.mixed_capacity:.0f} requests/s at saturation")
        badly = self._badly
        with badly.running():
            quiet = self._mix("faults and kills", times.faults_s, times.kill_every_s)
            quiet += self._mix("faults, memory watched", times.steady_s, None)
        found.mixed = pooled(quiet)
        found.bad_clients, found.bad_client_faults = badly.outcomes, badly.faults
        self._overload(times)
        time.sleep(times.rest_s)
        found.afterwards = self._measure(self._photos, None, times.afterwards_s, clients=2)
        return found

    def _overload(self, times: Course) -> None:
        """Photographs at saturation and at multiples of it, in turns: the machine is not as fast all the time."""
        at_capacity: list[Result] = []
        over: dict[float, list[Result]] = {factor: [] for factor in FACTORS}
        for number in range(1, _ROUNDS + 1):
            at_capacity.append(self._measure(self._photos, None, times.capacity_s / _ROUNDS))
            for factor, results in over.items():
                rate = at_capacity[-1].throughput * factor
                results.append(self._measure(self._photos, rate, times.overload_s / _ROUNDS))
            told = ", ".join(f"{factor:g}×: {results[-1].throughput:.0f}" for factor, results in over.items())
            self._say(
                f"overload, round {number} of {_ROUNDS}: {at_capacity[-1].throughput:.0f} answered a second; {told}"
            )
        self.found.capacity = pooled(at_capacity).throughput
        self.found.overload = {factor: pooled(results) for factor, results in over.items()}

    def _measure(self, workload: Path, rate: float | None, seconds: float, clients: int = 16) -> Result:
        # What the first second finds empty, the queue or the caches, is no part of a rate.
        most = clients if rate is None else 1024
        return measure(Plan(self._live.target, most, rate, seconds, warm_s=1.0), workload)

    def _mix(self, name: str, seconds: float, kill_every_s: float | None) -> list[Result]:
        """Chunks of mixed load; those in which a worker was killed are told apart."""
        quiet: list[Result] = []
        began = last_kill = time.monotonic()
        rate = self.found.mixed_capacity * SHARE
        number = 0
        while (spent := time.monotonic() - began) < seconds:
            number += 1
            plan = Plan(self._live.target, 512, rate, min(_CHUNK_S, seconds), warm_s=0.0, seed=number, timeout_s=60)
            if kill_every_s is not None and time.monotonic() - last_kill > kill_every_s and self._workers():
                last_kill = time.monotonic()
                self.found.kills.append(self._killed(plan))
                continue
            began_s = time.monotonic()
            quiet.append(measure(plan, self._mixed))
            self.found.paces.append(self._pace(_PACE_S))
            if count := quiet[-1].counts.get("rejected", 0):
                since = began_s - last_kill if last_kill > began else None
                self.found.rejected.append(
                    Rejected(name, began_s - began, count, since, quiet[-1].late_ms, self.found.paces[-1])
                )
            if kill_every_s is None:
                self._sample_memory(time.monotonic() - began, heap=number % _HEAP_CHUNKS == 1)
            if number % 6 == 1:
                counts = pooled(quiet).counts
                self._say(f"{name}: {max(0.0, seconds - spent):.0f} s left, {dict(counts)}")
        return quiet

    def _sample_memory(self, at_s: float, *, heap: bool) -> None:
        for program, size in self._live.memory_by_program().items():
            self.found.memory.setdefault(program, []).append((at_s, size / 1e6))
        for process in self._live.processes() if heap else ():
            with contextlib.suppress(psutil.Error):
                if process.name() == _JAVA and (megabytes := live_heap(process.pid)) is not None:
                    self.found.live_heap.append((at_s, megabytes))

    def _workers(self) -> list[psutil.Process]:
        """Worker processes that may be killed because somebody starts them again: TorchServe's."""
        found = []
        for process in self._live.processes():
            with contextlib.suppress(psutil.Error):
                if any(_WORKER in word for word in process.cmdline()):
                    found.append(process)
        return found

    def _killed(self, plan: Plan) -> Kill:
        """Kill a worker under load; how long until the server answers again, while the load goes on."""
        plan = dataclasses.replace(plan, seconds=KILLED_S)
        with self._badly.excused(), started(plan, self._mixed) as process:
            time.sleep(2)
            for worker in self._workers()[:1]:
                with contextlib.suppress(psutil.Error):
                    worker.kill()
            recovery = self._badly.seconds_until_answered(_RECOVERY_S)
            result = finished(process, plan)
        kill = Kill(recovery, result.counts)
        self._say(f"a worker was killed: answered again after {kill.recovery_s:.1f} s, {dict(kill.counts)}")
        return kill
