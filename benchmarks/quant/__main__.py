"""One subject's rows, each kept as it is made; its times, as a step of its own; the page of all: ``make bench-quant``.

``python -m benchmarks.quant resnet18 --data digits --no-speed`` makes what is lacking and can be ended at any time;
without ``--no-speed`` everything is then timed, which wants a machine that does nothing else. Without a model, only
the page is written, from what is known.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

import optimize as opt
from benchmarks.below import MARK, write_below
from benchmarks.commands import command
from benchmarks.quant.page import page
from benchmarks.quant.plot import plot
from benchmarks.quant.record import SubjectRecord, read, read_all, write
from benchmarks.quant.rows import make_row
from benchmarks.quant.speed import seconds_of, timed
from benchmarks.quant.ways import FLOAT, Bed, Way, ways
from optimize import noise
from optimize.measure.bench import Bench
from optimize.measure.machine import machine, versions
from serve.runtime.errors import PipelineError

#: Of those that the machine has, what a page names.
_LIBRARIES = ("torch", "onnxruntime-gpu", "onnxruntime", "openvino", "nncf", "torchao")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the rows that are lacking, time them, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a torchvision name, timm:NAME, or file.py:factory")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--checkpoint", type=Path, help="weights; by default it is trained")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--title", help="of the section; by default model and data")
    parser.add_argument("--images", type=int, default=256, help="calibration images")
    parser.add_argument("--only", nargs="+", metavar="WAY", help="make these rows alone; the float one comes with them")
    parser.add_argument("--again", action="store_true", help="make rows anew that are known")
    parser.add_argument(
        "--no-speed", action="store_true", help="time nothing now, as where others use the machine; it can be, later"
    )
    parser.add_argument("--retime", action="store_true", help="time anew what was timed")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no row is begun; the next call goes on"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each execution")
    parser.add_argument("--seconds", type=float, default=0.2, help="of one turn")
    parser.add_argument("--store", default="model_store", help="where artifacts are kept")
    parser.add_argument("--records", type=Path, default=Path("build/bench-quant"), help="a record for each subject")
    parser.add_argument(
        "--write", type=Path, help=f"replace what stands below the line `{MARK}` of this page, and its plot beside it"
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    known = [way.name for way in ways(options.images)]
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"there is no way {unknown[0]!r}; there are {', '.join(known)}")
    noise.silence()
    whole = True
    try:
        if options.model is not None:
            whole = _subject(options, words)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.write is not None:
        records = read_all(options.records)
        picture = plot(records, options.write.with_suffix(".svg"))
        write_below(options.write, page(records, picture.name))
    return 0 if whole else 3


def _subject(options: argparse.Namespace, words: Sequence[str]) -> bool:
    """Make and time what one subject lacks; False where the limit left something to the next call."""
    until = time.monotonic() + options.limit
    title = options.title or f"{options.model} on {options.data.partition(':')[0]}"
    file = options.records / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.json"
    every = ways(options.images)
    order = [way.name for way in every]
    wanted = [way for way in every if not options.only or way.name in (FLOAT, *options.only)]
    bed = Bed(
        opt.load(
            options.model,
            checkpoint=options.checkpoint,
            data=options.data,
            image_size=options.image_size,
            store=options.store,
            device="cpu",
        )
    )
    record = _record(title, words, options)
    if (known := read(file)) is not None and known.same_bed(record):
        record = known
    timing = opt.Timing(rounds=options.rounds, processes=1, batch_sizes=(1,), seconds=options.seconds)
    session = bed.base.session
    with Bench(session.store, session.context, timing, ("cpu",), remeasure=options.retime) as bench:
        for way in wanted:
            row = record.row(way.name)
            if row is not None and row.engine and row.inputs == bed.inputs(way) and not options.again:
                continue
            if time.monotonic() > until:
                return False
            start = time.monotonic()
            made = make_row(bed, way, bench)
            facts = {"words": _plain(words), "versions": _versions(), "created": _now()}
            record = record.with_row(made, order).model_copy(update=facts)
            write(record, file)
            said = made.reason or f"top-1 {made.answers.top1:.4f} in {made.engine}"
            print(f"{way.name}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
        if not options.no_speed:
            record = timed(bed, [way for way in every if _stands(record, way)], record, bench)
            write(record, file)
    if not options.no_speed:
        _quantize_again(bed, [way for way in every if _stands(record, way)], record, file, again=options.retime)
    return True


def _quantize_again(bed: Bed, every: Sequence[Way], record: SubjectRecord, file: Path, *, again: bool) -> None:
    """Time quantizing, way by way; the next call goes on where this one is ended."""
    for way in every:
        row = record.row(way.name)
        assert row is not None
        if not way.stages or (row.made_s is not None and not again):
            continue
        row = row.model_copy(update={"made_s": seconds_of(bed, way)})
        record = record.with_row(row, [each.name for each in record.rows])
        write(record, file)
        print(f"{way.name}: quantized in {row.made_s:.1f} s", flush=True)


def _stands(record: SubjectRecord, way: Way) -> bool:
    """Whether a way has a row with an artifact."""
    row = record.row(way.name)
    return row is not None and row.engine is not None


def _record(title: str, words: Sequence[str], options: argparse.Namespace) -> SubjectRecord:
    here = machine(torch.device("cpu"))
    return SubjectRecord(
        title=title,
        words=_plain(words),
        model=options.model,
        data=options.data.partition(":")[0],
        calibration=options.images,
        cpu=here["cpu"],
        cores=here["cores"],
        isa=tuple(here["isa"]),
        versions=_versions(),
        created=_now(),
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _versions() -> dict[str, str]:
    found = {name: version for name, version in versions().items() if name in _LIBRARIES}
    for name in ("nncf", "torchao"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _plain(words: Sequence[str]) -> str:
    return command("benchmarks.quant", words, without=("--no-speed", "--again", "--retime"))


if __name__ == "__main__":
    sys.exit(main())
