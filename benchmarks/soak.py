"""A campaign against our servers: mixed load with faults and killed workers, memory watched, then overload.

Every answer is compared with the image's known one. It fails on a leak, on a lost, wrong or swapped answer, on a 5xx
that an item caused, where a client that is slow is not answered, and where overload costs answers: ``make soak``. It
takes ``--minutes`` for each server (15, so half an hour for both), and some 2 minutes to start; ``--short`` takes 3.
Needs a run, such as that of ``make bench-serve``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.commands import command
from benchmarks.here import begun, here
from benchmarks.hostile.mutations import mutated
from benchmarks.soak_faults import ANSWERED, DURING_A_KILL
from benchmarks.soak_phases import KILLED_S, LEAK_MB_A_MINUTE, SHARE, Phases, Soaked, course, slope
from serve.common import layout
from serve.load import reference_answers
from serve.load.answer_check import VERDICTS
from serve.load.synthetic_images import make_picture, make_pictures, read_pictures
from serve.load.workload import Item, Workload, instances
from serve.runs import stored_runs
from serve.runtime.card.card import load_card
from serve.runtime.card.serving import Serving
from serve.runtime.errors import PipelineError, UserError
from serve.runtime.service.predictor import Predictor
from serve.torchserve.archive_builder import serving_of
from serve.torchserve.limits import MIB, Limits
from serve.tune.servers import KINDS, ended_in_order, pack, serving
from serve.tune.space import describe

TITLES = {"own": "Our own server", "torchserve": "Our archive behind TorchServe"}
_DAMAGED = 400
_GOODPUT = 0.9
_WORDS = {True: "pass", False: "**fail**", None: "**not judged**"}


@dataclass(frozen=True)
class Verdict:
    """Something that must hold, in words with its figures, and whether it did; None: the campaign cannot tell."""

    words: str
    holds: bool | None

    @property
    def line(self) -> str:
        """As a line of a list."""
        return f"- {_WORDS[self.holds]}: {self.words}"


def workloads(predictor: Predictor, way: Serving, photos: Path | None) -> tuple[Workload, Workload]:
    """Good single images that answer differently from each other; and those with all else that is mixed in."""
    pictures = make_pictures(40) if photos is None else read_pictures(photos)
    good = reference_answers.items(predictor, pictures)
    single = reference_answers.workload(predictor, good, way).told_apart()
    # What begins as JSON does is read as a request of instances.
    damaged = [(f"damaged-{seed}", mutated(seed)) for seed in range(_DAMAGED)]
    damaged = [(name, data) for name, data in damaged if data and not data[:64].lstrip().startswith(b"{")]
    bad = reference_answers.items(predictor, damaged, weight=0.05)
    large = reference_answers.items(predictor, [("large", make_picture(7, (4000, 3000)))], weight=0.2)
    several = tuple(
        instances(f"several-{start}", (*good[start : start + 3], _bad(bad)), weight=0.3) for start in range(0, 12, 3)
    )
    return single, dataclasses.replace(single, items=(*good, *bad, *large, *several))


def _bad(items: tuple[Item, ...]) -> Item:
    return next(item for item in items if item.known[0].status != 200)


def pace(predictor: Predictor, images: Sequence[bytes], seconds: float) -> float:
    """Images a second that an artifact answers in process, one after another, for about so long."""
    began, done = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        predictor.predict([images[done % len(images)]])
        done += 1
    return done / spent


def verdicts(found: Soaked, queue: int) -> list[Verdict]:
    """What must hold, and whether it did."""
    assert found.mixed is not None
    counts = found.mixed.counts
    clients = found.bad_clients
    caused = sum(
        count
        for (_, outcome), count in clients.items()
        if outcome.startswith("status 5") and not outcome.endswith(DURING_A_KILL)
    )
    # A request is accepted when at most the queue and two batches are before it, on a machine that also refuses.
    bound = 2e3 * queue / found.capacity + 500 if found.capacity else 0.0
    killed = [kill.counts for kill in found.kills]
    result = [
        Verdict(f"{counts.get('wrong', 0)} wrong or swapped answers", not counts.get("wrong")),
        Verdict(f"{counts.get('lost', 0)} lost answers", not counts.get("lost")),
        Verdict(f"{counts.get('failed', 0)} 5xx caused by an item", not counts.get("failed")),
        _shed_verdict(found),
        Verdict(f"{caused} 5xx caused by a client that behaves badly", not caused),
        Verdict(
            f"{len(found.bad_client_faults)} wrong answers to clients that are slow or half-closed",
            not found.bad_client_faults,
        ),
        *(_answered(found, client) for client in ANSWERED[found.kind]),
        _memory_verdict(found),
    ]
    if found.kind == "torchserve":
        slowest = max((kill.recovery_s for kill in found.kills), default=math.inf)
        again = f"{len(killed)} workers killed: answered again, under load, after at most {slowest:.1f} s."
        bad = {name: sum(one.get(name, 0) for one in killed) for name in ("wrong", "failed", "lost")}
        told_bad = ", ".join(f"{count} {name}" for name, count in bad.items())
        result.append(
            Verdict(
                f"{again} Requests meanwhile: {told_bad}." if killed else "no worker was killed",
                slowest < 60 and not any(bad.values()),
            )
        )
    for factor, over in found.overload.items():
        if factor > 1:
            share = found.share(over)
            result.append(
                Verdict(
                    f"at {factor:g} times capacity: goodput {_percent(share)} of capacity (at least {_GOODPUT:.0%}). "
                    f"Accepted requests had a p99 of {over.latency.percentile(99):.0f} ms (at most {bound:.0f}). "
                    f"{over.bad} requests were wrong, failed or lost.",
                    share >= _GOODPUT and over.latency.percentile(99) <= bound and not over.bad,
                )
            )
    after = found.afterwards
    result.append(Verdict("it answers as known afterwards", after is not None and after.good > 0 and not after.bad))
    return result


def _percent(share: float) -> str:
    """A share to a tenth, rounded down: what is just missed must not read as what it missed."""
    return f"{math.floor(share * 1000) / 10:.1f}%"


def _shed_verdict(found: Soaked) -> Verdict:
    assert found.mixed is not None
    told = f"{found.mixed.counts.get('rejected', 0)} requests told to try again, below capacity"
    if (sheds := found.sheds) is None:
        slowest = min(entry.pace or 0.0 for entry in found.rejected)
        told += f". The machine did {slowest:.0f} images/s in process meanwhile, and usually {found.usual_pace:.0f}."
        return Verdict(told, None)
    return Verdict(told, not sheds)


def _memory_verdict(found: Soaked) -> Verdict:
    samples = max((len(one) for one in found.memory.values()), default=0)
    grew = f"memory grew by {found.growth:.2f} MB a minute over {samples} samples."
    if found.heap_told:
        grew += f" Of Java, only what is alive in its heap counts ({len(found.live_heap)} looks)."
    grew += f" A leak is growth above {LEAK_MB_A_MINUTE:g} MB a minute and above 5 % in all."
    if (leaks := found.leaks) is None and found.only_java_grew:
        return Verdict(f"{grew} Only Java's memory grew. A JDK's jcmd would tell whether that is alive.", None)
    if leaks is None:
        return Verdict(f"{grew} Growth of 5 % takes {found.telling_minutes:.0f} minutes at that rate.", None)
    return Verdict(grew, not leaks)


def _answered(found: Soaked, client: str) -> Verdict:
    """Whether clients of a kind, which do nothing that is not allowed, got their answers."""
    outcomes = {outcome: count for (kind, outcome), count in found.bad_clients.items() if kind == client}
    good = outcomes.pop("as known", 0)
    # The end of the campaign, or of the worker that had the request, is not the client's.
    lost = sum(n for what, n in outcomes.items() if what != "not finished" and not what.endswith(DURING_A_KILL))
    return Verdict(f"{client}: {good} clients answered as known, {lost} not", good > 0 and not lost)


def _memory(program: str, samples: list[tuple[float, float]]) -> str:
    """A line of a list: what one of a server's programs held."""
    (_, first), *_, (_, last) = [samples[0], *samples]
    words = f"- {program}: {first:.0f} MB at first and {last:.0f} in the end, {slope(samples):+.2f} a minute."
    if program != "java":
        return words
    heap, buffers = (megabytes * MIB / 1e6 for megabytes in (Limits().heap_mb, Limits().direct_mb))
    return f"{words} Its heap may take {heap:.0f} MB, its buffers {buffers:.0f}."


