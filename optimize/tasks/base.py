"""The interface of tasks, as training, measuring and reporting see them, and their registry.

A task is one file of this package, and one of `serve.runtime.tasks` with the same name. The registry finds it there.
Nothing outside these files names a task: the data say which one is theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from serve.runtime.display import Described
from serve.runtime.registry import Registry, defined_at

if TYPE_CHECKING:  # a stored report is shown without torch
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import nn

    from optimize.data.records import ImageData
    from optimize.statistics import PairedDifference
    from serve.runtime.card.card import Probabilities
    from serve.runtime.outputs import Outputs

#: What is kept of the answers to N images: tensors by name, each with N rows.
Evidence: TypeAlias = "Mapping[str, torch.Tensor]"

#: The name of the images' groups in evidence, ``int64 (N,)``: frames of one video have one number. It is there if the
#: data have groups, for any task.
GROUPS: Final = "group"


@dataclass(frozen=True, repr=False)
class Metric(Described):
    """A figure about answers: a share, at most 1, or a number in the unit of the targets.

    Attributes:
        key: its name in reports' JSON and in data frames.
        title: its name in tables and sentences.
        noun: its name if it stands alone. Empty: the title.
        share: whether it is a share. The score is one, and the larger the better.
    """

    key: str
    title: str
    noun: str = ""
    share: bool = True

    @property
    def spoken(self) -> str:
        """Return `noun`, or the title."""
        return self.noun or self.title


@dataclass(frozen=True, repr=False)
class Likeness(Described):
    """How alike two networks answer the same few images: a share from 0 to 1, and a phrase that says so."""

    share: float
    said: str


@dataclass(frozen=True)
class ClassScores:
    """A network's scores of the single classes, as arrays ``(classes,)``.

    Attributes:
        scores: the score of each class. NaN: no target has it.
        counts: how many targets each class has: images, or the parts of images that `Task.counted` names.
        images: the number of images with targets of each class.
    """

    scores: NDArray[np.float64]
    counts: NDArray[np.int64]
    images: NDArray[np.int64]


@dataclass(frozen=True)
class Panel:
    """One picture of an example.

    Attributes:
        title: what it shows.
        image: a small PNG or JPEG; see `optimize.small_pictures`.
        said: what it shows, for readers who do not see it.
    """

    title: str
    image: bytes
    said: str


@dataclass(frozen=True)
class Example:
    """One image with its target and the answers of two networks, drawn.

    Attributes:
        panels: its pictures, from left to right.
        legend: colour and size of what the panels show, by its label. Sizes are of any unit.
    """

    panels: tuple[Panel, ...]
    legend: Mapping[str, tuple[str, int]]


class Task(Described, ABC):
    """What a network is for.

    Attributes:
        name: the word on cards and in reports.
        metrics: the figures of `scores`. The first one is the score: everything is judged by it.
        agreement: the first figure of `agreements`.
        counted: the plural of what that figure counts.
        entry: what each of the data's ``classes`` names.
        named: the plural of that.
        guess: what has the score of `chance`; ``{}`` is the number of classes.
        whole: whether targets are about the whole picture, so that nothing of it may be cut off by default.
        networks_for: the task that libraries' networks are for if they suit this one, too. Empty: its own.
        endings: how the logits become probabilities, by what a network ends in; see `optimize.models.logits`. Another
            ending stays in the network.
        method: a sentence on differences of the score and their interval, for a report.
        training: settings of `TrainingConfig` that suit the task, in place of the defaults.
        of_class: the name of a class's score. Empty: classes have none.
        answered: the plural of what `ease` is a share of.
        drawn: a sentence on the panels of `example`, for a report. Empty: the task draws nothing.
    """

    name: ClassVar[str]
    metrics: ClassVar[tuple[Metric, ...]]
    agreement: ClassVar[Metric]
    counted: ClassVar[str]
    method: ClassVar[str]
    entry: ClassVar[str] = "class"
    named: ClassVar[str] = "classes"
    guess: ClassVar[str] = "guessing among {} classes"
    whole: ClassVar[bool] = False
    training: ClassVar[Mapping[str, Any]] = {}
    networks_for: ClassVar[str] = ""
    endings: ClassVar[Mapping[str, Probabilities]] = {
        "logits": "softmax",
        "softmax": "softmax",
        "log-softmax": "softmax",
        "sigmoid": "sigmoid",
    }
    of_class: ClassVar[str] = ""
    answered: ClassVar[str] = "images"
    drawn: ClassVar[str] = ""

    def _facts(self) -> dict[str, str]:
        return {"name": self.name, "score": self.metric.title}

    @property
    def metric(self) -> Metric:
        """The score."""
        return self.metrics[0]

    def of(self, data: ImageData) -> Task:
        """Return this task for a network of some data, if it needs to know more of them than their classes."""
        return self

    def facts(self) -> dict[str, Any]:
        """Return what the cards of networks of its data say for the servers' half of the task, as JSON values."""
        return {}

    def outputs(self, classes: int) -> int:
        """Return the number of outputs of a network that is built for so many classes."""
        return classes

    def fresh(self, module: nn.Module) -> AbstractContextManager[None]:
        """Within this context a network with random weights is trained. It may be changed in place until the end."""
        return nullcontext()

    @abstractmethod
    def fault_of(self, output: object, inputs: torch.Tensor, classes: int) -> str | None:
        """Return what a network's first output for inputs ``(N, C, H, W)`` should be. None: it is so."""

    @abstractmethod
    def loss(
        self, output: torch.Tensor, targets: torch.Tensor, probabilities: Probabilities, smoothing: float = 0.0
    ) -> torch.Tensor:
        """Return the loss of a network's first output in training, the mean over images in nats.

        Args:
            output: the first output, ``float32 (N, …)``.
            targets: the targets of the images, or their `shares`.
            probabilities: how logits become probabilities.
            smoothing: share of each target that is spread over all classes.
        """

    @abstractmethod
    def soft_loss(
        self, student: torch.Tensor, teacher: torch.Tensor, temperature: float, probabilities: Probabilities = "softmax"
    ) -> torch.Tensor:
        """Return the loss of a student's first output against its teacher's, the mean over images in nats."""

    @abstractmethod
    def shares(self, targets: torch.Tensor, classes: int) -> torch.Tensor:
        """Return targets as the share of each class, ``float32 (N, classes, …)``, so that they can be mixed."""

    @abstractmethod
    def evidence(self, outputs: Outputs, targets: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
        """Return what is kept of a network's answers to images with these targets."""

    @abstractmethod
    def scores(self, evidence: Evidence) -> dict[str, float]:
        """Return the value of each of `metrics`, by key and in their order."""

    @abstractmethod
    def score(self, evidence: Evidence, weights: NDArray[np.float64] | None = None) -> float:
        """Return the value of the first of `metrics`. ``weights (N,)``: how often each image counts. None: once."""

    @abstractmethod
    def difference(self, reference: Evidence, other: Evidence) -> PairedDifference:
        """Return the score of the other minus that of the reference on the same images, with its 95 % interval."""

    @abstractmethod
    def interval(self, evidence: Evidence) -> tuple[float, float]:
        """Return the 95 % interval of `score`."""

    @abstractmethod
    def ease(self, evidence: Evidence) -> NDArray[np.generic]:
        """Return how well each image is answered, ``(N,)``, so that halves of the images can share it equally."""

    @abstractmethod
    def agreements(self, reference: Evidence, other: Evidence) -> dict[str, float]:
        """Return how alike the answers of two artifacts are: shares by key, the first one is `agreement`."""

    @abstractmethod
    def likeness(self, expected: Outputs, found: Outputs) -> Likeness:
        """Compare the outputs of two networks for the same few training images, without their targets."""

    def by_class(self, evidence: Evidence, classes: int) -> ClassScores | None:
        """Return the scores of the single classes. None: they have none."""
        return None

    def class_differences(
        self, reference: Evidence, other: Evidence, classes: int
    ) -> Sequence[PairedDifference | None]:
        """Return for each class what `difference` returns for all. None: no target has the class."""
        return [None] * classes

    def example(
        self,
        image: NDArray[np.uint8],
        target: NDArray[np.integer],
        answers: Mapping[str, Evidence],
        classes: Sequence[str],
    ) -> Example:
        """Draw the answers to one image. A report calls it if `drawn` says something.

        Args:
            image: the network's input before its values are normalised, ``(C, H, W)``.
            target: the image's target.
            answers: the evidence of this one image by the networks' names: the reference's, and another's.
            classes: the names of the classes.
        """
        raise NotImplementedError(f"{self.name} draws nothing")

    def chance(self, classes: int) -> float | None:
        """Return the score of a network that guesses. None: unknown."""
        return None

    def remarks(self, evidence: Evidence, targets: torch.Tensor, classes: Sequence[str]) -> list[str]:
        """Return probable mistakes that the answers of a checkpoint show, a line each."""
        return []


_REGISTRY: Registry[Task] = Registry("task", package=__package__, group="optimize.tasks")


def register(task: Task) -> Task:
    """Add a task to the registry. Its name must be new."""
    return _REGISTRY.register(task, defined_at(type(task)))


def tasks() -> dict[str, Task]:
    """Return all tasks by name."""
    return _REGISTRY.all()


def find_task(name: str) -> Task:
    """Return the task called ``name``.

    Raises:
        UserError: there is none.
    """
    return _REGISTRY.find(name)


def joined_evidence(parts: Iterable[Evidence]) -> dict[str, torch.Tensor]:
    """Return the evidence of the parts of a set of images as that of the whole. There must be one."""
    import torch

    every = list(parts)
    return {name: torch.cat([part[name] for part in every]) for name in every[0]}


def groups_of(evidence: Evidence) -> NDArray[np.int64] | None:
    """Return the group of each image, ``(N,)``. None: each is its own."""
    return evidence[GROUPS].numpy() if GROUPS in evidence else None


def rows_of(evidence: Evidence, rows: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Return the evidence of some of the images."""
    import torch

    return {name: tensor[torch.from_numpy(rows)] for name, tensor in evidence.items()}
