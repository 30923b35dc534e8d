"""Computes a teacher's answers on training images once and keeps them in the store, if the images never change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from optimize.context import Context
from optimize.data.loading import loader
from optimize.data.records import Split
from optimize.errors import PassError
from optimize.models.teacher import Teacher
from optimize.store.keys import TeacherKey
from optimize.store.objects import Store
from optimize.store.sources import code_of
from optimize.training.config import TrainingConfig
from optimize.training.precision import Precision
from serve.runtime.images.image_preprocessing import normalise

_FILE = "answers.npy"

Answer = Callable[[torch.Tensor], torch.Tensor]


def changing(config: TrainingConfig, context: Context) -> tuple[str, ...]:
    """Return the settings that change a training image each time it is seen, as they are written."""
    augmentation = config.augmentation(context.data)
    said = {
        f"augment: {augmentation}": augmentation != "none",
        f"crop_scale: {config.crop_scale}": config.crop_scale is not None,
        "trivial_augment: true": config.trivial_augment,
        f"mixup: {config.mixup}": config.mixup is not None,
    }
    return tuple(setting for setting, changes in said.items() if changes)


def kept_answers(
    store: Store, teacher: Teacher, fit: Split, context: Context, *, config: TrainingConfig, answer: Answer
) -> Path:
    """Return the file of a teacher's first output on ``fit``, and make it if it does not exist. `answers_of` reads it.

    If several processes need it, one makes it and the others wait.

    Args:
        store: keeps the file.
        teacher: the teacher.
        fit: the training images.
        context: preprocessing, device, listener.
        config: the precision of the answers, and the share of images that may be unreadable.
        answer: maps images that are normalised for the student to the teacher's answers.

    Raises:
        PassError: an answer is NaN or infinite.
        UserError: too many images cannot be read.
    """
    key = TeacherKey(
        teacher=teacher.digest,
        images=fit.fingerprint,
        preprocessing=context.preprocessing,
        precision=config.precision,
        libraries={"torch": torch.__version__},
        code=code_of(kept_answers, answer, Precision),
    ).digest

    def make(folder: Path) -> None:
        batches = loader(
            fit,
            context.preprocessing,
            batch_size=256,
            device=context.device,
            skip_unreadable=config.skip_unreadable,
            remedy=f"training may leave out at most {config.skip_unreadable:.2%} of them (skip_unreadable)",
            scratch=context.scratch,
        )
        answers = None
        for done, (rows, images, _) in enumerate(batches.numbered(), start=1):
            logits = answer(normalise(images, context.preprocessing, context.device, torch.float32))
            if not torch.isfinite(logits).all():
                raise PassError(f"the teacher {teacher.name} returns NaN or infinity")
            if answers is None:
                shape = (len(fit), *logits.shape[1:])
                answers = np.lib.format.open_memmap(folder / _FILE, mode="w+", dtype=np.float32, shape=shape)
                answers[:] = np.nan  # for unreadable images, which are never requested
            answers[rows.numpy()] = logits.cpu().numpy()
            context.listener.progressed(done / len(batches), "teacher")
        if answers is not None:
            answers.flush()

    found = store.obtain(key, make, about=f"{teacher.name} on {context.data.name}: a teacher's answers")
    return found.folder / _FILE


def answers_of(file: Path) -> np.memmap[tuple[int, ...], np.dtype[np.float32]]:
    """Return the logits, ``float32 (images, classes, …)``, memory-mapped, because they may be gigabytes."""
    return np.lib.format.open_memmap(file, mode="r")