def section(found: Soaked, judged: list[Verdict], way: Serving) -> list[str]:
    """The Markdown of one server."""
    assert found.mixed is not None
    mixed = found.mixed
    body = [
        f"## {TITLES[found.kind]}",
        "",
        f"Served as {describe(way, found.kind)}.",
        "",
        *(verdict.line for verdict in judged),
        "",
    ]
    body += [
        f"The mixed load ran for {mixed.seconds:.0f} s, at {SHARE:.0%} of its capacity of {found.mixed_capacity:.0f} "
        "requests/s. Its requests: "
        + ", ".join(f"{mixed.counts.get(name, 0):,} {name}" for name in VERDICTS)
        + f". Their latency: p50 {mixed.latency.percentile(50):.1f} ms, p99 {mixed.latency.percentile(99):.0f} ms.",
        "",
    ]
    if mixed.faults or found.bad_client_faults:
        body += [*(f"- {fault}" for fault in (*mixed.faults, *found.bad_client_faults[:5])), ""]
    if found.paces:
        low, high = min(found.paces), max(found.paces)
        body += [
            f"This machine did {found.usual_pace:.0f} images/s in process, one after another. This is the median of "
            f"{len(found.paces)} looks, from {low:.0f} to {high:.0f}. They were taken between the chunks of that load, "
            "beside the clients that behave badly.",
            "",
        ]
    if found.rejected:
        body += [*(f"- {rejected.line}" for rejected in found.rejected), ""]
    if len(found.memory) > 1:
        body += ["Memory while it was watched:", ""]
        body += [_memory(program, samples) for program, samples in sorted(found.memory.items())]
        body += [*([_memory("alive in the heap", found.live_heap)] if found.heap_told else []), ""]
    body += ["| clients that behave badly | outcomes |", "|---|---|"]
    kinds = sorted({kind for kind, _ in found.bad_clients})
    for kind in kinds:
        outcomes = {outcome: count for (one, outcome), count in found.bad_clients.items() if one == kind}
        shown = ", ".join(f"{outcome}: {count:,}" for outcome, count in sorted(outcomes.items()))
        body.append(f"| {kind} | {shown} |")
    body.append("")
    if found.kills:
        body += [
            f"| worker killed | answered again after | of the requests in those {KILLED_S:.0f} s |",
            "|---|---:|---|",
        ]
        for number, kill in enumerate(found.kills, 1):
            shown = ", ".join(f"{count} {name}" for name, count in sorted(kill.counts.items()))
            body.append(f"| {number} | {kill.recovery_s:.1f} s | {shown} |")
        body.append("")
    body += [
        f"Overload with photographs, measured in turns. The capacity is {found.capacity:.0f} requests/s. The server "
        "lacks the cores that the generator takes.",
        "",
        "| arrivals | answered a second | of capacity | p50 | p99 | told to try again | p99 of it | bad | generator |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for factor, over in found.overload.items():
        share = found.share(over)
        refused = f"{over.rejection.percentile(99):.0f} ms" if len(over.rejection) else "–"
        body.append(
            f"| {factor:g}× | {over.throughput:.0f} | {_percent(share)} | {over.latency.percentile(50):.0f} ms | "
            f"{over.latency.percentile(99):.0f} ms | {over.counts.get('rejected', 0):,} | {refused} | {over.bad} | "
            f"{over.cpu_s / over.seconds if over.seconds else 0.0:.2f} cores |"
        )
    return [*body, ""]


def head(options: argparse.Namespace, began: str, photos: Workload, mixed: Workload) -> list[str]:
    """The page's beginning."""
    alike = len(mixed.confusable())
    return [
        "# Reliability",
        "",
        f"Made by `{command('benchmarks.soak', sys.argv[1:])}` on {began}: "
        f"{here('torch', 'openvino', isa=False)}. This command serves {options.artifact} of {options.run} "
        f"for {options.minutes:g} minutes a server. At most {options.queue} requests wait.",
        "",
        "Every answer is compared with what the runtime answers in process to the same bytes. The requests:",
        "",
        f"- {len(photos.items)} photographs. Their answers differ from each other by more than twice the tolerance, "
        f"so a swapped answer is seen. In the mixed load {alike} pairs of images answer alike, so there a swap is "
        "not seen.",
        "- Several instances, one of them bad.",
        "- An image of 12 megapixels.",
        f"- {_DAMAGED} damaged images.",
        "",
        "Other clients are slow, half-closed, cut off, gone, oversized, idle, or speak no HTTP.",
        "",
        "Arrivals are Poisson. A latency counts from when its request was due. A rate counts the answers that came in "
        "a period. Some of the requests that were due in it still wait in the queue.",
        "",
        "Our own server is one process, which a supervisor restarts. Its death is not part of this. TorchServe's "
        "workers are killed (SIGKILL) under load.",
        "",
    ]


def main() -> int:
    """Run the campaign, write the page; the exit code is 1 where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=[*KINDS, "both"], default="both")
    parser.add_argument("--minutes", type=float, default=15.0, help="for each server (15)")
    parser.add_argument("--run", default="resnet18-224", help="of the store")
    parser.add_argument("--artifact", default=None, help="by default the recommended one")
    parser.add_argument("--store", type=Path, default=Path("model_store"))
    parser.add_argument("--photos", type=Path, default=None, help="a folder of photographs; by default they are made")
    parser.add_argument("--queue", type=int, default=128, help="requests that may wait")
    parser.add_argument("--short", action="store_true", help="3 minutes for each, to see that it works")
    parser.add_argument("--write", type=Path, default=None, help="the Markdown file to write")
    options = parser.parse_args()
    if options.short:
        options.minutes = 3.0
    began = begun()
    try:
        if options.minutes < 0.5:
            raise UserError(f"--minutes must be at least 0.5, got {options.minutes:g}")
        options.artifact = options.artifact or stored_runs.recommended(options.store, options.run)
        artifact = layout.artifact_folder(options.store, options.run, options.artifact)
        way = serving_of(artifact, load_card(artifact))
        ways = {"own": replace(way, workers=1), "torchserve": way}
        predictor = reference_answers.opened(artifact, way)
        photos, mixed = workloads(predictor, way, options.photos)
        bodies = [item.body for item in photos.items]
        body = head(options, began, photos, mixed)
        held = True
        for kind in KINDS if options.server == "both" else (options.server,):
            print(f"{TITLES[kind]}: about {options.minutes + 1:.0f} minutes", flush=True)
            with tempfile.TemporaryDirectory(prefix="soak-") as folder:
                scratch = Path(folder)
                archive = pack(artifact, ways[kind], scratch, "soaked")
                with serving(kind, {"soaked": archive}, scratch, options.queue) as live:
                    phases = Phases(kind, live, photos, mixed, scratch=scratch, pace=partial(pace, predictor, bodies))
                    found = phases.run(course(options.minutes))
            judged = verdicts(found, options.queue)
            held = held and all(verdict.holds is not False for verdict in judged)
            told_of = section(found, judged, ways[kind])
            print("\n".join(told_of), flush=True)
            body += told_of
            if options.write is not None:  # each server's as soon as it is there
                options.write.write_text("\n".join(body) + "\n", encoding="utf-8")
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if held else 1


if __name__ == "__main__":
    with ended_in_order():
        sys.exit(main())
