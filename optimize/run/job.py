"""What the user asks for, and the session that it becomes: everything is checked before anything is built."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import ConfigDict, Field, InstanceOf, field_validator, model_validator
from torch import nn

from optimize.context import Context
from optimize.data.augment import AUGMENTATIONS, IN_WORDS
from optimize.data.class_order import CHECKPOINT, ORDERS, with_order
from optimize.data.classes import check_classes, with_classes
from optimize.data.depth import depth_notes
from optimize.data.formats.base import DEFAULT_DATA, SEEDS, open_data
from optimize.data.records import Augmentation, ImageData
from optimize.data.splits import subset
from optimize.listener import SILENT, Listener
from optimize.measure.machine import measured_devices, resolve_device
from optimize.models.checkpoint import Checkpoint, read_checkpoint
from optimize.models.module import module_source
from optimize.models.preprocessing import Wish, choose_preprocessing
from optimize.models.resolve import resolve_model, with_checkpoint, with_named_weights
from optimize.models.source import ModelSource
from optimize.run.identity import Identity
from optimize.run.session import Session
from optimize.store.files import check_writable
from optimize.store.objects import Store
from optimize.training.distributed.environment import processes
from optimize.training.distributed.first_process import only_first
from optimize.training.events import tensorboard
from serve.common import layout
from serve.common.config import Config
from serve.runtime.device.cores import cores
from serve.runtime.errors import did_you_mean

_LONGEST_NAME = 128  # with an artifact's, of 64, and endings, a file's name of at most 255


class Job(Config):
    """What the user asks for, in the words of the command line."""

    model_config = ConfigDict(title="")  # in messages, its settings are the command line's

    model: str | InstanceOf[nn.Module] = Field(
        description="a torchvision name, timm:NAME, path/to/file.py:factory or package.module:factory; or a module "
        "that is there already, with its weights"
    )
    checkpoint: Path | None = Field(default=None, description="a file of weights; None trains the baseline")
    data: str | InstanceOf[ImageData] = Field(
        default=DEFAULT_DATA, description="a data set by its reference, or one that is open already"
    )
    classes: Path | tuple[str, ...] | None = Field(
        default=None, description="the names of the classes, or a file with one a line; None takes the data's own"
    )
    class_order: str | Path | tuple[str, ...] | None = Field(
        default=None,
        description="which output means which class: data, sorted, natural, checkpoint, a file with a name a line, or "
        "the names; None: what the checkpoint states, else the data's own",
    )
    val_images: int | None = Field(
        default=None, ge=1, description="measure on so many validation images, stratified; None on all"
    )
    augment: Augmentation | None = Field(
        default=None, description="what is done to training images; None leaves it to the data"
    )
    skip_unreadable: bool = Field(
        default=False, description="measure without the validation images that cannot be read, instead of refusing them"
    )
    accept_gaps: bool = Field(
        default=False, description="go on with data in which something is missing, such as images of a class"
    )
    recipe: Path | None = Field(default=None, description="a YAML file; None takes the default")
    store: Path = Field(default=Path("model_store"), description="where runs are kept")
    device: str = Field(default="auto", description="where to train and calibrate: auto, cpu, cuda or cuda:N")
    measure: str = Field(
        default="auto", description="where to measure: auto (every device that there is), or a list such as cpu,cuda"
    )
    image_size: int | None = Field(
        default=None, description="side of the network's input in pixels; None leaves it to model and data"
    )
    weights: str | None = Field(default=None, description="name of torchvision's own weights, such as DEFAULT")
    weights_key: str | None = Field(
        default=None, description="which weights of the checkpoint to take; None prefers averaged ones"
    )
    preprocessing: InstanceOf[Wish] | None = Field(
        default=None, description="what images go through that model and data do not ask for"
    )
    run: str | None = Field(default=None, description="the run's name; by default made of model and data")
    replace: bool = Field(
        default=False, description="let the run replace one of another model or other data that has its name"
    )
    trust_checkpoint: bool = Field(default=False, description="let the checkpoint's pickle run code")
    seed: int = Field(default=0, ge=0, lt=SEEDS, description="of every random choice")
    processes: int | None = Field(
        default=None,
        ge=1,
        description="how many processes of this machine train together; on GPUs each has one. None: those that "
        "torchrun has started, or one",
    )
    tensorboard: Path | None = Field(
        default=None, description="a folder for TensorBoard's events of what is trained; None writes none"
    )
    remeasure: bool = Field(default=False, description="measure speed anew, even if the same set was timed before")
    recommend: Mapping[str, object] = Field(
        default_factory=dict, description="what differs from the recipe's rule of the recommendation"
    )

    @property
    def brings_weights(self) -> bool:
        """Whether the model need not be trained."""
        return self.checkpoint is not None or self.weights is not None or isinstance(self.model, nn.Module)

    @field_validator("run")
    @classmethod
    def _names_a_run(cls, name: str | None) -> str | None:
        if name is not None and name.endswith(layout.FOUND_ENDINGS):
            ending = Path(name).suffix
            raise ValueError(
                f"a run's name does not end in {ending}: what `{ending[1:]}` finds of the run {Path(name).stem} "
                f"lies in the folder {name}"
            )
        if name is not None and not layout.is_run_name(name):
            raise ValueError("a run's name has letters, digits, '-', '_' and '.', beginning with a letter or digit")
        if name is not None and len(name) > _LONGEST_NAME:
            raise ValueError(f"a run's name has at most {_LONGEST_NAME} characters, this one has {len(name)}")
        return name

    @field_validator("augment", mode="before")
    @classmethod
    def _is_known(cls, name: object) -> object:
        if isinstance(name, str) and name not in AUGMENTATIONS:
            near = did_you_mean(name, AUGMENTATIONS)
            raise ValueError(f"there is no augmentation {name!r}{near}; there are {', '.join(AUGMENTATIONS)}")
        return name

    @model_validator(mode="after")
    def _weights_come_from_one_place(self) -> Self:
        if self.checkpoint is not None and self.weights is not None:
            raise ValueError("checkpoint and weights are both given; the weights can come from one of them only")
        if self.weights_key is not None and self.checkpoint is None:
            raise ValueError(
                f"--weights-key {self.weights_key} is of a checkpoint, and none is given; add --checkpoint FILE"
            )
        if self.class_order == CHECKPOINT and self.checkpoint is None and not isinstance(self.model, nn.Module):
            raise ValueError("--class-order checkpoint is of a checkpoint, and none is given; add --checkpoint FILE")
        if self.trust_checkpoint and self.checkpoint is None:
            raise ValueError("--trust-checkpoint is of a checkpoint, and none is given; add --checkpoint FILE")
        if isinstance(self.model, nn.Module) and (self.checkpoint is not None or self.weights is not None):
            raise ValueError(
                "a module brings its weights; give it without a checkpoint or weights, or load them into it"
            )
        return self


@dataclass(frozen=True)
class Opened:
    """A job whose parts were found and fit: the session, the run's name, and the weights if there are any.

    ``devices`` are those to measure on. ``identity`` says which model and data the run is of.
    ``preprocessing_origins`` says in words where each part of the preprocessing came from.
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
        job: what the user asks for.
        listener: told in one line what was found, and which preprocessing is used, by whose word.
        recipe: the preprocessing that the recipe asks for; the job's goes before it.

    Raises:
        UserError: something is missing, unreadable, or does not fit.
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
    listener.started("opening")  # until the next step begins
    torch.set_num_threads(min(torch.get_num_threads(), cores()))  # torch (2.14) does not see a container's quota
    data = _data(job, listener, checkpoint, origin)
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
    )
    listener.said(
        f"{source.name} on {data.name}: {len(data.classes)} classes, {len(data.train)} training and "
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
        lambda name: listener.said(f"{name}: another run is making it"),
        functools.partial(reopen, words, recipe) if (words := _anywhere(job)) else None,
        chosen.origins,
    )
    reference = job.data if isinstance(job.data, str) else data.name
    run = job.run or layout.run_name(source.reference, reference)
    identity = Identity.of(source.reference, reference, source, data)
    return Opened(session, run, identity, checkpoint, origin, chosen.origins, devices)


