"""What hostile requests cost the own server: time, memory, and its other answers.

The figures are a section of docs/explanations/security.md.

``make bench-attacks``. Each kind of request is sent to a server in a process of its own on loopback, one at a time over
one connection; then all that are refused in turns, `REFUSALS` in all, and the honest ones. The network has random
weights where torch's hub has none on this machine; nothing is downloaded. Memory is as Linux tells it: the server's
resident set, and its peak (``VmHWM``).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from benchmarks.below import add_option, tell
from benchmarks.commands import command
from benchmarks.gpu_subjects import MODELS, make_subject
from benchmarks.here import here
from benchmarks.hostile import bodies, bombs, mutations
from serve.load.synthetic_images import make_picture
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.errors import PipelineError
from serve.tune.servers import Live, ended_in_order, pack, serving
from serve.tune.space import describe

#: How often each request of a kind is sent where it is one, and how many refusals there are afterwards.
REPEATS: Final = 15
REFUSALS: Final = 10_000
_SAMPLES: Final = 4
_AT_LEAST: Final = 3
_HONEST: Final = 6
_PATIENCE_S: Final = 3.0
_TIMEOUT_S: Final = 60.0
_MB: Final = 1e6


@dataclass(frozen=True)
class Kind:
    """Something that is sent.

    Attributes:
        title: what it is, in words.
        bodies: of its requests.
        honest: whether a server with these budgets must answer it; what is refused is sent, and measured, before.
        announced: bytes that the head of the request names and nobody sends; 0: those that there are.
        encoding: of the body, as its head names it.
    """

    title: str
    bodies: tuple[bytes, ...]
    honest: bool = False
    announced: int = 0
    encoding: str = ""


@dataclass(frozen=True)
class Answer:
    """Of one request: the status, the body, and milliseconds until it was there."""

    status: int
    body: bytes
    milliseconds: float


@dataclass(frozen=True)
class Cost:
    """What a kind of request cost.

    Attributes:
        sent: bytes of each body, the median where there are several.
        answers: how many had which status.
        grown: by how many bytes the peak of the server's memory was above what it held before the first of them.
    """

    title: str
    sent: int
    answers: Counter[int]
    milliseconds: float
    grown: int


@dataclass(frozen=True)
class Attacked:
    """All that was measured.

    Attributes:
        served: how the server has the model, in words.
        costs: of each kind, in the order in which they were sent.
        idle: bytes that the server held before everything, warmed by the honest image.
        held: the same before the refusals in turns, after each quarter of them, and in the end.
        refusals: how many had which status.
        seconds: that they took.
        good: median ms of an honest image before everything, and after it.
        same: whether its answer is the same, byte for byte.
    """

    served: str
    costs: tuple[Cost, ...]
    idle: int
    held: tuple[int, ...]
    refusals: Counter[int]
    seconds: float
    good: tuple[float, float]
    same: bool

    @property
    def holds(self) -> bool:
        """Whether nothing was answered by a 5xx, and the honest image as before."""
        return self.same and all(
            status < 500 for told in (self.refusals, *(cost.answers for cost in self.costs)) for status in told
        )


def kinds() -> Iterator[Kind]:
    """What is sent, one kind after the other; first an honest photograph, to compare with."""
    photo = make_picture(1, (500, 375))
    large = make_picture(7, (4000, 3000))
    yield Kind("honest: a photograph of 500x375", (photo,), honest=True)
    yield Kind("honest: one of 12 megapixels", (large,), honest=True)
    yield Kind("within the budget: 49 megapixels of black as WebP", (bombs.webp(),), honest=True)
    yield from (Kind(f"bomb: {name}", (data,)) for name, data in bombs.each())
    yield Kind("a photograph of 12 megapixels, cut off", (large[: len(large) // 2],))
    sample = tuple(data for data in mutations.sample() if data and not data[:64].lstrip().startswith(b"{"))
    yield Kind(f"{len(sample)} tiny images of all formats: whole, damaged, two in one file", sample)
    yield Kind("JSON, lists in lists", (bodies.nested(500_000),))
    yield Kind("JSON, a list of numbers", (bodies.long_list(500_000),))
    yield Kind("JSON, a number of many digits", (bodies.long_number(1_000_000),))
    yield Kind("JSON, an object of many keys", (bodies.many_keys(60_000),))
    yield Kind("JSON, 8 images of 49 megapixels", (bodies.large_images_together(8),))
    yield Kind("gzip of 256 MB, said to be one", (bodies.compressed(256),), encoding="gzip")
    yield Kind("1 GB announced, nothing sent", (b"",), announced=1 << 30)


class Client:
    """One connection to a server, which is opened anew when the server has closed it."""

    def __init__(self, live: Live) -> None:
        self._target = live.target
        self._connection = http.client.HTTPConnection(live.target.address, timeout=_TIMEOUT_S)

    def ask(self, body: bytes, kind: Kind) -> Answer:
        """Send one request and read its answer."""
        began = time.perf_counter()
        self._connection.putrequest("POST", self._target.path)
        self._connection.putheader("Content-Length", str(kind.announced or len(body)))
        json_like = body[:1] == b"{"
        self._connection.putheader("Content-Type", "application/json" if json_like else "application/octet-stream")
        for name, value in self._target.headers.items():
            self._connection.putheader(name, value)
        if kind.encoding:
            self._connection.putheader("Content-Encoding", kind.encoding)
        self._connection.endheaders()
        with contextlib.suppress(ConnectionError):  # it has answered, and reads no further
            self._connection.send(body)
        came = self._connection.getresponse()
        content = came.read()
        taken = (time.perf_counter() - began) * 1e3
        if kind.announced:
            self._connection.close()
        return Answer(came.status, content, taken)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def attack(live: Live, sent: Sequence[Kind], repeats: int, refusals: int, served: str = "") -> Attacked:
    """Send all of it to a running server.

    Args:
        live: the server.
        sent: the kinds; the first is an honest image, whose answer must be the same in the end.
        repeats: of each kind that is one body; fewer where they take longer than `_PATIENCE_S`.
        refusals: sent in turns afterwards, of all kinds of which each request was refused.
        served: how the server has the model, in words.
    """
    client = Client(live)
    try:
        photograph = [sent[0].bodies[0]] * (_HONEST * repeats)
        for body in photograph[:repeats]:  # warm
            client.ask(body, sent[0])
        honest = [client.ask(body, sent[0]) for body in photograph]
        idle = live.memory_bytes()
        costs, refused = [], []
        for kind in (kind for kind in sent if not kind.honest):
            cost, answers = _cost(live, client, kind, repeats)
            costs.append(cost)
            if all(400 <= answer.status < 500 for answer in answers):
                refused.append(kind)
        held, counts = [live.memory_bytes()], Counter[int]()
        began = time.perf_counter()
        for number in range(refusals):
            kind = refused[number % len(refused)]
            counts[client.ask(kind.bodies[0], kind).status] += 1
            if (number + 1) % max(1, refusals // _SAMPLES) == 0:
                held.append(live.memory_bytes())
        seconds = time.perf_counter() - began
        costs += [_cost(live, client, kind, repeats)[0] for kind in sent if kind.honest]
        after = [client.ask(body, sent[0]) for body in photograph]
    finally:
        client.close()
    good = (_median(honest), _median(after))
    same = {(one.status, one.body) for one in honest} == {(one.status, one.body) for one in after}
    same = same and after[0].status == 200
    return Attacked(served, tuple(costs), idle, tuple(held), counts, seconds, good, same)


def _cost(live: Live, client: Client, kind: Kind, repeats: int) -> tuple[Cost, list[Answer]]:
    turns = repeats if len(kind.bodies) == 1 else 1
    ends = time.perf_counter() + _PATIENCE_S
    before = live.memory_bytes()
    for process in live.processes():
        Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM
    answers: list[Answer] = []
    while turns and (len(answers) < _AT_LEAST or time.perf_counter() < ends):
        answers += [client.ask(body, kind) for body in kind.bodies]
        turns -= 1
    grown = max(0, sum(_peak(process.pid) for process in live.processes()) - before)
    sent = round(statistics.median(map(len, kind.bodies)))
    counts = Counter(answer.status for answer in answers)
    return Cost(kind.title, sent, counts, _median(answers), grown), answers


def _peak(pid: int) -> int:
    """The most that a process held since its peak was reset, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _median(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.milliseconds for answer in answers)


