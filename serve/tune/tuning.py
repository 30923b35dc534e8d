"""Tunes an artifact: measures its server with different settings, then writes ``serving.json`` and the curve."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serve.common.layout import JOURNAL_FILE, SERVER_FILE
from serve.load import reference_answers
from serve.load.generator_process import measure
from serve.load.plan import Plan
from serve.load.synthetic_images import make_pictures, read_pictures
from serve.runtime.card.card import load_card
from serve.runtime.card.serving import SERVING_FILE, Serving
from serve.runtime.device.cores import cores, quota
from serve.torchserve.archive_builder import serving_of
from serve.tune.curve import plot
from serve.tune.journal import Journal
from serve.tune.search import MOST_ASKED, Found, Goal, Point, Search, Trial, confirmed
from serve.tune.servers import Live, ServerKind, end_left, pack, remember, serving
from serve.tune.space import Stage, certain, describe, stages

TUNING_FILE = "tuning.json"
CURVE_FILE = "tuning.svg"

_MODEL = "tuned"
_CLIENTS = 16  # clients of the closed loop at saturation, for each process that shares them
_MOST_CONNECTIONS = 256
#: Shares of the highest rate at which the curve is drawn.
_CURVE = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1)
_CURVE_EFFORT = 2.0


@dataclass(frozen=True)
class Settings:
    """Settings of the tuning itself.

    Attributes:
        server: which server is measured.
        seconds: duration of one measurement at effort 1.
        arrivals: least requests in a measurement at a rate, which takes longer if necessary. The p99 of forty is the
            slowest of them, so a single disturbance of the machine would decide.
        warm_s: uncounted seconds of load before each.
        photos: a folder of images to send. None: synthetic ones.
        images: most images.
        curve: whether the curve is measured afterwards, of the chosen and the present settings in turns.
    """

    server: ServerKind = "own"
    seconds: float = 4.0
    arrivals: int = 200
    warm_s: float = 1.0
    photos: Path | None = None
    images: int = 40
    curve: bool = True


class Servers:
    """The measured server. One runs at a time, and it is reused for further measurements of the same settings.

    Args:
        artifact: the artifact's folder.
        workload: the folder of the workload.
        settings: how it is measured.
        goal: a measurement is given up beyond ten times its p99.
        scratch: a folder for archives, state and logs.
    """

    def __init__(self, artifact: Path, workload: Path, settings: Settings, goal: Goal, scratch: Path) -> None:
        self._artifact, self._workload, self._settings, self._goal = artifact, workload, settings, goal
        self._scratch = scratch
        self._open: tuple[Serving, Live] | None = None
        self._stack = contextlib.ExitStack()

    def measure(self, way: Serving, rate: float | None, effort: float) -> Point:
        """Serve with these settings and measure at a rate, or at saturation."""
        live = self._live(way)
        clients = self._clients(way)
        plan = Plan(
            live.target,
            clients=clients if rate is None else _MOST_CONNECTIONS,
            spread=min(clients, _MOST_CONNECTIONS) if clients > _CLIENTS else 0,
            rate=rate,
            seconds=self._seconds(rate) * effort,
            warm_s=self._settings.warm_s,
            give_up_ms=None if rate is None else max(10 * self._goal.p99_ms, 500.0),
        )
        found = measure(plan, self._workload)
        return Point(
            rate=rate,
            seconds=plan.seconds,
            throughput=found.throughput,
            p50=found.latency.percentile(50),
            p99=found.latency.percentile(99),
            bad=found.bad,
            rejected=found.counts.get("rejected", 0),
            gave_up=found.gave_up,
            memory_bytes=live.memory_bytes(),
        )

    def _clients(self, way: Serving) -> int:
        """Return the connections at saturation. The own server's processes share them by chance."""
        return _CLIENTS * way.workers if self._settings.server == "own" else _CLIENTS

    def _seconds(self, rate: float | None) -> float:
        """Return the seconds of a measurement at effort 1."""
        shortest = self._settings.seconds
        return shortest if rate is None else max(shortest, self._settings.arrivals / rate)

    def close(self) -> None:
        """Stop the server."""
        self._open = None
        self._stack.close()
        (self._artifact / SERVER_FILE).unlink(missing_ok=True)

    def _live(self, way: Serving) -> Live:
        if self._open is not None and self._open[0] == way:
            return self._open[1]
        self.close()
        archive = pack(self._artifact, certain(way), self._scratch, _MODEL)
        live = self._stack.enter_context(
            serving(
                self._settings.server,
                {_MODEL: archive},
                self._scratch,
                on_start=lambda pid: remember(pid, self._artifact / SERVER_FILE),
                gpus=None,
            )
        )
        # A fresh server is slow in its first second. Saturation warms threads, caches and batches.
        measure(Plan(live.target, self._clients(way), seconds=1.0, warm_s=0.0), self._workload)
        self._open = way, live
        return live


