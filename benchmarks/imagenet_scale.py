"""Opens and reads an image folder of ImageNet's size: 1,281,167 links to a few hundred JPEGs, in 1,000 classes.

Each figure is taken in a process of its own, beside the bound that it has to keep; the exit code is 1 if one does not.
``make bench-data`` runs it and writes ``docs/benchmarks/data.md``. Needs about 1.4 million directory entries, no space
to speak of, and five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.commands import command
from benchmarks.here import begun, here

CLASSES = 1000
PICTURES = 300

#: What has to be kept: seconds, and MiB resident beyond what importing the libraries takes.
FIRST_SECONDS, AGAIN_SECONDS, DRAW_SECONDS, RESIDENT_MIB = 30.0, 3.0, 0.3, 300.0
STEP_MICROSECONDS = 100.0


def build(root: Path, train: int, val: int, pictures: int) -> None:
    """Draw JPEGs in ``root/pictures``, and link to them in ``root/set/{train,val}/<class>``."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    sources = []
    (root / "pictures").mkdir(parents=True)
    for number in range(pictures):
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        fine = rng.normal(0, 6, (120, 160, 3))
        pixels = np.clip(np.asarray(coarse.resize((160, 120), Image.Resampling.BICUBIC)) + fine, 0, 255)
        sources.append(root / "pictures" / f"{number}.jpg")
        Image.fromarray(pixels.astype(np.uint8)).save(sources[-1], quality=85)
    for part, count in (("train", train), ("val", val)):
        for label in range(CLASSES):
            folder = root / "set" / part / f"n{label * 7919 + 1000000:08d}"
            folder.mkdir(parents=True)
            for image in range(label, count, CLASSES):
                os.link(sources[(image * 31 + label) % pictures], folder / f"{folder.name}_{image}.JPEG")


def link_tree(source: Path, target: Path) -> None:
    """A copy of a folder, file by file, without the bytes."""
    shutil.copytree(source, target, copy_function=os.link)


def run_stage(name: str, cache: Path, **arguments: Any) -> dict[str, Any]:
    """Run a stage in a fresh interpreter with a user's cache folder of its own."""
    words = [sys.executable, "-m", "benchmarks.imagenet_stages", name, json.dumps(arguments)]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name} {arguments}: {result}", file=sys.stderr, flush=True)
    return result