def page(found: Attacked, words: Sequence[str]) -> str:
    """The section of docs/explanations/security.md."""
    before, after = found.good
    first, *later = (f"{one / _MB:.1f}" for one in found.held)
    growth = (found.held[-1] - found.held[0]) / _MB
    total = sum(found.refusals.values())
    said = ", ".join(f"{count:,} with {status}" for status, count in sorted(found.refusals.items()))
    lines = [
        "## What an attack costs",
        "",
        f"Made by `{command('benchmarks.attacks', words)}` on {datetime.date.today().isoformat()}: "
        f"{here('torch', 'torchvision', 'pillow', isa=False)}; the own server on loopback, {found.served}. One request "
        "at a time over one connection; milliseconds until the answer was read, the median. Memory is by how much the "
        "peak of the server's resident set, over all requests of the line, was above what it held before them.",
        "",
        "| sent | bytes | answered | ms | memory, MB |",
        "|---|---:|---|---:|---:|",
    ]
    for cost in found.costs:
        answers = str(next(iter(cost.answers))) if len(cost.answers) == 1 else _counted(cost.answers)
        row = (cost.title, f"{cost.sent:,}", answers, f"{cost.milliseconds:.1f}", f"{cost.grown / _MB:.1f}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(
        [
            *lines,
            "",
            f"After the kinds that are refused, {total:,} refusals, of those kinds in turns, took "
            f"{found.seconds:.0f} s: {said}. "
            f"The server held {found.idle / _MB:.1f} MB before everything, {first} before these, and after each "
            f"quarter of them {', '.join(later)}: {growth:+.1f} MB in all.",
            "",
            f"The photograph is answered {'as before, byte for byte' if found.same else '**otherwise than before**'}: "
            f"in {before:.1f} ms before all this, in {after:.1f} ms after it.",
            "",
        ]
    )


