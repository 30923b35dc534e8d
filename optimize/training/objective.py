"""The objective that a training step minimises: the task's loss with the targets, and `Distil` with a teacher."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from optimize.context import Context
from optimize.data.records import Split
from optimize.errors import PassError
from optimize.models.teacher import Teacher
from optimize.tasks.base import Task
from optimize.training.config import TrainingConfig
from optimize.training.distil import Distil
from optimize.training.features import Student, match, relative_error
from optimize.training.precision import Precision
from optimize.training.results import Manner
from optimize.training.teacher_answers import answers_of, changing, kept_answers
from serve.runtime.card.card import Probabilities
from serve.runtime.errors import UserError, one_line
from serve.runtime.outputs import as_outputs, first_output

#: The most bytes of a teacher's outputs that are kept: class maps have logits for each pixel.
_MOST_KEPT = 16 << 30


class Piece(NamedTuple):
    """Images that a step computes together.

    Attributes:
        inputs: ``float32 (N, C, H, W)``, as the student sees them: changed, mixed, normalised for it.
        targets: the data's targets, or their shares ``float32 (N, classes, …)`` if images are mixed.
        rows: rows of the training images, ``int64 (N,)``, on the CPU.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor


class Objective:
    """The task's loss with the targets.

    Attributes:
        own: a module that is trained with the network and dropped afterwards. It may have no parameters.
        notes: for the artifact's card.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        config: TrainingConfig,
        task: Task,
        probabilities: Probabilities = "softmax",
        auxiliary: tuple[float, ...] = (),
    ) -> None:
        self._task, self._smoothing, self._probabilities = task, config.label_smoothing, probabilities
        self._auxiliary = auxiliary
        self.own = nn.ModuleList()

    def student(self, module: nn.Module) -> nn.Module:
        """Return a module that gives everything that `loss` needs. Its layers are the network's own."""
        return module

    def loss(self, outputs: Any, piece: Piece) -> torch.Tensor:
        """Return the mean over a piece's images. ``outputs`` are the student's, in float32."""
        losses = [
            weight * self._task.loss(output, piece.targets, self._probabilities, self._smoothing)
            for weight, output in zip((1.0, *self._auxiliary), as_outputs(outputs), strict=False)
        ]
        return torch.stack(losses).sum()


class Distillation(Objective):
    """The loss with the labels and with a teacher's answers to the same images; see `Distil` for the sum.

    Args:
        module: the student in training.
        context: data, device, listener, the teacher, and the store for its answers.
        config: settings with a teacher.
        fit: the training images.
        precision: the precision of a step.
        manner: how the student is trained besides the settings.

    Raises:
        UserError: the teacher has other classes, a feature does not exist, or its shapes do not fit.
        PassError: the teacher answers with NaN.
    """

    def __init__(
        self,
        module: nn.Module,
        context: Context,
        config: TrainingConfig,
        fit: Split,
        *,
        precision: Precision,
        manner: Manner,
    ) -> None:
        super().__init__(config, context.task, context.probabilities, manner.auxiliary)
        if config.distil is None or context.teacher is None:
            raise ValueError("there is no teacher")
        self._settings, self._teacher, self._context = config.distil, context.teacher, context
        self._precision = precision
        features, example, asked = self._settings.features, context.example(2), self._teacher.module
        logits = check_answers(self._teacher, context, example)
        if features:
            matched = match(module, asked, features, example, manner.nodes)
            self._graph, self.own, asked = matched.student, matched.projections, matched.teacher
        # A copy, because the teacher may teach again, from the CPU.
        self._asked = copy.deepcopy(asked).to(context.device).eval().requires_grad_(False)
        self._kept = None
        changes = (*changing(config, context), *(["features"] if features else []))
        if (whole := len(fit) * logits[0].numel() * 4) > _MOST_KEPT:
            changes = (*changes, f"{whole / 1e9:.0f} GB of outputs")
        if context.store is not None and not changes:
            file = kept_answers(context.store, self._teacher, fit, context, config=config, answer=self._logits)
            self._kept = answers_of(file)
        self.notes = (_note(self._teacher, self._settings, changes, kept=self._kept is not None),)

    def student(self, module: nn.Module) -> nn.Module:
        """See `Objective`."""
        return Student(module, self._graph, self.own) if self._settings.features else module

    def loss(self, outputs: Any, piece: Piece) -> torch.Tensor:
        """See `Objective`. The teacher gets the same images as the student, including mixed ones."""
        settings = self._settings
        logits, values = outputs if settings.features else (first_output(outputs), ())
        wanted, others = self._answers(piece)
        parts = []
        if settings.weight < 1:
            parts.append((1 - settings.weight) * super().loss(logits if settings.features else outputs, piece))
        if settings.weight:
            soft = self._task.soft_loss(logits, wanted, settings.temperature, self._probabilities)
            parts.append(settings.weight * soft)
        if values:
            errors = [relative_error(own, other) for own, other in zip(values, others, strict=True)]
            parts.append(settings.feature_weight * torch.stack(errors).mean())
        return torch.stack(parts).sum()

    def _answers(self, piece: Piece) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the teacher's logits and its features of a piece."""
        if self._kept is not None:
            return torch.from_numpy(self._kept[piece.rows.numpy()]).to(piece.inputs.device), ()
        return self._answer(piece.inputs) if self._settings.features else (self._logits(piece.inputs), ())

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        return first_output(self._answer(inputs))

    @torch.no_grad()
    def _answer(self, inputs: torch.Tensor) -> Any:
        """Return the teacher's logits, with features as `Outputs`. ``inputs`` are normalised for the student."""
        images = self._teacher.renormalised(inputs, self._context.preprocessing)
        return self._precision.forward(self._asked, images)


