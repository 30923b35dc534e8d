"""Fills the table of docs/benchmarks/cifar.md, a cell at a time, and can be ended at any time: ``make table-cifar``.

Cells that are known (``benchmarks/records/cifar.json``) are not made again. What was made of an unfinished cell lies in
the store, and a training that was killed goes on. Without ``--data`` only the page is written, of what is known.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.below import MARK, write_below
from benchmarks.cifar.making import Workshop
from benchmarks.cifar.page import page
from benchmarks.cifar.provenance import changed
from benchmarks.cifar.record import Cell, Table, read, write
from benchmarks.cifar.rows import ROWS, Network
from benchmarks.commands import command
from optimize.report.number_format import percent, points
from serve.runtime.errors import PipelineError

_RECORDS, _SHORT_RECORDS = Path("benchmarks/records/cifar.json"), Path("build/cifar.json")
_NAMES = [row.name for row in ROWS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the cells that are lacking, and write the page after each.

    Returns:
        The exit code: 3 where the limit left some, 1 where one could not be made.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(words)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least one is needed")
    try:
        return _fill(options, words)
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cifar", description=__doc__)
    parser.add_argument("--data", help="CIFAR-10, such as imagefolder:DIR; without it only the page is written")
    parser.add_argument("--resnet20", type=Path, metavar="FILE", help="its weights; by default it is trained")
    parser.add_argument("--resnet56", type=Path, metavar="FILE", help="its weights; by default it is trained")
    parser.add_argument("--seeds", type=int, default=1, help="of each row: 0, 1 …; all rows with one before the next")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=_NAMES, help=f"of {', '.join(_NAMES)}")
    parser.add_argument("--epochs", type=int, help="of each training of a recipe and its control, instead of its own")
    parser.add_argument("--short", action="store_true", help="a few steps on a few images, to see that all works")
    parser.add_argument("--no-speed", action="store_true", help="time nothing, as where others use the machine")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no cell is begun")
    parser.add_argument("--device", default="auto", help="where to train: auto, cpu, cuda or cuda:N")
    parser.add_argument("--processes", type=int, default=1, help="that train together")
    parser.add_argument("--store", type=Path, default=Path("model_store"), help="where artifacts are kept")
    parser.add_argument("--records", type=Path, help=f"the cells; by default {_RECORDS}, of --short {_SHORT_RECORDS}")
    parser.add_argument("--write", type=Path, help=f"replace what stands below the line `{MARK}` of this page")
    return parser


def _fill(options: argparse.Namespace, words: Sequence[str]) -> int:
    until = time.monotonic() + options.limit
    records = options.records or (_SHORT_RECORDS if options.short else _RECORDS)
    table = read(records)
    data = options.data or ("digits" if options.short else None)
    if data is None:
        return _ended(0, options.write, table)
    failed = 0
    files: dict[Network, Path | None] = {"resnet20": options.resnet20, "resnet56": options.resnet56}
    for seed in range(options.seeds):
        shop = Workshop(
            seed=seed,
            data=data,
            checkpoints={network: file for network, file in files.items() if file is not None},
            store=options.store,
            command=command("benchmarks.cifar", words, without=("--no-speed",)),
            epochs=options.epochs,
            short=options.short,
            timed=not options.no_speed,
            device=options.device,
            processes=options.processes,
        )
        with contextlib.closing(shop):
            for row in ROWS:
                if (options.only and row.name not in options.only) or _stands(table.cell(shop.key(row))):
                    continue
                if time.monotonic() > until:
                    return _ended(3, options.write, table)
                cell = shop.make(row)
                table = table.with_cell(cell, _NAMES)
                write(table, records)
                print(_said(cell), flush=True)
                failed |= cell.judged is None
                _publish(options.write, page(table, changed))
    return _ended(failed, options.write, table)


def _ended(code: int, where: Path | None, table: Table) -> int:
    _publish(where, page(table, changed))
    return code


def _stands(cell: Cell | None) -> bool:
    """Whether a cell need not be made: it was judged, or would fail by the same code again."""
    return cell is not None and (cell.judged is not None or not any(changed(cell)))


def _publish(where: Path | None, text: str) -> None:
    if where is not None:
        where.parent.mkdir(parents=True, exist_ok=True)
        write_below(where, text)


def _said(cell: Cell) -> str:
    if cell.judged is None:
        return f"{cell.row}, seed {cell.seed}: not made: {cell.reason}"
    difference = points(cell.judged.difference.delta)
    return f"{cell.row}, seed {cell.seed}: top-1 {percent(cell.judged.top1)}, {difference} points to the control"


if __name__ == "__main__":
    sys.exit(main())
