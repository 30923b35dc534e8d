"""The command ``tune``, which measures how an artifact is best served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, cast

import typer

from serve.cli.shared_arguments import Data, Store
from serve.common.command_line import reported
from serve.common.hints import DEFAULT_STORE, command
from serve.runtime.errors import UserError

_TIMES = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_SIZES = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def tune(
    run: Annotated[
        str, typer.Argument(metavar="RUN[/ARTIFACT]", help="A run (its recommended artifact), or RUN/ARTIFACT.")
    ],
    *,
    store: Store = DEFAULT_STORE,
    data: Data = None,
    p99: Annotated[
        str, typer.Option(metavar="TIME", help="Limit of the 99th percentile of latency, such as 20ms.")
    ] = "20ms",
    objective: Annotated[
        str, typer.Option(help="throughput (highest rate within --p99) or latency (lowest p99 at --rate).")
    ] = "throughput",
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second for --objective latency.", show_default="half of the present saturation rate"
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit of the memory of the server's processes, such as 2GB.")
    ] = None,
    server: Annotated[str, typer.Option(help="Server to tune: own or torchserve.")] = "own",
    photos: Annotated[
        Path | None, typer.Option(help="Folder of images to send. Default: pictures of 0.1 to 0.3 megapixels.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.2, help="Length of one measurement, in seconds.", show_default="4")
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="Measure for one second each and draw no curve: a quick trial.")
    ] = False,
) -> None:
    """Find the best way to serve RUN on this machine by measurement, and write it beside its card.

    Each candidate (engine, threads, workers, decode threads, batch size and delay) is started and loaded at given
    request rates. If it is interrupted, start it again: it continues where it stopped. It takes 4 to 10 minutes on an
    otherwise idle machine. Archives do not change: pack them again.
    """
    with reported():
        from serve.common import layout
        from serve.runs import sealed_files, stored_runs
        from serve.runtime.card.serving import SERVING_FILE
        from serve.tune.search import Goal, Objective
        from serve.tune.servers import KINDS, ended_in_order
        from serve.tune.space import describe
        from serve.tune.tuning import CURVE_FILE, TUNING_FILE, Settings
        from serve.tune.tuning import tune as find

        if objective not in ("throughput", "latency"):
            raise UserError(f"--objective must be throughput or latency, got {objective!r}")
        if server not in KINDS:
            raise UserError(f"--server must be own or torchserve, got {server!r}")
        if rate is not None and rate <= 0:
            raise UserError(f"--rate must be above 0 requests a second, got {rate:g}")
        if rate is not None and objective == "throughput":
            raise UserError(f"--rate {rate:g} needs --objective latency; --objective throughput searches for the rate")
        if seconds is not None and short:
            raise UserError(f"--seconds {seconds:g} cannot be used with --short, which measures for one second each")
        goal = Goal(
            cast(Objective, objective),
            _read("--p99", p99, _TIMES, "20ms"),
            rate,
            None if memory is None else round(_read("--memory", memory, _SIZES, "2GB")),
        )
        target = stored_runs.find_target(run, data)
        if target.name is not None:
            raise UserError(f"tuning takes RUN/ARTIFACT without NAME=, not {run}")
        folder = layout.artifact_folder(
            store, target.run, target.artifact or stored_runs.recommended(store, target.run)
        )
        sealed_files.require(store / target.run, folder.relative_to(store / target.run).as_posix())
        settings = Settings(
            server,
            seconds=1.0 if short else seconds or Settings.seconds,
            warm_s=0.3 if short else 1.0,
            photos=photos,
            curve=not short,
        )
        typer.echo(f"{folder}: {server}, {objective} with a p99 of at most {goal.p99_ms:g} ms")
        with ended_in_order():
            found = find(folder, goal, settings, typer.echo)
            with sealed_files.writing(store / target.run):
                sealed_files.reseal(
                    store / target.run, [folder / name for name in (TUNING_FILE, CURVE_FILE, SERVING_FILE)]
                )
        way, outcome = describe(found.chosen.way, server), found.chosen.outcome
        if found.chosen is found.usual:
            typer.echo(f"kept the present settings: {way} ({outcome}); nothing else proved better")
        else:
            typer.echo(f"chosen: {way} ({outcome}); before: {found.usual.outcome}")
        if not short:
            typer.echo(f"curve: {folder / CURVE_FILE}")
        typer.echo(f"pack it with: {command(f'serve package {target.run}', store)}")


def _read(option: str, word: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    match = re.fullmatch(rf"([0-9]+(?:\.[0-9]+)?)\s*({'|'.join(units)})", word.strip())
    if match is None or float(match[1]) == 0:
        raise UserError(
            f"{option} must be a number above 0 and a unit ({', '.join(units)}), such as {example}; got {word!r}"
        )
    return float(match[1]) * units[match[2]]
