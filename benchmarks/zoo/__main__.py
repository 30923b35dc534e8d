"""Every model of the zoo, one in a process at a time; what was done is not done again: ``make zoo``."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo.names import family, timm_names, torchvision_names
from benchmarks.zoo.page import made_with, page
from benchmarks.zoo.record import ModelRecord, Passed, read, read_all, write, write_all
from benchmarks.zoo.stages import STAGES, Settings
from benchmarks.zoo.watch import run


def take(name: str, options: argparse.Namespace, until: float = math.inf) -> ModelRecord | None:
    """A model's record, made now as far as it is not there; what is killed is started again behind that stage.

    Args:
        name: of the model.
        options: of the command line.
        until: past this, of `time.monotonic`, no stage is begun, and the record is what there is, if anything.
    """
    file, store = _file(name, options), options.store / _safe(name)
    log = file.with_suffix(".log")
    options.records.mkdir(parents=True, exist_ok=True)
    settings, cap = _settings(options), options.memory << 30
    command = [sys.executable, "-m", "benchmarks.zoo.model", name, "--record", str(file), "--store", str(store)]
    environment = os.environ | ({} if options.compile else {"TORCH_COMPILE_DISABLE": "1"})
    while (known := read(file)) is None or not _done(known, settings):
        if (left := until - time.monotonic()) <= 0:
            return known
        ended = run(
            [*command, "--settings", settings.to_json(), "--memory", str(cap), "--seconds", str(left)],
            memory=cap,
            seconds=options.minutes * 60,
            log=log,
            environment=environment,
        )
        record = read(file) or ModelRecord(name=name, family=family(name), running=STAGES[0])
        record = record.model_copy(
            update={
                "peak_bytes": max(record.peak_bytes, ended.peak_bytes),
                "made_on": datetime.date.today(),
                "made_with": made_with(),
            }
        )
        if ended.reason is not None:
            stages = settings.stages
            stage = record.running or next((each for each in stages if each not in record.stages), stages[-1])
            together = stage == "speed" and ended.peak_bytes > cap and settings.large > 0
            if together:
                settings = dataclasses.replace(settings, large=0)  # its executions may fit one after another
            failed = {} if together else {stage: Passed(status="failed", reason=ended.reason)}
            record = record.model_copy(update={"stages": record.stages | failed, "running": None})
        write(record, file)
    if not options.keep and store.exists():
        shutil.rmtree(store)
    return known


def _safe(name: str) -> str:
    return name.replace(":", "-")


def _file(name: str, options: argparse.Namespace) -> Path:
    folder: Path = options.records
    return folder / f"{_safe(name)}.json"


def _take_up(known: Path, options: argparse.Namespace) -> None:
    """Go on from the records that are kept with the sources, which the folder of records is not."""
    for record in read_all(known) if known.exists() else []:
        if read(file := _file(record.name, options)) is None:
            write(record, file)


def _done(record: ModelRecord, settings: Settings) -> bool:
    return all(stage in record.stages for stage in settings.stages)


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        image_size=options.image_size,
        calibration=options.calibration,
        judging=options.judging,
        named_weights=options.weights == "auto",
        speed=not options.no_speed,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Take each model in turn, and write the page and the records after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="models; by default all of torchvision's, and timm's where it is there"
    )
    parser.add_argument("--records", type=Path, default=Path("build/zoo"), help="a record and a log for each model")
    parser.add_argument(
        "--store", type=Path, default=Path("build/zoo-store"), help="artifacts, while a model is worked on"
    )
    parser.add_argument("--keep", action="store_true", help="leave them there")
    parser.add_argument("--again", action="store_true", help="forget what is known of the models named")
    parser.add_argument("--memory", type=int, default=16, help="GiB that a model may have")
    parser.add_argument("--minutes", type=float, default=240, help="that it may take")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    parser.add_argument("--calibration", type=int, default=64, help="images that ranges are found on")
    parser.add_argument("--judging", type=int, default=64, help="images that agreement is judged on")
    parser.add_argument(
        "--weights", choices=("auto", "random"), default="auto", help="torchvision's where there are any"
    )
    parser.add_argument(
        "--compile", action="store_true", help="time torch.compile, too: a minute or two for each model"
    )
    parser.add_argument(
        "--no-speed", action="store_true", help="time nothing now, as where others use the machine; it can be, later"
    )
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after which no stage is begun; the next call goes on"
    )
    parser.add_argument(
        "--known", type=Path, default=None, help="all records in one file, which is read first and written anew"
    )
    parser.add_argument("--write", type=Path, default=None, help="the page")
    options = parser.parse_args(arguments)
    own = torchvision_names()
    if unknown := [name for name in options.names if name not in own and not name.startswith("timm:")]:
        print(f"error: the zoo has no {unknown[0]!r}", file=sys.stderr)
        return 2
    if options.known is not None and options.known.parent.resolve() == options.records.resolve():
        print(f"error: --known {options.known}: each file in --records is read as one model's", file=sys.stderr)
        return 2
    until = time.monotonic() + options.limit
    names = options.names or [*own, *timm_names()]
    if options.known is not None:
        _take_up(options.known, options)
    if options.again:
        for name in names:
            _file(name, options).unlink(missing_ok=True)
    for number, name in enumerate(names, start=1):
        record = take(name, options, until)
        if record is None:
            break
        reasons = "; ".join(f"{stage}: {each.reason}" for stage, each in record.stages.items() if each.reason)
        rest = "" if _done(record, _settings(options)) else ", goes on the next time"
        print(
            f"{number}/{len(names)} {name}: {reasons or 'ok'} ({record.seconds:.0f} s of processor time{rest})",
            flush=True,
        )
        records = sorted(
            (found for file in options.records.glob("*.json") if (found := read(file)) is not None),
            key=lambda record: (record.name not in own, record.name),
        )
        if options.known is not None:
            write_all(records, options.known)
        if options.write is not None:
            options.write.write_text(page(records, _settings(options), own), encoding="utf-8")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended, too
    sys.exit(main())
