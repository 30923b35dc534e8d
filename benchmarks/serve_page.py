"""The page of `benchmarks.serve`: tables of medians over the rounds, the aims, where each ms goes, the plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve_subjects import Shot, Subject
from serve.load.histogram import merged
from serve.runtime.service.stages import FRONTEND_STAGE, STAGES

#: Shots by subject, workload and clients, one a round.
Shots = Mapping[tuple[str, str, int], Sequence[Shot]]

#: Subjects whose p50 at one client is compared.
COMPARED_ALONE = frozenset({"echo-torchserve", "torchserve", "own", "serial", "pipelined"})


@dataclass(frozen=True)
class Aim:
    """Something that is wanted: in words, the value by round, and whether it must be at least or at most the bound.

    Without a bound it is told beside what is wanted, to judge that by.
    """

    words: str
    values: tuple[float, ...]
    bound: float | None
    least: bool
    unit: str = ""

    @property
    def value(self) -> float:
        """The median of the rounds'."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether the median is within the bound."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.least else self.value <= self.bound

    @property
    def line(self) -> str:
        """As a line of a table."""
        if self.bound is None:
            return f"| {self.words} | {self.value:.2f}{self.unit} | | |"
        word = "at least" if self.least else "at most"
        return (
            f"| {self.words} | {self.value:.2f}{self.unit} | {word} {self.bound:g}{self.unit} | "
            f"{'pass' if self.met else '**fail**'} |"
        )


def saturation(shots: Shots, key: str, workload: str) -> list[float]:
    """The highest throughput over the numbers of clients, by round."""
    by_clients = [found for (one, sent, _), found in shots.items() if (one, sent) == (key, workload)]
    return [max(shot.throughput for shot in together) for together in zip(*by_clients, strict=True)]


def p50(shots: Shots, key: str, workload: str, clients: int = 1) -> list[float]:
    """The median latency in ms, by round."""
    return [shot.latency.percentile(50) for shot in shots[key, workload, clients]]


def aims(shots: Shots, measured: Sequence[str], workload: str, alone: Shots) -> list[Aim]:
    """What is wanted of the servers, as far as what it is judged by was measured, and what no server can pass.

    Args:
        shots: of the rounds; ratios are within one.
        measured: the subjects' keys.
        workload: which is judged.
        alone: of the turns at one client; differences of p50 are within one.
    """
    found = []

    def ratio(words: str, key: str, other: str, bound: float | None = None) -> None:
        if key in measured and other in measured:
            pairs = zip(saturation(shots, key, workload), saturation(shots, other, workload), strict=True)
            found.append(Aim(words, tuple(one / two for one, two in pairs), bound, least=True, unit="×"))

    def extra(words: str, key: str, others: Sequence[str], bound: float | None = None) -> None:
        if all((one, workload, 1) in alone for one in (key, *others)):
            rows = zip(*(p50(alone, one, workload) for one in (key, *others)), strict=True)
            found.append(Aim(words, tuple(row[0] - sum(row[1:]) for row in rows), bound, least=False, unit=" ms"))

    ratio("own server at saturation against in process, pipelined", "own", "pipelined", 0.92)
    extra("own server, p50 at one client above in process", "own", ["serial"], 0.6)
    extra("in process, pipelined, p50 at one client above one after the other", "pipelined", ["serial"])
    ratio("TorchServe at saturation against in process, pipelined", "torchserve", "pipelined", 0.80)
    extra(
        "TorchServe, p50 at one client above its echo and in process", "torchserve", ["echo-torchserve", "serial"], 0.7
    )
    ratio("own server against the stock handler", "own", "stock", 7)
    ratio("TorchServe with our archive against the stock handler", "torchserve", "stock", 7)
    ratio("in process, pipelined, against the stock handler", "pipelined", "stock")
    ratio("own server at saturation, tuned against not tuned", "own", "own-not tuned", 1)
    return found


