"""Writes the baseline's files: a checkpoint's weights, or weights that are trained here, and their program."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from optimize.context import Context
from optimize.export.program import write_program, write_weights
from optimize.models.checkpoint import Checkpoint
from optimize.models.logits import ENDINGS, ending_of, giving_logits, materialised, with_outputs
from optimize.models.source import ModelSource
from optimize.models.weight_matching import load_into
from optimize.store.artifact import Product
from optimize.store.training_history import History
from optimize.tasks.base import Task
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from serve.runtime.card.card import LOGITS, MOST_CHANNELS
from serve.runtime.errors import UserError, one_line
from serve.runtime.outputs import Outputs, as_outputs

_SEEN = (
    "the checkpoint was probably trained on the images that a training pass holds out to choose its best epoch: "
    "their {} is too high. Only the evaluation images show the accuracy"
)
_ANY_NUMBER = "it must accept any number of images: replace squeeze() by flatten(1) if it removes the batch axis"
#: The number of images whose answers show what a network ends in, and of those that its program is traced with.
_EXAMPLES, _TRACED = 8, 4
#: A share of the largest logit. Kernels for one image round differently, by less than a hundredth of this.
_ROUNDED = 1e-2


def new_module(source: ModelSource, context: Context, ending: str = "logits", *, training: bool = False) -> nn.Module:
    """Build the model from its code for the run's classes and image size, with random weights.

    Args:
        source: the model's architecture.
        context: data and preprocessing.
        ending: the end of its forward, as `ending_of` found it. The module gives the logits before that.
        training: whether it has its auxiliary outputs; see `ModelSource.build`.

    Raises:
        UserError: it cannot be built, or its outputs are unclear; see `with_outputs`.
    """
    module = source.build(context.width, context.preprocessing.crop[0], training=training)
    if context.outputs or source.origin in ("user", "module"):  # a library's networks give logits
        shape = context.preprocessing.shape
        module = with_outputs(materialised(module, shape), shape, context.outputs)
    return giving_logits(module, ending)


def make_baseline(
    source: ModelSource,
    context: Context,
    weights: Checkpoint | TrainingConfig,
    folder: Path,
    *,
    origin: Path | None = None,
) -> Product:
    """Write the float32 model into ``folder``.

    Args:
        source: the model's architecture.
        context: data, preprocessing, device, seed.
        weights: a checkpoint, or how to train.
        folder: the folder to write to.
        origin: the checkpoint's path, for messages.

    Raises:
        UserError: the checkpoint does not fit, or the model does not map images to one logit a class.
        PassError: the training diverged, or the model cannot be written as a program.
    """
    example, classes = context.example(_EXAMPLES), len(context.data.classes)
    torch.manual_seed(context.seed)
    auxiliary = source.auxiliary if isinstance(weights, TrainingConfig) and not context.outputs else ()
    module = new_module(source, context, training=bool(auxiliary))
    notes: tuple[str, ...] = ()
    training: tuple[History, ...] = ()
    if isinstance(weights, Checkpoint):
        bridged = load_into(module, weights, origin or Path("checkpoint"))
        for note in bridged:
            context.listener.said(f"{origin or 'checkpoint'}: {note}")
        notes = (
            f"weights of a checkpoint, SHA-256 {weights.sha256}",
            *weights.notes,
            *bridged,
            _SEEN.format(context.task.metric.title),
        )
    with torch.random.fork_rng(devices=[]):  # keeps the training's random numbers
        _check_output(module.eval(), example[:_TRACED], classes, context.task)  # before hours of training
    ending = ending_of(module, example)
    ending = ending if ending in context.task.endings else "logits"
    module = giving_logits(module, ending)
    probabilities = context.task.endings.get(ending, "softmax")
    if isinstance(weights, TrainingConfig):
        training_context = dataclasses.replace(context, probabilities=probabilities)
        with context.task.fresh(module):
            result = train(module.train(), training_context, weights, auxiliary=auxiliary)
        notes, training = (f"trained here: {result.kept}", *result.notes), (result.history,)
    module = module.cpu().eval()
    if auxiliary:
        with torch.random.fork_rng(devices=[]):
            plain = new_module(source, context, ending)
        plain.load_state_dict({name: module.state_dict()[name] for name in plain.state_dict()})
        module = plain.eval()
    _check_output(module, example[:_TRACED], classes, context.task)
    if ending != "logits":
        context.listener.said(ENDINGS[ending])
        notes = (*notes, ENDINGS[ending])
    write_weights(module, folder)
    file, file_format = write_program(module, example[:_TRACED], folder)
    structure = {"ending": ending} if ending != "logits" else {}
    return Product(
        file,
        file_format,
        "float32",
        notes=notes,
        structure=structure,
        training=training,
        probabilities=probabilities,
        outputs=context.outputs or (LOGITS,),
    )


def _check_output(module: nn.Module, example: torch.Tensor, classes: int, task: Task) -> None:
    """Refuse a module whose first output is not what the task needs, or that mixes the images of a batch.

    Outputs behind the first may have any shape with one row for each image.
    """
    count = len(example)
    try:
        with torch.no_grad():
            answer = module(example)
    except Exception as error:  # noqa: BLE001 - the user's forward may raise anything
        shape = tuple(example.shape)
        channels = _other_channels(module, shape[1])
        raise UserError(f"the model fails on an input of shape {shape}: {one_line(error)}{channels}") from None
    logits, *others = answer if isinstance(answer, tuple) and answer else (answer,)
    if (fault := task.fault_of(logits, example, classes)) is not None:
        raise UserError(f"the model gives {_shape(logits)} for a batch of {count} images of {classes} classes; {fault}")
    for number, output in enumerate(others, start=2):
        if not output.is_floating_point() or output.shape[:1] != (count,):
            raise UserError(
                f"the model gives {_shape(output)} of {output.dtype} as output {number} for a batch of {count} images; "
                f"it must be a tensor of floats with one row for each image"
            )
    _check_alone(module, example[:1], (logits, *others))


def _check_alone(module: nn.Module, image: torch.Tensor, together: Outputs) -> None:
    """Refuse a module that answers a single image ``(1, C, H, W)`` differently than the same image in a batch.

    Most requests have one image, and chance decides which images share a batch.
    """
    try:
        with torch.no_grad():
            outputs = as_outputs(module(image))
    except Exception as error:  # noqa: BLE001 - the user's forward may raise anything
        raise UserError(
            f"the model takes {len(together[0])} images and fails on one: {one_line(error)}; {_ANY_NUMBER}"
        ) from None
    for alone, whole in zip(outputs, together, strict=True):
        if _shape(alone) != (1, *whole.shape[1:]):
            raise UserError(
                f"the model gives {_shape(alone)} for one image, and {_shape(whole)} for {len(whole)}; {_ANY_NUMBER}"
            )
        largest = float(whole.nan_to_num(0, 0, 0).abs().max())
        if not torch.allclose(alone, whole[:1], rtol=0, atol=_ROUNDED * largest, equal_nan=True):
            raise UserError(
                f"the model gives an image other logits alone than in a batch of {len(whole)} (by up to "
                f"{float((alone - whole[:1]).abs().max()):.3g}); they must not depend on other images (a norm with "
                "track_running_stats=False), chance or earlier calls"
            )


def _shape(output: object) -> tuple[int, ...] | str:
    """Describe a forward's output for messages."""
    return tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__


def _other_channels(module: nn.Module, channels: int) -> str:
    """Say what to do if the images' channels do not fit a network's first convolution. Empty if they do."""
    first = next((layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is None or first.in_channels == channels or first.in_channels > MOST_CHANNELS:
        return ""
    numbers = ",".join(["0.5"] * first.in_channels)
    return (
        f"; mean and std have {channels} numbers, but the first convolution takes {first.in_channels}: "
        f"give --mean and --std {first.in_channels} each, such as {numbers}"
    )