def reopen(job: Job, recipe: Wish | None = None) -> Session:
    """The session of a job, opened again in another process and without a word."""
    return open_job(job, SILENT, recipe).session


def _anywhere(job: Job) -> Job | None:
    """The same job in words that hold in any folder; None if it has parts that are no words."""
    if not isinstance(job.model, str) or not isinstance(job.data, str):
        return None
    places = {
        "model": layout.model_anywhere(job.model),
        "checkpoint": job.checkpoint.resolve() if job.checkpoint else None,
        "data": layout.data_anywhere(job.data),
        "classes": job.classes.resolve() if isinstance(job.classes, Path) else job.classes,
        "class_order": _order_anywhere(job.class_order),
        "store": job.store.resolve(),
        "tensorboard": None,  # of this process's trainings
    }
    return job.model_copy(update=places)


def _order_anywhere(order: str | Path | tuple[str, ...] | None) -> str | Path | tuple[str, ...] | None:
    is_file = isinstance(order, Path) or (isinstance(order, str) and order not in (*ORDERS, CHECKPOINT))
    return Path(order).resolve() if is_file and isinstance(order, str | Path) else order


def _data(job: Job, listener: Listener, checkpoint: Checkpoint | None, origin: Path | None) -> ImageData:
    """The data as the job wants it."""
    data = (
        open_data(job.data, seed=job.seed, listener=listener, accept_gaps=job.accept_gaps)
        if isinstance(job.data, str)
        else job.data
    )
    own = data.classes
    if job.classes is not None:
        data = with_classes(data, job.classes)
    if data.order is None:  # else it was opened in that of a run
        data = with_order(data, own, job.class_order, checkpoint.classes if checkpoint else None, origin)
    check_classes(data)
    if job.augment is not None:
        data = dataclasses.replace(data, augment=job.augment)
    if job.val_images is not None and job.val_images < len(data.val):
        data = dataclasses.replace(data, val=subset(data.val, job.val_images, job.seed), val_of=len(data.val))
    return data


def _with_weights(job: Job, source: ModelSource) -> tuple[ModelSource, Checkpoint | None, Path | None]:
    """The source as its weights want it, the weights, and where they come from, for messages."""
    if job.weights is not None:
        source, checkpoint = with_named_weights(source, job.weights)
        return source, checkpoint, Path(f"torchvision's {job.weights}")
    if job.checkpoint is not None:
        checkpoint = read_checkpoint(
            job.checkpoint, trust_pickle=job.trust_checkpoint, weights_key=job.weights_key, home=source.home
        )
        return with_checkpoint(source, checkpoint), checkpoint, job.checkpoint
    return source, None, None
