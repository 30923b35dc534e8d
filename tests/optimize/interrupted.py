"""Trains in processes that SIGKILL ends in the middle: ``python -m tests.optimize.interrupted FOLDER``.

For `test_resuming`. Prints one JSON object: what came out of each case. It forks, so that torch is imported once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize.context import Context
from optimize.data.formats.base import open_data
from optimize.data.records import ImageData
from optimize.data.splits import subset
from optimize.listener import Silent
from optimize.models.model_names import resolve_model
from optimize.models.teacher import Teacher
from optimize.passes import qat
from optimize.passes.qat import Qat
from optimize.run.session import Session
from optimize.store.objects import Store
from optimize.training.config import TrainingConfig
from optimize.training.distil import Distil
from optimize.training.loop import train
from optimize.training.results import TrainingResult
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import CPU, GREY16, TINY_NET

PLAIN = TrainingConfig(epochs=2, batch_size=32)
STEPS = 8
DIGITS = "digits.pickle"
RICH = TrainingConfig(
    epochs=3, max_steps=10, batch_size=32, optimizer="adamw", ema=0.9, accumulate=2, precision="bfloat16",
    label_smoothing=0.1, distil=Distil(teacher="master", features={"relu": "stem_2"}),
)  # fmt: skip
INT8 = Qat(epochs=2, batch_size=32, images=32, freeze_observers_at=1, min_sqnr=0.0, min_agreement=0.0)


class Ending(Silent):
    """Ends the process with the ``at``-th step that is told; counts them, and keeps what is said."""

    def __init__(self, at: int | None) -> None:
        self.at, self.steps, self.lines = at, 0, list[str]()

    def progressed(self, fraction: float, message: str) -> None:
        if message.startswith("epoch"):
            self.steps += 1
            if self.steps == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def said(self, message: str) -> None:
        self.lines.append(message)


def carry_out(folder: Path, settings: TrainingConfig, at: int | None, *, while_writing: bool = False) -> dict[str, Any]:
    """Train a network of random weights in this process, or one that is trained and stored already for int8."""
    listener = Ending(None if while_writing else at)
    if while_writing:
        end_while_writing(at or 0)
    data: ImageData = pickle.loads((folder.parent / DIGITS).read_bytes())
    context = Context(data, GREY16, CPU, listener=listener, checkpoint_seconds=0.0, unfinished=folder / "unfinished")
    if isinstance(settings, Qat):
        session = Session(Store(folder), resolve_model(f"{TINY_NET}:tiny"), context)
        qat.train = without_start  # type: ignore[attr-defined]
        artifact = session.apply(session.baseline(TrainingConfig(epochs=1)).artifact, settings).artifact
        made = {name: digest for file in artifact.card.files for name, digest in records(artifact.folder / file)}
        notes, left = list(artifact.card.notes), [str(path) for path in (folder / ".store" / "unfinished").glob("*")]
    else:
        torch.manual_seed(0)
        module = Tiny(10)
        if settings.distil is not None:
            master = nn.Sequential(
                OrderedDict(stem=nn.Sequential(nn.Conv2d(1, 9, 3, 2, 1), nn.BatchNorm2d(9), nn.ReLU()))
            )
            master.append(nn.Flatten()).append(nn.Linear(9 * 64, 10))
            context = dataclasses.replace(
                context, teacher=Teacher("master", "", master.eval(), GREY16.mean, GREY16.std)
            )
        result = train(module, context, settings)
        losses = [(epoch.loss, epoch.held_out_score) for epoch in result.epochs]
        notes = [f"best={result.best} {losses} {result.history.points}", *result.notes]
        tensors = {name: value.numpy().tobytes() for name, value in module.state_dict().items()}
        made, left = {name: hashlib.sha256(value).hexdigest() for name, value in tensors.items()}, []
    return {"steps": listener.steps, "said": listener.lines, "made": made, "notes": notes, "left": left}


def keep_digits(kept: Path) -> dict[str, Any]:
    """Write some of the digits, so that not each process makes PNG files of all of them."""
    data = open_data("digits")
    some = dataclasses.replace(data, train=subset(data.train, 120, 0), val=subset(data.val, 20, 0))
    kept.write_bytes(pickle.dumps(some))
    return {}


def without_start(module: nn.Module, context: Context, config: TrainingConfig, **options: Any) -> TrainingResult:
    """`train`, whose best epoch is taken also where the network was better before."""
    return train(module, context, config, **{**options, "from_start": False})


def records(program: Path) -> Iterator[tuple[str, str]]:
    """SHA-256 of each record of a program but for what TorchScript knows of the code's names, which it numbers."""
    with zipfile.ZipFile(program) as archive:
        for name in archive.namelist():
            if not name.endswith(("debug_pkl", "serialization_id")):
                yield f"{program.name}/{name}", hashlib.sha256(archive.read(name)).hexdigest()


def end_while_writing(at: int) -> None:
    """End the process in the middle of its ``at``-th checkpoint."""
    save, count = torch.save, iter(range(1, 1000))

    def half(state: object, path: Path, *more: Any, **options: Any) -> None:
        save(state, path, *more, **options)
        if "unfinished" in str(path) and next(count) == at:
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half  # type: ignore[assignment]


def forked(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``work`` gives in a process of its own; ``{"killed": True}`` if SIGKILL ended it."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(work(), pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return {"killed": True}
    return dict(json.loads(text))


def main(folder: Path) -> None:
    torch.set_num_threads(1)  # libgomp's threads do not survive a fork
    torch.export.export(nn.Linear(1, 1), (torch.zeros(1, 1),))  # imports once what each would
    forked(lambda: keep_digits(folder / DIGITS))  # no tensor here: torch's pool of threads would not survive either
    found: dict[str, list[Any]] = {}

    def case(name: str, settings: TrainingConfig, at: int, start: Path | None = None, **options: bool) -> None:
        store = folder / f"{name}-{at}-{len(found)}"
        if start is not None:
            shutil.copytree(start, store)
        killed = forked(lambda: carry_out(store, settings, at, **options))
        found[f"{name} {at}"] = [killed, forked(lambda: carry_out(store, settings, None))]

    found["plain"] = [forked(lambda: carry_out(folder / "plain", PLAIN, None))]
    found["rich"] = [forked(lambda: carry_out(folder / "rich", RICH, None))]
    for at in range(1, STEPS + 1):
        case("plain", PLAIN, at)
    case("writing", PLAIN, 6, while_writing=True)
    case("rich", RICH, 7)
    forked(lambda: carry_out(folder / "start", TrainingConfig(epochs=1), None))
    case("qat", INT8, 6, folder / "start")
    found["qat"] = [forked(lambda: carry_out(folder / "start", INT8, None))]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