def tune(
    artifact: Path,
    goal: Goal,
    settings: Settings,
    say: Callable[[str], None] = lambda line: None,
    tried: Sequence[Stage] | None = None,
) -> Found:
    """Find the best serving settings of an artifact here, and write them beside its card.

    Args:
        artifact: the artifact's folder. It gets ``serving.json``, ``tuning.json`` and ``tuning.svg``. During the tuning
            it has ``tuning.journal``, from which a killed tuning continues. Archives stay unchanged.
        goal: the goal.
        settings: how it is measured.
        say: receives results and the time left, as lines.
        tried: the stages to try. None: every setting (see `space.stages`).

    Returns:
        The choice, and all measurements.

    Raises:
        PipelineError: no settings hold the p99, or a server does not start.
    """
    card = load_card(artifact)
    usual = serving_of(artifact, card)
    pictures = make_pictures(settings.images) if settings.photos is None else read_pictures(settings.photos)
    pictures = pictures[: settings.images]
    subject = {
        "schema": 2,
        "content": card.content,
        "usual": usual.text,
        "goal": asdict(goal),
        "server": settings.server,
        "seconds": settings.seconds,
        "arrivals": settings.arrivals,
        "cores": cores(),
        "quota": quota(),
        "images": hashlib.sha256(b"".join(image for _, image in pictures)).hexdigest(),
    }
    journal = Journal(artifact / JOURNAL_FILE, subject)
    if end_left(artifact / SERVER_FILE):
        say("stopped the server of an earlier tuning that was killed")
    if journal.resumed:
        say(f"resuming: {journal.resumed} measurements are already done")
    if tried is None:
        tried = stages(settings.server, usual)
    with _prepared(artifact, usual, pictures, settings, goal) as servers:
        clock = _Clock(say, settings.server, _curve_s(settings))

        def point(way: Serving, rate: float | None, effort: float) -> Point:
            return journal.point(way, rate, effort, lambda: clock.timed(lambda: servers.measure(way, rate, effort)))

        def tell(trial: Trial, left: int) -> None:
            clock.tell(trial, left, search.asks(left))

        search: Search = Search(point, goal, tell)
        found = confirmed(search.run(usual, tried), goal, point, clock.ask)
        curves = _curves(found, goal, point, say) if settings.curve else {}
    _write(artifact, found, goal, subject, curves)
    journal.remove()
    return found


@contextmanager
def _prepared(
    artifact: Path, usual: Serving, pictures: list[tuple[str, bytes]], settings: Settings, goal: Goal
) -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="tune-") as folder:
        predictor = reference_answers.opened(artifact, usual)
        sent = reference_answers.workload(predictor, reference_answers.items(predictor, pictures), usual)
        workload = sent.save(Path(folder) / "workload")
        scratch = Path(folder) / "store"
        scratch.mkdir(mode=0o700)
        with contextlib.closing(Servers(artifact, workload, settings, goal, scratch)) as servers:
            yield servers