def check_answers(teacher: Teacher, context: Context, images: torch.Tensor) -> torch.Tensor:
    """Return a teacher's first output for a student's images. It must be what the student's should be.

    Args:
        teacher: the teacher.
        context: the student's context.
        images: normalised for the student, ``float32 (N, C, H, W)`` on the CPU.

    Raises:
        UserError: it gives something else, or fails.
        PassError: it gives NaN or infinity.
    """
    classes = len(context.data.classes)
    try:
        with torch.no_grad():
            logits = first_output(teacher.module(teacher.renormalised(images, context.preprocessing)))
    except Exception as error:  # noqa: BLE001 - the user's forward may raise anything
        shape = "x".join(map(str, images.shape[1:]))
        raise UserError(f"distil: the teacher {teacher.name} fails on images of {shape}: {one_line(error)}") from None
    if (fault := context.task.fault_of(logits, images, classes)) is not None:
        found = "x".join(map(str, logits.shape[1:])) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UserError(
            f"distil: the teacher {teacher.name} gives {found} for an image, but the data has {classes} classes; a "
            f"teacher must have the same classes as the student ({fault})"
        )
    if not torch.isfinite(logits).all():
        raise PassError(f"the teacher {teacher.name} returns NaN or infinity")
    return logits


def _note(teacher: Teacher, settings: Distil, changes: tuple[str, ...], *, kept: bool) -> str:
    """Describe the teacher and its lessons, and whether the answers were kept."""
    what = [f"{settings.weight:g} of the loss at temperature {settings.temperature:g}"] if settings.weight else []
    if settings.features:
        what.append(f"features {', '.join(settings.features)} with weight {settings.feature_weight:g}")
    why = f" ({', '.join(changes)})" if changes else ""
    how = "its outputs are kept in the store" if kept else f"it computed its outputs again in each step{why}"
    return f"taught by {teacher.name}: {'; '.join(what)}; {how}"


def objective(
    module: nn.Module,
    context: Context,
    config: TrainingConfig,
    fit: Split,
    *,
    precision: Precision,
    manner: Manner,
) -> Objective:
    """Return the objective of ``config``. Arguments and errors as in `Distillation`."""
    if config.distil is None:
        return Objective(config, context.task, context.probabilities, manner.auxiliary)
    return Distillation(module, context, config, fit, precision=precision, manner=manner)
