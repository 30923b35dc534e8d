"""The settings of learning from a teacher: which teacher, how soft its answers are, and which of its layers.

The loss of a step is (Hinton et al. 2015, arXiv:1503.02531, section 2. The last part follows Romero et al. 2015,
arXiv:1412.6550)::

    (1 - weight) * cross-entropy with the labels
    + weight * T**2 * KL(softmax(teacher / T) || softmax(student / T))
    + feature_weight * mean over features of |student - teacher|**2 / |teacher|**2
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, PlainSerializer, model_validator
from torch import nn

from optimize.store.artifact import Artifact
from serve.common.config import Config

#: The word for the float network that a pass starts from.
SELF = "self"

_FORMS = "self, the name of an artifact, or a model with its weights: {model: resnet50, weights: DEFAULT}"


class TeacherModel(Config):
    """A teacher that is not an artifact: a model with its weights."""

    model_config = ConfigDict(title="teacher")

    model: str = Field(
        description="a network's name (torchvision's, cnn_small, unet_small or timm:NAME), path/to/file.py:factory or "
        "package.module:factory"
    )
    checkpoint: Path | None = Field(
        default=None, description="its weights: a checkpoint, or the weights.safetensors of an artifact"
    )
    weights: str | None = Field(
        default=None, description="instead of a checkpoint: the name of torchvision's weights, such as DEFAULT"
    )
    weights_key: str | None = Field(default=None, description="which weights of the checkpoint to use")
    trust_checkpoint: bool = Field(default=False, description="let the checkpoint's pickle run code")

    @model_validator(mode="after")
    def _has_weights(self) -> TeacherModel:
        if (self.checkpoint is None) == (self.weights is None):
            given = "both are given" if self.weights is not None else "it has neither"
            raise ValueError(f"{self.model} needs weights to be a teacher: set checkpoint or weights ({given})")
        if self.weights_key is not None and self.checkpoint is None:
            raise ValueError(f"weights_key {self.weights_key} needs a checkpoint, and none is given")
        if self.trust_checkpoint and self.checkpoint is None:
            raise ValueError("trust_checkpoint needs a checkpoint, and none is given")
        return self


def _teacher(given: object) -> object:
    """Return the teacher: a word, a model or an artifact. Variants are accepted by their ``artifact``."""
    given = getattr(given, "artifact", given)
    if isinstance(given, Mapping):
        return TeacherModel(**{str(name): value for name, value in given.items()})
    if not isinstance(given, str | TeacherModel | Artifact | nn.Module) or given == "":
        raise ValueError(f"must be {_FORMS}")
    return SELF if given == "parent" else given


def _in_words(teacher: str | TeacherModel | Artifact | nn.Module) -> Any:
    if isinstance(teacher, TeacherModel):
        return teacher.model_dump(mode="json", exclude_defaults=True)
    if isinstance(teacher, nn.Module):
        return type(teacher).__name__
    return teacher.name if isinstance(teacher, Artifact) else teacher


def _pairs(given: object) -> object:
    """Turn names that student and teacher share into pairs."""
    if isinstance(given, list | tuple) and all(isinstance(name, str) for name in given):
        return {name: name for name in given}
    return given


Teaching = Annotated[
    str | InstanceOf[TeacherModel] | InstanceOf[Artifact] | InstanceOf[nn.Module],
    BeforeValidator(_teacher),
    PlainSerializer(_in_words),
]


class Distil(Config):
    """Settings of learning from a teacher, which answers the same images."""

    teacher: Teaching = Field(
        description="the teacher: self or parent (the float network that the pass starts from), the name of an "
        "earlier artifact, or a model with its weights: {model: …, checkpoint: …}"
    )
    temperature: float = Field(
        default=2.0,
        gt=0,
        description="divisor of the logits of both networks: the higher, the more the small logits count; at 3 bits "
        "and fewer, values above 2 reduce accuracy",
    )
    weight: float = Field(
        default=0.5, ge=0, le=1, description="share of the teacher's outputs in the loss; the labels have the rest"
    )
    features: Annotated[dict[str, str], BeforeValidator(_pairs)] = Field(
        default={},
        description="nodes of the student's torch.fx graph whose values should match the teacher's: "
        "{student: teacher}, or a list if both have the same names",
    )
    feature_weight: float = Field(
        default=1.0,
        gt=0,
        description="weight of the mean squared error of the features, relative to the teacher's mean square",
    )

    @property
    def named(self) -> str:
        """Return the teacher's name for messages."""
        return self.teacher.model if isinstance(self.teacher, TeacherModel) else str(_in_words(self.teacher))

    @model_validator(mode="after")
    def _learns_something(self) -> Distil:
        if not self.weight and not self.features:
            raise ValueError("weight is 0 and there are no features: nothing would be learned from the teacher")
        return self


def as_distil(given: object) -> object:
    """Turn a teacher alone into settings with that teacher."""
    return given if given is None or isinstance(given, Distil | Mapping) else {"teacher": given}
