"""The settings of training. Their defaults depend on the chosen optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from optimize.data.augmentation_choice import Augmentation
from optimize.data.records import ImageData
from optimize.training.distil import Distil, as_distil
from serve.common.config import Config

Optimizer = Literal["sgd", "adamw"]

C = TypeVar("C", bound=Config)

#: The settings of a network's first training that suit its later ones, too: they are about the size of its images.
#: Rates and epochs are not, because later trainings go on from trained weights.
_OF_A_STEP = ("batch_size", "channels_last")


def by_optimizer(*, sgd: float | None, adamw: float | None) -> Callable[[dict[str, Any]], Any]:
    """Return a default that depends on the optimizer, for fields after it."""
    usual = {"sgd": sgd, "adamw": adamw}
    return lambda others: usual.get(others.get("optimizer", "sgd"))


class TrainingConfig(Config):
    """Settings of a training run: warm-up, then cosine (one cycle), with the best epoch kept."""

    model_config = ConfigDict(title="Training")  # the name that users know
    described_by = "opt.Training"

    epochs: int = Field(default=8, ge=1, description="number of passes over the training images")
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="end after this number of steps, even within an epoch; the learning rate is planned for them",
    )
    batch_size: int = Field(default=64, ge=2, description="images per step")
    accumulate: int = Field(
        default=1,
        ge=1,
        description="number of parts in which the images of a step are computed, one after the other, to save memory",
    )
    optimizer: Optimizer = Field(
        default="sgd",
        description="sgd (with Nesterov momentum, for convolutional networks) or adamw (for transformers). The "
        "defaults of learning_rate, weight_decay and clip_norm depend on it",
    )
    learning_rate: float = Field(
        default_factory=by_optimizer(sgd=0.05, adamw=5e-4),
        gt=0,
        description="peak learning rate, reached after the warm-up; by default 0.05 for sgd and 0.0005 for adamw",
    )
    rate_for: int | None = Field(
        default=None,
        ge=1,
        description="batch size to which learning_rate refers; for another batch_size the rate is scaled, linearly "
        "for sgd and by the square root for adamw",
    )
    warm_up: float = Field(default=0.2, ge=0, lt=1, description="share of all steps in which the learning rate rises")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum of SGD, or of AdamW's mean of gradients")
    weight_decay: float = Field(
        default_factory=by_optimizer(sgd=5e-4, adamw=0.05),
        ge=0,
        description="weight decay, not for norms and biases; by default 0.0005 for sgd and 0.05 for adamw",
    )
    clip_norm: float | None = Field(
        default_factory=by_optimizer(sgd=None, adamw=1.0),
        gt=0,
        description="largest gradient norm of a step, over all parameters (L2); by default 1 for adamw and none for "
        "sgd",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="share of each label that is spread evenly over all classes"
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay of a moving average of the weights, which is then evaluated and kept, such as 0.999",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="dtype of matrix products and convolutions (automatic mixed precision); weights, their updates "
        "and the evaluation of held-out images are always float32",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="discard the activations within blocks and compute them again in the backward pass: less memory, "
        "more time, the same result",
    )
    channels_last: bool = Field(
        default=False,
        description="store colour images channels-last: on CPUs depthwise networks train faster, ResNet-18 slower; "
        "not for networks that call view",
    )
    deterministic: bool = Field(
        default=False, description="use only algorithms that repeat bit for bit; on CPUs they always do"
    )
    augment: Literal["data", "none", "shift", "shift+flip"] | bool = Field(
        default="data", description="random changes of the training images; data: as suits the data set"
    )
    crop_scale: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="train on random crops of at least this share of an image's area, scaled to its size "
        "(RandomResizedCrop, 0.08 for ImageNet from scratch); null: whole images",
    )
    trivial_augment: bool = Field(
        default=False,
        description="one random operation on each training image (TrivialAugmentWide); with class maps only on "
        "its colours",
    )
    mixup: float | None = Field(
        default=None, gt=0, description="mix training images in pairs, by shares of Beta(mixup, mixup), such as 0.2"
    )
    skip_unreadable: float = Field(
        default=0.01, ge=0, le=1, description="share of the training images that may be unreadable; they are left out"
    )
    holdout: float = Field(
        default=0.1, gt=0, lt=0.5, description="share of the training images held out to choose the best epoch"
    )

    distil: Annotated[Distil | None, BeforeValidator(as_distil)] = Field(
        default=None,
        description="also learn from a teacher: its name (self, or an artifact), or a mapping with temperature, "
        "weight and features; see opt.Distil",
    )

    @field_validator("augment", mode="before")
    @classmethod
    def _in_words(cls, value: object) -> object:
        """Replace a truth value by a word, so that equal settings are equal."""
        return {True: "data", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _keeps_what_it_compares(self) -> Self:
        if self.activation_checkpointing and self.distil is not None and self.distil.features:
            raise ValueError(
                "activation_checkpointing discards the activations that distil.features compares; use one of them"
            )
        return self

    @model_validator(mode="after")
    def _of_parts_with_images(self) -> Self:
        if self.batch_size < 2 * self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} leaves parts with fewer than the two images that norms need, with "
                f"batch_size={self.batch_size}"
            )
        return self

    def augmentation(self, data: ImageData) -> Augmentation:
        """Return the random changes for the training images of ``data``."""
        return data.augment if self.augment == "data" or isinstance(self.augment, bool) else self.augment


class Retraining(TrainingConfig):
    """Settings for training a trained network again: shorter, and with smaller steps."""

    epochs: int = Field(default=3, ge=1, description="number of passes over the training images")
    learning_rate: float = Field(
        default_factory=by_optimizer(sgd=0.01, adamw=1e-4),
        gt=0,
        description="peak learning rate, reached after the warm-up; by default 0.01 for sgd and 0.0001 for adamw",
    )


def trainings(config: Config) -> dict[str, TrainingConfig]:
    """Return a pass's settings of trainings: its own under the name ``""``, nested ones under their names."""
    within = {name: getattr(config, name) for name in type(config).model_fields}
    return {name: part for name, part in {"": config, **within}.items() if isinstance(part, TrainingConfig)}


