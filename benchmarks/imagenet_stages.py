"""What is done with a folder of ImageNet's size, a stage at a time, each in a process of its own: see `imagenet_scale`.

``python -m benchmarks.imagenet_stages NAME ARGUMENTS`` prints what it found as a line of JSON; the arguments are JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Images of a batch.
BATCH = 64
MIB = 1 << 20


def resident(pid: int | None = None) -> dict[str, float]:
    """MiB that a process has in memory, and of these what is its own alone."""
    import psutil

    memory = psutil.Process(pid).memory_full_info()
    return {"rss": memory.rss / MIB, "uss": memory.uss / MIB}


def stage_open(reference: str) -> dict[str, Any]:
    """Open a data set: seconds, and MiB beyond the imports."""
    import optimize.data.formats.base as formats
    import optimize.data.loading

    formats.formats()
    import optimize.data.folder_index  # noqa: F401 - imported when something is opened; counted as a library here

    before = resident()
    started, used = time.perf_counter(), time.process_time()
    data = formats.open_data(reference)
    return {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - used,
        "libraries": before["rss"],
        "beyond": resident()["rss"] - before["rss"],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before["rss"],
        "train": len(data.train),
        "val": len(data.val),
        "kind": data.train.identity.kind,
        "train_fingerprint": data.train.fingerprint,
        "val_fingerprint": data.val.fingerprint,
    }


def stage_draw(reference: str) -> dict[str, Any]:
    """Draw 256 calibration images, 5,000 to evaluate with, and hold out a tenth: seconds without decoding."""
    import torch

    from optimize.data.formats.base import open_data
    from optimize.data.loading import loader
    from optimize.data.splits import hold_out, subset
    from serve.runtime.card.card import Preprocessing

    data = open_data(reference)
    found = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        found[name] = time.perf_counter() - started

    with timed("calibration"):
        drawn = loader(data.train, Preprocessing(72, (64, 64)), batch_size=32, device=torch.device("cpu"), limit=256)
    assert len(drawn.split) == 256
    with timed("val_images"):
        assert len(subset(data.val, 5000)) == 5000
    with timed("hold_out"):
        hold_out(data.train, 0.1, 0)
    with timed("decoding"):
        list(drawn)
    return found


def stage_steps(reference: str) -> dict[str, Any]:
    """What a step costs besides its images: asking for the number of batches, and cutting the next one's rows."""
    import torch

    from optimize.data.formats.base import open_data
    from optimize.data.loading import _Batches, loader
    from serve.runtime.card.card import Preprocessing

    data = open_data(reference)
    found = {}
    for title, split in (("whole", data.train), ("small", data.val)):
        batches = loader(split, Preprocessing(72, (64, 64)), batch_size=BATCH, device=torch.device("cpu"), shuffle=True)
        started = time.perf_counter()
        order = batches._order(1)
        found[f"{title}_order_seconds"] = time.perf_counter() - started
        started = time.perf_counter()
        steps = 0
        for _ in _Batches(order, BATCH, len(batches)):
            len(batches)
            steps += 1
        found[f"{title}_step_microseconds"] = (time.perf_counter() - started) / steps * 1e6
    return found


def stage_epochs(reference: str, epochs: int, batches: int, whole: bool) -> dict[str, Any]:
    """Read ``batches`` batches in each of some epochs, then perhaps one epoch whole; memory after each."""
    import psutil
    import torch

    from optimize.data import loading, pixels
    from optimize.data.formats.base import formats, open_data
    from optimize.data.splits import hold_out
    from serve.runtime.card.card import Preprocessing

    formats()
    libraries = resident()["rss"]
    data = open_data(reference)
    fit, _ = hold_out(data.train, 0.1, 0)
    pixels.MEMORY_LIMIT = 0  # small pictures: the memory for all of them would do
    stream = loading.loader(
        fit, Preprocessing(36, (32, 32)), batch_size=BATCH, device=torch.device("cpu"), shuffle=True
    )
    after = []

    def note(name: str, seconds: float, read: int) -> None:
        workers = [resident(child.pid) for child in psutil.Process().children()]
        workers = [worker for worker in workers if worker["rss"] > 50]  # not the resource tracker
        main = resident()
        after.append(
            {
                "epoch": name,
                "seconds": seconds,
                "images": read * BATCH,
                "main": main["rss"] - libraries,
                "worker": max(worker["rss"] for worker in workers),
                "worker_own": max(worker["uss"] for worker in workers),
                "workers": len(workers),
            }
        )

    for number in range(epochs + whole):
        limit = batches if number < epochs else len(stream)
        started = time.perf_counter()
        read = 0
        running = stream.epoch(number)
        for _ in running:
            read += 1
            if read == limit:
                break
        note(f"{number + 1}" if number < epochs else f"{number + 1}, whole", time.perf_counter() - started, read)
        del running
    return {"libraries": libraries, "after": after, "every_path": _of_a_fork(fit.sources)}


def _of_a_fork(sources: Sequence[Any]) -> float:
    """MiB that are a forked process's own when it has looked at every path, as a worker has after a whole epoch."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def look() -> None:
        count = sum(1 for _ in sources)
        theirs.send((count, resident()["uss"]))

    process = context.Process(target=look)
    process.start()
    count, own = ours.recv()
    process.join()
    assert count == len(sources)
    return float(own)


STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "open": stage_open,
    "draw": stage_draw,
    "steps": stage_steps,
    "epochs": stage_epochs,
}


if __name__ == "__main__":
    _, wanted, words = sys.argv
    print(json.dumps(STAGES[wanted](**json.loads(words))))