def _curve_s(settings: Settings) -> float:
    """Return about how many seconds the curve of two settings takes."""
    return 2 * len(_CURVE) * (settings.seconds * _CURVE_EFFORT + settings.warm_s) if settings.curve else 0.0


class _Clock:
    """Reports the outcome of each trial, and about how long the rest takes.

    The estimate is the mean so far for each trial that is left. For each measurement of the final turns it is the time
    of a trial's first measurement, which includes a server's start. The curve is added.
    """

    def __init__(self, say: Callable[[str], None], kind: ServerKind, curve_s: float) -> None:
        self._say = say
        self._kind = kind
        self._curve_s = curve_s
        self._spent, self._trials = 0.0, 0
        self._measured = False
        self._first: list[float] = []

    def timed(self, work: Callable[[], Point]) -> Point:
        """Time some work."""
        begun = time.monotonic()
        try:
            return work()
        finally:
            took = time.monotonic() - begun
            self._spent += took
            if not self._measured:
                self._first.append(took)
            self._measured = True

    def tell(self, trial: Trial, left: int, in_turns: int) -> None:
        """Report the outcome of a trial. ``left`` trials and ``in_turns`` measurements in turns may follow."""
        self._trials += self._measured
        self._measured = False
        self._say(f"{describe(trial.way, self._kind)}: {trial.outcome}{self._rest(left, in_turns)}")

    def ask(self, line: str) -> None:
        """Report that the turns begin."""
        self._say(f"{line}{self._rest(0, MOST_ASKED)}")

    def _rest(self, left: int, in_turns: int) -> str:
        if not self._trials:  # everything was measured before
            return ""
        seconds = left * self._spent / self._trials + in_turns * statistics.mean(self._first) + self._curve_s
        return f"; about {seconds:.0f} s left" if seconds else ""


def _curves(
    found: Found, goal: Goal, point: Callable[[Serving, float | None, float], Point], say: Callable[[str], None]
) -> dict[str, list[Point]]:
    """Measure p99 over the rate for the chosen and the present settings, with twice the time for each point."""
    best = found.chosen.best(goal)
    assert best is not None
    assert best.rate is not None
    highest = best.rate if goal.objective == "throughput" else best.rate * 2
    ways = {"chosen": found.chosen.way, "as it was": found.usual.way}
    if found.chosen is found.usual:
        del ways["as it was"]
    say("measuring the curve …")
    return {
        name: [point(way, round(highest * share, 1), _CURVE_EFFORT) for share in _CURVE] for name, way in ways.items()
    }


def _write(artifact: Path, found: Found, goal: Goal, subject: dict[str, Any], curves: dict[str, list[Point]]) -> None:
    def shown(trial: Trial) -> dict[str, Any]:
        return {
            "way": describe(trial.way, subject["server"]),
            "stage": trial.stage,
            "outcome": trial.outcome,
            "serving": json.loads(trial.way.text),
            "points": [_finite(asdict(point)) for point in trial.points],
        }

    body = {
        "schema": 1,
        "goal": {**asdict(goal), "rate": found.rate},
        "server": subject["server"],
        "cores": subject["cores"],
        "content": subject["content"],
        "images": subject["images"],
        "chosen": shown(found.chosen),
        "usual": shown(found.usual),
        "turns": [{"best": _finite(asdict(turn.best)), "usual": _finite(asdict(turn.usual))} for turn in found.turns],
        "trials": [shown(trial) for trial in found.trials],
        "curves": {name: [_finite(asdict(point)) for point in points] for name, points in curves.items()},
    }
    plot(found, curves, goal, artifact / f".{CURVE_FILE}")
    # Each in one step, and never into a file that has further links.
    (artifact / f".{CURVE_FILE}").replace(artifact / CURVE_FILE)
    for name, text in ((TUNING_FILE, json.dumps(body, indent=2) + "\n"), (SERVING_FILE, found.chosen.way.text)):
        written = artifact / f".{name}"
        written.write_text(text, encoding="utf-8")
        written.replace(artifact / name)


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }
