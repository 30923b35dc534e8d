"""The training loop: for the baseline, for quantization-aware training, and after pruning.

The best epoch is chosen on images held out of the training split. It is never chosen on those that accuracy is reported
on, because that would make the result look better. An interrupted run resumes from its last checkpoint, and ends with
the same weights as without the interruption.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from optimize.context import Context
from optimize.data.augment import change
from optimize.data.loading import Loader, Placed, loader
from optimize.data.random_draws import Draws
from optimize.data.records import Split
from optimize.data.splits import hold_out, part
from optimize.errors import PassError
from optimize.store.training_history import Epoch, Point
from optimize.tasks.base import joined_evidence
from optimize.training.checkpoints import Checkpoints, fingerprint, load_state
from optimize.training.config import TrainingConfig
from optimize.training.distributed import group
from optimize.training.distributed.api import train_together
from optimize.training.distributed.wrap import joined
from optimize.training.kept_zeros import Zeros
from optimize.training.mixup import mixed
from optimize.training.objective import Piece, objective
from optimize.training.optimizers import Average, clip, make_optimizer, peak_rate, rate
from optimize.training.precision import Precision
from optimize.training.randomness import deterministic, random_states, restore_random_states
from optimize.training.recompute import checkpointed
from optimize.training.results import Manner, Penalty, Progress, SetMode, TrainingResult
from optimize.training.stopwatch import Stopwatch
from optimize.training.tensorboard_events import Events
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from serve.runtime.outputs import as_outputs

#: The most points of a training's curve. It has at least one for each epoch.
_POINTS = 200


def train(
    module: nn.Module,
    context: Context,
    config: TrainingConfig,
    *,
    set_mode: SetMode | None = None,
    from_start: bool = False,
    keep_zeros: bool = False,
    penalty: Penalty | None = None,
    nodes: Mapping[str, str] | None = None,
    auxiliary: tuple[float, ...] = (),
) -> TrainingResult:
    """Train ``module`` in place on ``context.device`` and leave it there in eval mode, at its best epoch.

    Args:
        module: maps ``float32 (N, C, H, W)`` to logits ``(N, classes, …)``, or to a tuple that begins with them.
        context: data, device and seed, and the folder for the run's checkpoints.
        config: see `TrainingConfig`.
        set_mode: called after the module was put into training mode (True) or eval mode (False), with the epoch's
            number from 0. For modules with further modes.
        from_start: whether the initial module is kept if no epoch is better: for a trained one.
        keep_zeros: whether weights that are zero at the start stay zero: for a pruned one.
        penalty: pulls weights besides the loss. With a penalty the last epoch is kept, because it was pulled longest.
        nodes: maps names that a teacher's features may use to names in the module's graph, if the module was made from
            the network that users know. None: the graph's nodes by their names.
        auxiliary: the weight in the loss of each output behind the first that the module has only in training.

    Raises:
        PassError: the loss became NaN or infinite.
        UserError: all parameters are frozen, no class has two training images, or the teacher does not fit.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(
            f"{type(module).__name__} cannot be trained: none of its {len(list(module.parameters()))} parameters "
            "has requires_grad; set it for the weights to train, or give trained weights as a checkpoint"
        )
    manner = Manner(set_mode, from_start, keep_zeros, penalty, nodes, auxiliary)
    if context.processes > 1 and not group.together():
        return train_together(module, context, config, manner)
    with deterministic(config.deterministic):
        return _Run(module, context, config, manner).carried_out()


