"""What the user asks for, and the session that it becomes: everything is checked before anything is built."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from optimize.context import Context
from optimize.data.formats.base import open_data
from optimize.listener import Listener
from optimize.measure.machine import resolve_device
from optimize.models.checkpoint import Checkpoint, download_weights, read_checkpoint
from optimize.models.preprocessing import default_preprocessing
from optimize.models.source import ModelSource, resolve_model
from optimize.run.session import Session
from optimize.store.objects import Store
from serve.runtime.errors import UserError


@dataclass(frozen=True)
class Job:
    """What the user asks for, in the words of the command line.

    Attributes:
        model: a torchvision name, ``path/to/file.py:factory`` or ``package.module:factory``.
        checkpoint: a file of weights; None trains the baseline.
        data: ``digits``, ``imagefolder:DIR`` or a torchvision data set.
        recipe: a YAML file; None takes the default, every pass.
        store: where runs are kept.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        image_size: side of the network's input in pixels; None leaves it to model and data.
        weights: name of torchvision's own weights, such as ``DEFAULT``.
        run: the run's name; the model's by default.
        trust_checkpoint: let the checkpoint's pickle run code.
        seed: of every random choice.
        remeasure: time everything anew, even if the same set was timed before.
    """

    model: str
    checkpoint: Path | None = None
    data: str = "digits"
    recipe: Path | None = None
    store: Path = Path("model_store")
    device: str = "auto"
    image_size: int | None = None
    weights: str | None = None
    run: str | None = None
    trust_checkpoint: bool = False
    seed: int = 0
    remeasure: bool = False


@dataclass(frozen=True)
class Opened:
    """A job whose parts were found and fit: the session, the run's name, and the weights if there are any."""

    session: Session
    run: str
    checkpoint: Checkpoint | None
    origin: Path | None


def open_job(job: Job, listener: Listener) -> Opened:
    """Find and check everything that a job names.

    Raises:
        UserError: something is missing, unreadable, or does not fit.
    """
    device = resolve_device(job.device)
    source = resolve_model(job.model)
    if job.run is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", job.run):
        raise UserError(
            f"run name {job.run!r}: use letters, digits, '-', '_' and '.', beginning with a letter or digit"
        )
    if job.checkpoint is not None and job.weights is not None:
        raise UserError("--checkpoint and --weights are both given; the weights can come from one of them only")
    checkpoint, origin = _checkpoint(job, source)
    data = open_data(job.data, seed=job.seed)
    preprocessing = default_preprocessing(source, data, job.image_size)
    context = Context(data, preprocessing, device, job.seed, listener)
    store = Store(job.store)
    listener.said(
        f"{source.name} on {data.name}: {len(data.classes)} classes, {len(data.train)} training and "
        f"{len(data.val)} validation images, input {'x'.join(map(str, preprocessing.shape))}, {device}"
    )
    session = Session(store, source, context, lambda name: listener.said(f"{name}: another run is making it"))
    return Opened(session, job.run or source.name, checkpoint, origin)


def _checkpoint(job: Job, source: ModelSource) -> tuple[Checkpoint | None, Path | None]:
    if job.weights is not None:
        return download_weights(source, job.weights), Path(f"torchvision's {job.weights}")
    if job.checkpoint is not None:
        return read_checkpoint(job.checkpoint, trust_pickle=job.trust_checkpoint), job.checkpoint
    return None, None