def _counted(answers: Counter[int]) -> str:
    return ", ".join(f"{status}: {count}" for status, count in sorted(answers.items()))


def run(model: str, sent: Sequence[Kind], repeats: int, refusals: int) -> Attacked:
    """Start the own server with a network, and attack it.

    Raises:
        PipelineError: it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        scratch = Path(folder)
        artifact = make_subject(model, scratch / "model", 32, None).artifact("exported_program", torch.float32)
        way = Serving((Execution("exported"),))
        archive = pack(artifact, way, scratch, "attacked")
        with serving("own", {"attacked": archive}, scratch) as live:
            return attack(live, sent, repeats, refusals, f"{model} as {describe(way)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, write the section; the exit code is 1 where the server did not hold."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet18")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"of each kind ({REPEATS})")
    parser.add_argument("--refusals", type=int, default=REFUSALS, help=f"in the end ({REFUSALS:,})")
    add_option(parser)
    options = parser.parse_args(words)
    if min(options.repeats, options.refusals) < 1:
        parser.error("--repeats and --refusals must be at least 1")
    try:
        found = run(options.model, tuple(kinds()), options.repeats, options.refusals)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    tell(page(found, words), options.write)
    return 0 if found.holds else 1


if __name__ == "__main__":
    with ended_in_order():
        sys.exit(main())