class _Run:
    """One training run: its tools and its progress."""

    def __init__(self, module: nn.Module, context: Context, config: TrainingConfig, manner: Manner) -> None:
        self.module, self.context, self.config, self.manner = module, context, config, manner
        self.device = context.device
        module.to(self.device)
        fit, self.held = hold_out(context.data.train, config.holdout, context.seed)
        if not len(self.held):
            raise UserError(
                f"{context.data.name}: has one training image per class, so none can be held out to choose the "
                "best epoch; training needs a class with at least two"
            )
        self.batches, self.validation = _loaders(fit, self.held, context, config)
        self.augmentation = config.augmentation(context.data)
        start = fingerprint(module, config, group.world()) if context.unfinished is not None else ""
        self.checkpoints = Checkpoints(context.unfinished, start, context.checkpoint_seconds, context.listener)
        self.precision = Precision(config, self.device)
        self.precision.prepare(module)
        self.objective = objective(module, context, config, fit, precision=self.precision, manner=manner)
        self.objective.own.to(self.device)
        self.forward = joined(module, self.device, self.objective.student)
        self.zeros = Zeros(module) if manner.keep_zeros else None
        self.optimizer = make_optimizer(nn.ModuleList([module, self.objective.own]), config)
        self.average = Average(module, config.ema) if config.ema is not None else None
        planned = config.epochs * len(self.batches)
        self.steps = min(planned, config.max_steps or planned)
        self.stride = -(-len(self.batches) // max(1, _POINTS // config.epochs))
        self.progress = Progress(torch.zeros((), device=self.device))
        self.stopwatch = Stopwatch(self.device)
        self.events = Events(context.tensorboard if group.rank() == 0 else None)

    @property
    def done(self) -> int:
        """Return the number of steps that are done."""
        return self.progress.epoch * len(self.batches) + self.progress.place

    def carried_out(self) -> TrainingResult:
        """Train all remaining epochs, and keep the best."""
        # With several processes the first has the checkpoints. Some may be on hosts without its folder.
        saved = group.of_the_first(self.checkpoints.load() if group.rank() == 0 else None)
        random = self._go_on(saved) if saved is not None else None
        with group.timed(self.stopwatch), self.events.opened(self.done), self._checkpointed():
            if saved is None and self.manner.from_start:
                self._judge(None)
            self.stopwatch.taken()  # the time until here belongs to no epoch
            for number in range(self.progress.epoch, math.ceil(self.steps / len(self.batches))):
                self._epoch(number, random)
                random = None
        load_state(self.module, self.progress.kept)
        if self.zeros is not None:
            self.zeros.check()
        self.module.eval()
        notes = (
            *self.objective.notes,
            *(
                f"of the {title} images, {note}"
                for title, read in (("training", self.batches), ("held-out", self.validation))
                for note in group.gathered(read.note() if read.left_out else None)
                if note is not None
            ),
        )
        history = self.progress.history(len(self.batches), group.world())
        self.context.listener.said(f"training: {history.split}")
        return TrainingResult(
            history,
            self.progress.reached,
            len(self.held),
            self.context.task.metric.title,
            tuple(dict.fromkeys(notes)),
        )

    def _checkpointed(self) -> contextlib.AbstractContextManager[None]:
        if not self.config.activation_checkpointing:
            return contextlib.nullcontext()
        self._set_mode(self.progress.epoch, training=True)
        images = self.config.batch_size // (self.config.accumulate * group.world())
        return checkpointed(self.module, self.context.example, images, self.device)

    def _epoch(self, number: int, random: dict[str, Any] | None) -> None:
        """Train the rest of an epoch, and judge it."""
        self._set_mode(number, training=True)
        progress, said = self.progress, f"epoch {number + 1}/{self.config.epochs}"
        if random is not None:  # random numbers are drawn from here on
            restore_random_states(random, self.device)
        for batch in self.batches.placed(number, progress.place):
            step = number * len(self.batches) + batch.place
            if step >= self.steps:
                break
            # All processes must know how many images each has, and whether the first needs a checkpoint now.
            known = group.numbers(len(batch.rows), self.checkpoints.due, device=self.device)
            counts = [images for images, _ in known]
            if min(counts):  # otherwise a process has no readable image of this batch
                self._step(step, batch, Draws(self.context.seed, number, batch.rows), counts)
            progress.place = batch.place + 1
            if progress.place % self.stride == 0:
                self._point()
            self.context.listener.progressed(self.done / self.steps, said)
            if known[0][1]:
                with self.stopwatch.during("checkpoints"):
                    self._save()
        self._point()
        if not progress.epoch_images:
            raise PassError(f"no batch of epoch {number + 1} has an image in each process that can be read")
        with self.stopwatch.during("judgement"):
            score = self._judge(number)
        times = progress.times + self.stopwatch.taken()
        progress.epochs.append(Epoch(progress.epoch_loss / progress.epoch_images, score, times))
        self.events.epoch(progress.epochs[-1], self.done)
        progress.next_epoch()

    def _point(self) -> None:
        """Record the mean loss of the steps since the last point.

        Raises:
            PassError: it is not finite.
        """
        progress, config = self.progress, self.config
        if not progress.images:
            return
        seen = progress.loss.new_tensor(progress.images, dtype=torch.float64)
        loss, images = group.summed(torch.stack((progress.loss.double(), seen))).tolist()
        if not math.isfinite(loss):
            self.checkpoints.forget()
            raise self._diverged(f"the loss is {loss}")
        progress.epoch_loss += loss
        progress.epoch_images += images
        last_rate = rate(self.done - 1, self.steps, peak_rate(config), config.warm_up)
        progress.points.append(Point(self.done, loss / images, last_rate))
        self.events.point(progress.points[-1])
        progress.loss, progress.images = torch.zeros((), device=self.device), 0.0

    def _diverged(self, said: str, otherwise: str = "") -> PassError:
        number, peak = self.progress.epoch + 1, self.config.learning_rate
        return PassError(
            f"training diverged: {said} in epoch {number}; lower learning_rate (it is {peak:g}){otherwise}"
        )

    @contextlib.contextmanager
    def _told_of_weights(self) -> Iterator[None]:
        """Explain a failure of the network within the block if a weight is not finite.

        For a range that is NaN, torch's fake quantizers (2.11 to 2.14) complain about a zero-point outside the range.

        Raises:
            PassError: it failed, and a weight is NaN or infinite.
        """
        try:
            yield
        except RuntimeError:
            for name, weight in self.module.named_parameters():
                if not weight.isfinite().all():
                    self.checkpoints.forget()
                    why = f"{name} became NaN or infinite"
                    raise self._diverged(
                        why, ", or fix a gradient that is not a number (a root or a quotient of 0)"
                    ) from None
            raise

    def _step(self, step: int, batch: Placed, draws: Draws, counts: list[int]) -> None:
        """Take one step of the optimizer on a part of a batch. ``counts`` are the numbers of images in each process."""
        config, device = self.config, self.device
        images, targets = change(
            batch.images.to(device, non_blocking=True),
            batch.targets.to(device, non_blocking=True),
            self.augmentation,
            draws,
            crop_scale=config.crop_scale,
            trivial=config.trivial_augment,
        )
        inputs = normalise(images, self.context.preprocessing, device, torch.float32)
        if config.mixup is not None:
            shares = self.context.task.shares(targets, len(self.context.data.classes))
            inputs, targets = mixed(inputs, shares, config.mixup, draws)
        if config.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self.stopwatch.to("compute")
        self.optimizer.zero_grad(set_to_none=True)
        # At least two images, for norms in training, and equally many pieces in each process.
        pieces = max(1, min(config.accumulate, min(counts) // 2))
        divided = zip(*(each.tensor_split(pieces) for each in (inputs, targets, batch.rows)), strict=True)
        for number, piece in enumerate(map(Piece._make, divided), start=1):
            with self._told_of_weights(), self.forward.unsynchronised(number < pieces, batch.copies):
                loss = self.objective.loss(self.precision.forward(self.forward.module, piece.inputs), piece)
                # The mean over the whole batch, which is the mean of the processes' gradients.
                weight = len(piece.targets) * len(counts) / sum(counts)
                self.precision.backward(loss if weight == 1 else loss * weight)
                self.stopwatch.to("compute")  # the backward may have ended with waiting for the others
            self.progress.loss += loss.detach() * (len(piece.targets) / batch.copies)
        self.progress.images += len(targets) / batch.copies
        self.precision.unscale(self.optimizer)
        if self.manner.penalty is not None:
            self.manner.penalty.add(self.module)
        if self.zeros is not None:
            self.zeros.drop_gradients()
        clip(self.optimizer, config.clip_norm)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = rate(step, self.steps, peak_rate(config), config.warm_up)
        self.precision.step(self.optimizer)
        if self.average is not None:
            self.average.update(step)
        self.stopwatch.to("data")

    def _judge(self, number: int | None) -> float:
        """Compute the score on the held-out images after an epoch, or before the first (None). Keep the best state."""
        progress = self.progress
        with self.average.applied() if self.average is not None else contextlib.nullcontext():
            self._set_mode(number or 0, training=False)
            with self._told_of_weights():
                score = score_of(self.module, self.validation, self.context)
            # The later of two equal epochs has seen more images. A trained initial network is replaced only by a better
            # one.
            pulled = self.manner.penalty is not None and number is not None
            if pulled or score > progress.reached or (progress.best is not None and score == progress.reached):
                progress.best, progress.reached = number, score
                progress.kept = copy.deepcopy(self.module.state_dict())
        if number is None:
            progress.before = score
        return score

    def _set_mode(self, number: int, *, training: bool) -> None:
        self.module.train(training)
        if self.manner.set_mode is not None:
            self.manner.set_mode(self.module, number, training)

    def _save(self) -> None:
        """Write a checkpoint. The first process gets the others' own states for it."""
        self.progress.times += self.stopwatch.taken()
        own = {
            "random": random_states(self.device),
            "left_out": [self.batches.left_out, self.validation.left_out],
            "loss": [self.progress.loss.cpu(), self.progress.images],
        }
        every = group.gathered(own)
        if group.rank() == 0:
            state = {
                "progress": self.progress.state(),
                "module": self.module.state_dict(),
                "beside": self.objective.own.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "average": self.average.state() if self.average is not None else None,
                "precision": self.precision.state(),
                "processes": every,
            }
            self.checkpoints.save(state)

    def _go_on(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Restore the state of `_save`.

        Returns:
            The random states, to be restored when no further preparation draws random numbers.
        """
        self.progress = Progress.of_state(saved["progress"], self.device)
        load_state(self.module, saved["module"])
        self.objective.own.load_state_dict(saved["beside"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.average is not None:
            self.average.load(saved["average"])
        self.precision.load(saved["precision"])
        done = self.progress
        self.context.listener.said(f"training continues in epoch {done.epoch + 1}, after {done.place} of its steps")
        own: dict[str, Any] = saved["processes"][group.rank()]
        done.loss, done.images = own["loss"][0].to(self.device), own["loss"][1]
        self.batches.left_out, self.validation.left_out = own["left_out"]
        random: dict[str, Any] = own["random"]
        return random


def score_of(module: nn.Module, batches: Loader, context: Context) -> float:
    """Return the task's score of ``module``, in eval mode, over the batches of all processes."""
    evidence = []
    with torch.no_grad():
        for images, targets in batches:
            answer = module(normalise(images, context.preprocessing, context.device, torch.float32))
            outputs = tuple(output.cpu() for output in as_outputs(answer))
            evidence.append(context.task.evidence(outputs, targets.cpu(), len(context.data.classes)))
    own = joined_evidence(evidence) if evidence else None
    return context.task.score(joined_evidence(part for part in group.gathered(own) if part is not None))


def _loaders(fit: Split, held: Split, context: Context, config: TrainingConfig) -> tuple[Loader, Loader]:
    """Return the loader of the training images, in another order each epoch, and that of the held-out images."""
    unreadable: dict[str, Any] = {
        "device": context.device,
        "skip_unreadable": config.skip_unreadable,
        "remedy": f"training may leave out at most {config.skip_unreadable:.2%} of them (skip_unreadable)",
        "said": context.listener.said,
    }
    preprocessing = context.preprocessing
    share = group.rank(), group.world()
    batches = loader(
        fit, preprocessing, batch_size=config.batch_size, shuffle=True, seed=context.seed, share=share, **unreadable
    )
    # Each process takes every n-th image, because the counts of right answers are added up.
    mine = part(held, np.arange(len(held))[share[0] :: share[1]]) if group.together() else held
    return batches, loader(mine, preprocessing, batch_size=256, scratch=context.scratch, **unreadable)
