"""Opens a job: finds and checks its session, weights and run before anything is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from optimize.context import Context
from optimize.data.augmentation_choice import IN_WORDS
from optimize.data.class_order import CHECKPOINT, ORDERS, with_order
from optimize.data.classes import check_classes, with_classes
from optimize.data.formats.base import default_data, open_data
from optimize.data.grey_depth import depth_notes
from optimize.data.records import ImageData
from optimize.data.splits import subset
from optimize.listener import SILENT, Listener
from optimize.measure.machine import measured_devices, resolve_device
from optimize.models.checkpoint import Checkpoint, read_checkpoint
from optimize.models.model_names import resolve_model, with_checkpoint, with_named_weights
from optimize.models.module_source import module_source
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.preprocessing_config import Wish
from optimize.models.source import ModelSource
from optimize.run.identity import Identity
from optimize.run.job import Job
from optimize.run.session import Session
from optimize.store.atomic_files import check_writable
from optimize.store.objects import Store
from optimize.training.distributed.environment import processes
from optimize.training.distributed.first_process import only_first
from optimize.training.tensorboard_events import tensorboard
from serve.common import layout
from serve.runtime.device.cores import cores


@dataclass(frozen=True)
class Opened:
    """A job whose parts exist and fit together: the session, the run's name, and the weights if there are any.

    ``devices`` are those to measure on. ``identity`` is the run's model and data. ``preprocessing_origins`` says in
    words where each part of the preprocessing comes from.
    """

    session: Session
    run: str
    identity: Identity
    checkpoint: Checkpoint | None
    origin: Path | None
    preprocessing_origins: Mapping[str, str]
    devices: tuple[str, ...]


def open_job(job: Job, listener: Listener, recipe: Wish | None = None) -> Opened:
    """Find and check everything that a job names.

    Args:
        job: the user's job.
        listener: receives one line about what was found, and about the preprocessing and its origin.
        recipe: the recipe's preprocessing. The job's takes precedence.

    Raises:
        UserError: something is missing, cannot be read, or does not fit.
    """
    only_first()
    together = processes(job.processes)
    if job.tensorboard is not None:
        tensorboard("writing a training's curves")
        check_writable(job.tensorboard)
    device = resolve_device(job.device)
    devices = measured_devices(job.measure, device)
    source, weights = module_source(job.model) if isinstance(job.model, nn.Module) else (resolve_model(job.model), None)
    source, checkpoint, origin = (source, weights, Path(source.name)) if weights else _with_weights(job, source)
    chosen_by_task = job.data is None
    if chosen_by_task:
        job = job.model_copy(update={"data": default_data(source.task)})
    listener.started("opening")  # until the next step begins
    torch.set_num_threads(min(torch.get_num_threads(), cores()))  # torch (2.14) ignores a container's CPU quota
    data = _data(job, listener, checkpoint, origin)
    source.check_task(data.task, data.name)
    validation = f"{len(data.val)} of {data.val_of}" if data.val_of else f"{len(data.val)}"
    wishes = [wish for wish in (recipe, job.preprocessing) if wish is not None]
    chosen = choose_preprocessing(source, data, job.image_size, wishes)
    preprocessing = chosen.preprocessing
    store = Store(job.store)
    context = Context(
        data,
        preprocessing,
        device,
        job.seed,
        listener,
        skip_unreadable=job.skip_unreadable,
        scratch=store.scratch,
        processes=together,
        tensorboard=job.tensorboard,
        outputs=job.output_names,
    )
    listener.said(
        f"{source.name} on {data.name}: {len(data.classes)} {context.task.named}, {len(data.train)} training and "
        f"{validation} validation images, input {'x'.join(map(str, preprocessing.shape))}, {device}; "
        f"preprocessing: {chosen}"
    )
    listener.said(f"training images are {IN_WORDS[data.augment]}")
    for note in (*data.notes, *depth_notes(data.train, preprocessing.pixel_max)):
        listener.said(note)
    for note in checkpoint.notes if checkpoint is not None else ():
        listener.said(f"{origin}: {note}")
    session = Session(
        store,
        source,
        context,
        lambda name: listener.said(f"{name}: another run is building it"),
        functools.partial(reopen, words, recipe) if (words := _anywhere(job)) else None,
        chosen.origins,
    )
    reference = job.data if isinstance(job.data, str) else data.name
    run = job.run or layout.run_name(source.reference, layout.PLAIN_DATA if chosen_by_task else reference)
    identity = Identity.of(source.reference, reference, source, data)
    return Opened(session, run, identity, checkpoint, origin, chosen.origins, devices)


def reopen(job: Job, recipe: Wish | None = None) -> Session:
    """Open the session of a job again in another process, without messages."""
    return open_job(job, SILENT, recipe).session


def _anywhere(job: Job) -> Job | None:
    """Return the same job with paths that hold in any folder. None if it has parts that are not text."""
    if not isinstance(job.model, str) or not isinstance(job.data, str):
        return None
    places = {
        "model": layout.model_anywhere(job.model),
        "checkpoint": job.checkpoint.resolve() if job.checkpoint else None,
        "data": layout.data_anywhere(job.data),
        "classes": job.classes.resolve() if isinstance(job.classes, Path) else job.classes,
        "class_order": _order_anywhere(job.class_order),
        "store": job.store.resolve(),
        "tensorboard": None,  # only for the trainings of this process
    }
    return job.model_copy(update=places)


def _order_anywhere(order: str | Path | tuple[str, ...] | None) -> str | Path | tuple[str, ...] | None:
    is_file = isinstance(order, Path) or (isinstance(order, str) and order not in (*ORDERS, CHECKPOINT))
    return Path(order).resolve() if is_file and isinstance(order, str | Path) else order


def _data(job: Job, listener: Listener, checkpoint: Checkpoint | None, origin: Path | None) -> ImageData:
    """Open the data with the job's settings."""
    wanted = job.data
    assert wanted is not None, "`open_job` has set it"
    data = (
        open_data(wanted, seed=job.seed, listener=listener, accept_gaps=job.accept_gaps)
        if isinstance(wanted, str)
        else wanted
    )
    own = data.classes
    if job.classes is not None:
        data = with_classes(data, job.classes)
    if data.order is None:  # otherwise it was opened in the order of a run
        data = with_order(data, own, job.class_order, checkpoint.classes if checkpoint else None, origin)
    check_classes(data)
    if job.augment is not None:
        data = dataclasses.replace(data, augment=job.augment)
    if job.val_images is not None and job.val_images < len(data.val):
        data = dataclasses.replace(data, val=subset(data.val, job.val_images, job.seed), val_of=len(data.val))
    return data


def _with_weights(job: Job, source: ModelSource) -> tuple[ModelSource, Checkpoint | None, Path | None]:
    """Return the source adapted to its weights, the weights, and their origin for messages."""
    if job.weights is not None:
        source, checkpoint = with_named_weights(source, job.weights)
        return source, checkpoint, Path(f"torchvision's {job.weights}")
    if job.checkpoint is not None:
        checkpoint = read_checkpoint(
            job.checkpoint, trust_pickle=job.trust_checkpoint, weights_key=job.weights_key, home=source.home
        )
        return with_checkpoint(source, checkpoint), checkpoint, job.checkpoint
    return source, None, None
