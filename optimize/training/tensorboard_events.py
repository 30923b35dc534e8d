"""Writes a training's curves as TensorBoard events while it runs. Needs the extra ``tensorboard``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimize.store.training_history import Epoch, History, Point
from serve.runtime.errors import UserError


class Events:
    """The events of one training, by the number of finished steps.

    Args:
        folder: the folder for the events. None: nothing is written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._writer: Any = None

    @contextmanager
    def opened(self, step: int = 0) -> Iterator[None]:
        """Write within the block. Earlier events of steps after ``step`` are dropped.

        Raises:
            UserError: tensorboard is not installed, or the folder cannot be written.
        """
        if self._folder is None:
            yield
            return
        writers = tensorboard("writing a training's curves")
        try:
            self._writer = writers.SummaryWriter(str(self._folder), purge_step=step, flush_secs=10)
        except OSError as error:
            raise UserError(f"{self._folder} cannot be written: {error.strerror}") from None
        try:
            yield
        finally:
            self._writer.close()
            self._writer = None

    def point(self, point: Point) -> None:
        """Write loss and learning rate of some steps."""
        self._write(point.step, {"loss": point.loss, "learning-rate": point.learning_rate})

    def epoch(self, epoch: Epoch, step: int) -> None:
        """Write an epoch that ends after ``step`` steps."""
        seconds = {f"seconds/{name}": value for name, value in dataclasses.asdict(epoch.times).items()}
        self._write(step, {"epoch-loss": epoch.loss, "held-out-score": epoch.held_out_score, **seconds})

    def _write(self, step: int, values: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)


def write_histories(histories: Sequence[History], folder: Path | None) -> None:
    """Write the events of one artifact's finished trainings, as `Events` writes them during training.

    Raises:
        UserError: as in `Events.opened`.
    """
    for number, history in enumerate(histories, start=1):
        _write_history(history, Events(part(folder, number, len(histories))))


def _write_history(history: History, events: Events) -> None:
    last = history.points[-1].step if history.points else 0
    with events.opened():
        for point in history.points:
            events.point(point)
        for number, epoch in enumerate(history.epochs, start=1):
            events.epoch(epoch, min(number * history.steps, last))


def part(folder: Path | None, number: int, count: int) -> Path | None:
    """Return the folder for training ``number`` (from 1) of the ``count`` of one artifact, whose own is ``folder``."""
    return folder if folder is None or count == 1 else folder / str(number)


def tensorboard(what: str) -> Any:
    """Return torch's module that writes for TensorBoard.

    Raises:
        UserError: tensorboard is not installed. The message says that ``what`` cannot be written.
    """
    try:
        return importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        raise UserError(
            f"{what} for TensorBoard needs the package tensorboard: "
            "python -m pip install -c constraints.txt -e '.[tensorboard]'"
        ) from None