def measure(root: Path, options: argparse.Namespace) -> tuple[list[tuple[str, str, str, bool]], dict[str, Any]]:
    """Every figure as (what, found, bound, kept), and the epochs' memory."""
    began = begun()
    started = time.perf_counter()
    build(root, options.train, options.val, options.pictures)
    print(f"built in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    time.sleep(2.5)  # an index is not kept of a folder that changed a moment ago
    reference, unsplit = f"imagefolder:{root / 'set'}", f"imagefolder:{root / 'set' / 'train'}"
    cache = root / "cache"
    first, again = (run_stage("open", cache, reference=reference) for _ in range(2))
    assert (again["train_fingerprint"], again["val_fingerprint"]) == (
        first["train_fingerprint"],
        first["val_fingerprint"],
    )
    split_first, split_again = (run_stage("open", cache, reference=unsplit) for _ in range(2))
    draw = run_stage("draw", cache, reference=reference)
    steps = run_stage("steps", cache, reference=reference)
    epochs = run_stage(
        "epochs", cache, reference=reference, epochs=options.epochs, batches=options.batches, whole=options.whole
    )
    link_tree(root / "set", root / "elsewhere" / "set")
    copied = run_stage("open", cache, reference=f"imagefolder:{root / 'elsewhere' / 'set'}")
    some_class = next((root / "set" / "val").iterdir())
    os.link(root / "pictures" / "0.jpg", some_class / "new.JPEG")
    more = run_stage("open", cache, reference=reference)
    assert more["val"] == first["val"] + 1

    flat = [entry["main"] for entry in epochs["after"]], [entry["worker_own"] for entry in epochs["after"]]
    growth = max(max(part) - part[0] for part in flat)
    rows = [
        _bounded("opening it for the first time", first["seconds"], FIRST_SECONDS, "s", first["cpu"]),
        _bounded("opening it again", again["seconds"], AGAIN_SECONDS, "s", again["cpu"]),
        _bounded(
            "without val/, split: for the first time", split_first["seconds"], FIRST_SECONDS, "s", split_first["cpu"]
        ),
        _bounded("without val/, split: again", split_again["seconds"], AGAIN_SECONDS, "s", split_again["cpu"]),
        _bounded("drawing 256 calibration images, of each class alike", draw["calibration"], DRAW_SECONDS, "s"),
        _bounded("drawing 5,000 evaluation images (`--val-images`)", draw["val_images"], DRAW_SECONDS, "s"),
        ("holding out a tenth of the training images", f"{draw['hold_out']:.2f} s", "", True),
        ("drawing an epoch's order, once an epoch", f"{steps['whole_order_seconds']:.3f} s", "", True),
        _bounded("a step besides its images", steps["whole_step_microseconds"], STEP_MICROSECONDS, "µs"),
        (f"the same with {first['val']:,} images", f"{steps['small_step_microseconds']:.1f} µs", "", True),
        _bounded("resident after opening it for the first time", first["beyond"], RESIDENT_MIB, "MiB"),
        _bounded("the most meanwhile", first["peak"], RESIDENT_MIB, "MiB"),
        _bounded("resident in training, main process", max(flat[0]), RESIDENT_MIB, "MiB"),
        _bounded("a worker's own, while training", max(flat[1]), RESIDENT_MIB, "MiB"),
        _bounded("the same when it has looked at every path", epochs["every_path"], RESIDENT_MIB, "MiB"),
        _bounded("growth after the first of the epochs, main process and workers", growth, 30.0, "MiB"),
        (
            "fingerprint of a copy elsewhere",
            "the same" if _fingerprints(copied) == _fingerprints(first) else "another",
            "the same",
            _fingerprints(copied) == _fingerprints(first),
        ),
        (
            "with one more image in val/: fingerprint of the training images",
            "the same" if more["train_fingerprint"] == first["train_fingerprint"] else "another",
            "the same",
            more["train_fingerprint"] == first["train_fingerprint"],
        ),
        (
            "with one more image in val/: that of the validation images",
            "another" if more["val_fingerprint"] != first["val_fingerprint"] else "the same",
            "another",
            more["val_fingerprint"] != first["val_fingerprint"],
        ),
    ]
    facts = {"first": first, "epochs": epochs, "began": began, "pictures": options.pictures}
    return rows, facts


def _fingerprints(opened: dict[str, Any]) -> tuple[str, str]:
    return opened["train_fingerprint"], opened["val_fingerprint"]


def _bounded(what: str, found: float, bound: float, unit: str, cpu: float | None = None) -> tuple[str, str, str, bool]:
    digits = 0 if unit == "MiB" else 1 if unit == "µs" else 2
    beside = f" ({cpu:.2f} of a core)" if cpu is not None else ""
    return what, f"{found:.{digits}f} {unit}{beside}", f"at most {bound:g} {unit}", found <= bound


def page(rows: list[tuple[str, str, str, bool]], facts: dict[str, Any], made: str) -> str:
    """The figures as Markdown, with the command that made them."""
    first, epochs = facts["first"], facts["epochs"]
    lines = [
        "# Data of ImageNet's size",
        "",
        f"Made by `{made}` on {facts['began']}: {here('torch', 'numpy', isa=False)}. The folder has "
        f"{first['train']:,} training and {first['val']:,} validation images in {CLASSES:,} classes. They are hard "
        f"links to {facts['pictures']} JPEGs of 160x120, which the script draws. The folder lies on a local disk. The "
        "system still has its directories in memory. The training images' fingerprint is of the kind "
        f"`{first['kind']}`.",
        "",
        "| | found | bound | |",
        "|---|---:|---:|---|",
        *(
            f"| {what} | {found} | {bound} | {('kept' if kept else '**missed**') if bound else ''} |"
            for what, found, bound, kept in rows
        ),
        "",
        "Memory is what a process has resident beyond its libraries. To import these (torch with its CUDA build, "
        f"torchvision) takes {epochs['libraries']:.0f} MiB before anything is opened. A worker is forked from the main "
        "process. It shares that process's libraries and arrays. The table shows a worker's own memory and its total, "
        "libraries included.",
        "",
        "| epoch | images read | seconds | main process | a worker's own | a worker in all |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {entry['epoch']} | {entry['images']:,} | {entry['seconds']:.1f} | {entry['main']:.0f} MiB | "
            f"{entry['worker_own']:.0f} MiB | {entry['worker']:.0f} MiB |"
            for entry in epochs["after"]
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Build the folder, run the stages, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, default=1_281_167, help="training images")
    parser.add_argument("--val", type=int, default=50_000, help="validation images")
    parser.add_argument("--pictures", type=int, default=PICTURES, help="JPEGs that they are links to")
    parser.add_argument("--epochs", type=int, default=10, help="epochs that are begun")
    parser.add_argument("--batches", type=int, default=100, help="batches that are read of each of them")
    parser.add_argument("--whole", action="store_true", help="read one epoch whole at the end, which takes long")
    parser.add_argument("--folder", type=Path, default=None, help="where to build; the system's temporary folder")
    parser.add_argument("--write", type=Path, default=None, help="the Markdown file to write; else it is printed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imagenet-scale-", dir=options.folder) as folder:
        rows, facts = measure(Path(folder), options)
        text = page(rows, facts, command("benchmarks.imagenet_scale", sys.argv[1:]))
    if options.write is not None:
        options.write.write_text(text, encoding="utf-8")
    else:
        print(text)
    missed = [what for what, _, _, kept in rows if not kept]
    for what in missed:
        print(f"missed: {what}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