def speed_table(shots: Shots, subjects: Sequence[Subject], workload: str, clients: Sequence[int]) -> list[str]:
    """Throughput by clients, percentiles at one client, and what an answer costs in CPU time."""
    most = clients[-1]
    rows = [
        f"| | {' | '.join(map(_clients, clients))} | p50, 1 client | p99, 1 client | "
        f"p99, {most} | server's CPU | load generator's |",
        f"|---|{'---:|' * (len(clients) + 5)}",
    ]
    for subject in subjects:
        if subject.ask is None or (subject.key, workload, most) not in shots:
            continue
        of = {count: shots[subject.key, workload, count] for count in clients}
        alone, crowd = (merged(shot.latency for shot in of[count]) for count in (clients[0], most))
        cells = [f"{_median(of[count], lambda shot: shot.throughput):,.0f}/s" for count in clients]
        cells += [f"{_median(of[clients[0]], lambda shot: shot.latency.percentile(50)):.2f} ms"]
        cells += [f"{one.percentile(99):.1f} ms" if len(one) else "–" for one in (alone, crowd)]
        cells += [f"{_median(of[most], lambda shot: shot.server_ms):.2f} ms"]
        cells += [f"{_median(of[most], lambda shot: shot.load_ms):.2f} ms" if any(s.load_ms for s in of[most]) else "–"]
        rows.append(f"| {subject.title} | {' | '.join(cells)} |")
    return rows


def stage_table(shots: Shots, subjects: Sequence[Subject], workload: str, clients: int) -> list[str]:
    """Where each ms of a request goes: means, the rest being HTTP, a foreign server's queue and scheduling."""
    names = (FRONTEND_STAGE, *STAGES)
    rows = [
        f"| {_clients(clients)} | {' | '.join(names)} | the rest | mean |",
        f"|---|{'---:|' * (len(names) + 2)}",
    ]
    for subject in subjects:
        found = shots.get((subject.key, workload, clients), ())
        told = [shot for shot in found if shot.stages]
        if not told:
            continue
        means = {name: _median(told, lambda shot, n=name: shot.stages.get(n, 0.0)) for name in names}  # type: ignore[misc]
        mean = _median(told, lambda shot: shot.latency.mean)
        cells = [f"{means[name]:.2f}" if any(name in shot.stages for shot in told) else "–" for name in names]
        rows.append(f"| {subject.title} | {' | '.join(cells)} | {mean - sum(means.values()):.2f} | {mean:.2f} |")
    return rows if len(rows) > 2 else []


def faults(shots: Iterable[Sequence[Shot]]) -> list[str]:
    """What was wrong, if anything was."""
    each = [shot for found in shots for shot in found]
    bad = sum(shot.bad for shot in each)
    answers = sum(len(shot.latency) for shot in each)
    said = [fault for shot in each for fault in shot.faults][:5]
    return [
        f"{answers:,} answers were compared with the known ones. Of these, {bad} were wrong, refused or lost"
        + (f": {'; '.join(said)}." if said else ".")
    ]


def plot(shots: Shots, subjects: Sequence[Subject], workload: str, path: Path) -> None:
    """Bars: throughput at saturation, and p50 at one client."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    measured = {key for key, sent, _ in shots if sent == workload}
    shown = [subject for subject in subjects if subject.key in measured and not subject.key.startswith("echo")]
    shown.sort(key=lambda subject: statistics.median(saturation(shots, subject.key, workload)))
    names = [subject.title for subject in shown]
    colours = ["#1a7f4b" if subject.key.startswith(("own", "torchserve")) else "#9aa4b1" for subject in shown]
    panels: list[tuple[str, Callable[[str], list[float]]]] = [
        ("answers a second, at saturation", lambda key: saturation(shots, key, workload)),
        ("p50 at one client, ms", lambda key: p50(shots, key, workload)),
    ]
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.8 + 0.45 * len(shown)), sharey=True)
    for place, (title, values) in zip(axes, panels, strict=True):
        bars = [statistics.median(values(subject.key)) for subject in shown]
        place.barh(names, [0 if math.isnan(bar) else bar for bar in bars], color=colours)
        place.bar_label(place.containers[0], fmt="%.3g", padding=3, fontsize=8)
        place.set_title(title, loc="left", fontsize=9)
        place.spines[["top", "right"]].set_visible(False)
        place.tick_params(labelsize=8)
        place.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _clients(count: int) -> str:
    return f"{count} client{'s' if count > 1 else ''}"


def _median(found: Sequence[Shot], value: Callable[[Shot], float]) -> float:
    return statistics.median(value(shot) for shot in found)