def suited(config: C, defaults: Mapping[str, Any]) -> C:
    """Return a pass's settings whose trainings take `_OF_A_STEP` from ``defaults`` where nobody set them.

    Args:
        config: the settings of any pass.
        defaults: what suits the training of the network from the start, by the name of the setting.
    """
    of_a_step = {name: defaults[name] for name in _OF_A_STEP if name in defaults}
    changed = {
        name: part.model_copy(update={key: of_a_step[key] for key in of_a_step.keys() - part.model_fields_set})
        for name, part in trainings(config).items()
    }
    own = changed.pop("", config)
    return own.model_copy(update=changed) if changed else own  # type: ignore[return-value]


def trains(config: Config) -> bool:
    """Return whether settings contain a training of at least one epoch."""
    return any(training.epochs > 0 for training in trainings(config).values())


def distillations(config: Config) -> list[Distil]:
    """Return the settings of learning from a teacher in the trainings of a pass."""
    return [part.distil for part in trainings(config).values() if part.distil is not None]


def in_words(config: C) -> C:
    """Return the settings with a teacher's name in its place. They can be stored and sent to other processes."""
    update: dict[str, Any] = {}
    for holder, training in trainings(config).items():
        if training.distil is not None:
            distil = training.distil.model_copy(update={"teacher": training.distil.named})
            update |= {holder: training.model_copy(update={"distil": distil})} if holder else {"distil": distil}
    return config.model_copy(update=update)


def inputs(config: Config) -> dict[str, Any]:
    """Return the settings as inputs of a key, as JSON values, without the teacher, whose name is not an input."""
    settings = config.model_dump(mode="json")
    for holder, training in trainings(config).items():
        if training.distil is not None:
            (settings[holder] if holder else settings)["distil"].pop("teacher")
    return settings
