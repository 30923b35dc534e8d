"""What the costliest images that a server takes cost it, against a stated bound for each format.

The page is docs/benchmarks/decoding.md.

``make bench-decoding``. Each file of `benchmarks.hostile.costly` is prepared as the servers do it, with a server's
budget, in one thread: its processor time, the least of some repeats, in seconds. The exit code is 1 where one takes
longer than its format's bound.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.below import add_option, tell
from benchmarks.commands import command
from benchmarks.here import here
from benchmarks.hostile.costly import costly

REPEATS: Final = 3


@dataclass(frozen=True)
class Bound:
    """The most seconds of processor time for a file: ``fixed``, and for each megabyte and each counted megapixel."""

    fixed: float
    megabyte: float
    megapixel: float

    def of(self, size: int, pixels: int) -> float:
        """The seconds that a file of so many bytes may take, which counts as so many pixels."""
        return self.fixed + self.megabyte * size / 1e6 + self.megapixel * pixels / 1e6


#: By format: some twice what was measured on the slowest of the machines.
BOUNDS: Final = {
    "BMP": Bound(0.7, 0.02, 0.04),
    "GIF": Bound(0.1, 0.02, 0.04),
    "JPEG": Bound(0.1, 0.2, 0.13),
    "PNG": Bound(0.3, 0.15, 0.08),
    "TIFF": Bound(0.7, 0.02, 0.05),
    "WEBP": Bound(0.1, 0.02, 0.08),
}


@dataclass(frozen=True)
class Cost:
    """What a file cost.

    Attributes:
        kind: its format.
        title: what it is, in words.
        size: bytes.
        pixels: that it counts as against the budget; 0: it was refused by its headers.
        status: 200, or that of the refusal.
        seconds: of processor time.
    """

    kind: str
    title: str
    size: int
    pixels: int
    status: int
    seconds: float

    @property
    def share(self) -> float:
        """Of its format's bound; above 1 it is broken."""
        return self.seconds / BOUNDS[self.kind].of(self.size, self.pixels)


def measure(files: Iterable[tuple[str, str, Callable[[], bytes]]], repeats: int) -> Iterator[Cost]:
    """Prepare each file as a server does, and time it."""
    import torch

    from serve.runtime.card.budget import SERVING
    from serve.runtime.card.card import Preprocessing
    from serve.runtime.errors import Refusal
    from serve.runtime.service.image_loading import header_of, load_within

    torch.set_num_threads(1)
    preprocessing = Preprocessing(resize=256, crop=(224, 224))
    for kind, title, make in files:
        data = make()
        header = header_of(data, SERVING)
        taken = []
        for _ in range(repeats):
            begun = time.thread_time()
            ((_, found),) = load_within([data], preprocessing, SERVING)
            taken.append(time.thread_time() - begun)
        pixels = 0 if isinstance(header, Refusal) else header.pixels
        yield Cost(kind, title, len(data), pixels, found.status if isinstance(found, Refusal) else 200, min(taken))


def page(costs: Sequence[Cost], words: Sequence[str]) -> str:
    """What stands below the mark of docs/benchmarks/decoding.md."""
    lines = [
        f"Made by `{command('benchmarks.decoding', words)}` on {datetime.date.today().isoformat()}: "
        f"{here('torch', 'torchvision', 'pillow', isa=False)}.",
        "",
        "## The bounds",
        "",
        "| format | s | s a megabyte | s a megapixel | nearest to it | of the bound |",
        "|---|---:|---:|---:|---|---:|",
    ]
    for kind, bound in BOUNDS.items():
        worst = max((cost for cost in costs if cost.kind == kind), key=lambda cost: cost.share, default=None)
        near, share = ("–", "–") if worst is None else (worst.title, f"{worst.share:.0%}")
        row = (kind, f"{bound.fixed:g}", f"{bound.megabyte:g}", f"{bound.megapixel:g}", near, share)
        lines.append(f"| {' | '.join(row)} |")
    lines += [
        "",
        "## The files",
        "",
        "| format | file | MB | megapixels, as counted | answered | s | bound, s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for cost in costs:
        bound_s = BOUNDS[cost.kind].of(cost.size, cost.pixels)
        sizes = (f"{cost.size / 1e6:.2f}", f"{cost.pixels / 1e6:.1f}" if cost.pixels else "–", str(cost.status))
        cells = (cost.kind, cost.title, *sizes, f"{cost.seconds:.3f}", f"{bound_s:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the tables; the exit code is 1 where a bound is broken."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"of each file ({REPEATS})")
    parser.add_argument("--format", choices=sorted(BOUNDS), help="the files of one format alone")
    add_option(parser)
    options = parser.parse_args(words)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    files = [entry for entry in costly() if options.format in (None, entry[0])]
    costs = list(measure(files, options.repeats))
    tell(page(costs, words), options.write)
    broken = [cost for cost in costs if cost.share > 1]
    for cost in broken:
        print(f"{cost.kind}, {cost.title}: {cost.seconds:.3f} s, {cost.share:.2f} times its bound", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
