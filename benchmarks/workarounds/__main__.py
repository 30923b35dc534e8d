"""Which workarounds the installed libraries still need: ``make check-workarounds``.

The network of each record that works around a library's fault runs in that library with the record and without it. If
its answers are as good without it, the record is no longer needed with this version, unless the fault was seen in this
very version: then the network does not show it. Speed and memory are not measured.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

import torch

from benchmarks.workarounds.engines import MARGIN, installed, outcome, runs_in
from optimize.quantization.tables import records
from optimize.tracing.rewrite_table import Fault, Library


def verdict(name: str, fault: Fault) -> tuple[str, bool]:
    """What is said of a record and a fault, and whether the record's network works with it."""
    library = runs_in(fault)
    found = installed(library)
    if why := _unchecked(fault, library):
        return f"{why}: not checked here", True
    before = outcome(name, library, without=False)
    if isinstance(before, str):
        return f"cannot be checked with {library} {found}: {before}", False
    after = outcome(name, library, without=True)
    if isinstance(after, str):
        return f"still needed with {library} {found}: without it {after}", True
    pairs = [*zip(before, after, strict=True)]
    if any(more - less > MARGIN for more, less in pairs):
        figures = "; ".join(f"{more:.1f}, without it {less:.1f}" for more, less in pairs)
        return f"still needed with {library} {found}: {figures}", True
    if str(found).startswith(seen_last(fault.seen)):
        return f"not judged: its network does not show the fault with {library} {found}, in which it was seen", True
    return f"no longer needed with {library} {found}", True


def seen_last(versions: str) -> str:
    """Return the last of the versions in which a fault was seen, such as ``2.14`` of ``2.11 to 2.14``."""
    *_, last = re.finditer(r"\d+(?:\.\d+)*", versions)
    return last[0]


def _unchecked(fault: Fault, library: Library) -> str:
    """Why a fault cannot be seen here; empty if it can."""
    if fault.costs != "answers":
        return fault.costs
    if installed(library) is None:
        return f"{library} is not installed"
    if fault.library == "onednn" and not torch.cpu._is_amx_tile_supported():
        return "this CPU has no AMX"
    return ""


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each record and fault; exit code 1 where a record's network fails with the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workarounds", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="RECORD", help="only these records; see `optimize workarounds`")
    wanted = parser.parse_args(words).names
    known = {record.name: record for _, record in records()}
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"there is no record {unknown[0]}; `python -m optimize workarounds` lists them")
    works = True
    for name, record in known.items():
        for fault in record.faults if not wanted or name in wanted else ():
            said, worked = verdict(name, fault)
            works &= worked
            print(f"{name} ({fault.library} {fault.seen}): {said}", flush=True)
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main())
