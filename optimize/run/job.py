"""The job, which holds what the user asks for. Its fields are the options of ``optimize run``.

Help texts are made from it, so it must not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import ConfigDict, Field, InstanceOf, field_validator, model_validator

from optimize.data.augmentation_choice import AUGMENTATIONS, Augmentation
from optimize.data.formats.base import SEEDS
from optimize.models.preprocessing_config import PreprocessingConfig, Wish, parse_preprocessing
from optimize.run.recommendation.rule import Recommend
from serve.common import layout
from serve.common.config import Config, Option, OptionsOf
from serve.common.hints import DEFAULT_STORE
from serve.runtime.errors import did_you_mean

if TYPE_CHECKING:
    from torch.nn import Module

    from optimize.data.records import ImageData
else:

    class _Foreign(type):
        """Stands for a class that is not imported here, because importing torch would delay a help text by a second.

        Its instances are recognised all the same: whoever holds one has imported its module.
        """

        def __instancecheck__(cls, instance: object) -> bool:
            home = sys.modules.get(cls.home)
            return home is not None and isinstance(instance, getattr(home, cls.__name__))

    Module = _Foreign("Module", (), {"home": "torch.nn"})
    ImageData = _Foreign("ImageData", (), {"home": "optimize.data.records"})

_LONGEST_NAME = 128  # with an artifact's name of 64 and endings, a file's name has at most 255


def _asked_preprocessing(given: dict[str, Any]) -> Wish:
    return Wish(parse_preprocessing(given, "--{}"))


class Job(Config):
    """The options of a run, as on the command line."""

    model_config = ConfigDict(title="")  # messages name its settings like the command line

    model: str | InstanceOf[Module] = Field(
        description="A network's name (torchvision's, cnn_small, unet_small or timm:NAME), path/to/file.py:factory or "
        "some.module:factory. A program may also give a module with its weights."
    )
    checkpoint: Path | None = Field(
        default=None,
        description="A file of trained weights: .pt, .pth, .ckpt, .th, .tar or .safetensors; without one the baseline "
        "is trained. It holds a state dict, or a dict or list with one, in FP16 or FP32. Prefixes of wrappers are "
        "removed, and the run says so.",
    )
    data: str | InstanceOf[ImageData] | None = Field(
        default=None,
        description="The images to train, calibrate and measure with; by default digits, or for a network for "
        "segmentation scenes. Without a download there are digits, scenes, scenelabels, scenenumbers and "
        "retrievaldigits. Your own lie in imagefolder:DIR, masks:DIR, retrieval:DIR, csvlabels:FILE, csvnumbers:FILE "
        "or cocolabels:DIR. Names such as cifar10 are data sets of torchvision, which downloads them. An imagefolder "
        "has train/ and val/ or test/, or one folder of class folders, which a seeded hash of the file names splits. "
        "Masks lie in masks/ as the images in images/. A program may also give a data set that is open.",
    )
    classes: Path | tuple[str, ...] | None = Field(
        default=None,
        description="A text file with the names of the classes, one a line, instead of the data's own. A program may "
        "also give the names.",
    )
    class_order: Annotated[str | Path | tuple[str, ...] | None, Option(metavar="ORDER")] = Field(
        default=None,
        description="Which output means which class: data, sorted, natural, checkpoint, or a file with a name a line; "
        "by default what the checkpoint states, or else the data's order. In natural order numbers count by "
        "their value, as timm sorts them. A program may also give the names.",
    )
    val_images: int | None = Field(
        default=None,
        ge=1,
        description="The number of validation images that accuracy is measured on, drawn from each class alike; by "
        "default all.",
    )
    augment: Augmentation | None = Field(
        default=None,
        description="Random changes of training images; by default what suits the data. The default mirrors nothing. "
        "shift+flip does, which is wrong for text and signs.",
    )
    skip_unreadable: bool = Field(
        default=False,
        description="Measure without the validation images that cannot be read; the report counts them. By default "
        "they are named, and the run is refused.",
    )
    accept_gaps: bool = Field(
        default=False,
        description="Accept data in which something is missing, such as the images of a class. By default the run "
        "is refused, and says what is missing.",
    )
    recipe: Path | None = Field(
        default=None,
        description="A YAML file of stages; the default runs fuse, half, dynamic, ptq, qat, onnx, onnx-half and "
        "onnx-int8 (`passes` lists the others).",
    )
    store: Path = Field(default=DEFAULT_STORE, description="The folder that runs are kept in.")
    device: str = Field(
        default="auto",
        description="Where to train and calibrate: auto, cpu, cuda or cuda:N. auto takes CUDA if there is any.",
    )
    measure: str = Field(
        default="auto",
        description="Where to measure: auto (every device of the machine), or a list such as cpu,cuda.",
    )
    image_size: int | None = Field(
        default=None,
        ge=1,
        description="The side of the network's input in pixels; by default what model and data ask for.",
    )
    weights: str | None = Field(
        default=None,
        description="The name of weights of torchvision, such as DEFAULT. Their preprocessing is used, too.",
    )
    weights_key: str | None = Field(
        default=None,
        description="Which weights of the checkpoint: model, ema …, or a prefix such as teacher; by default averaged "
        "weights, if there are any.",
    )
    outputs: str | None = Field(
        default=None,
        description="Names of the network's outputs to keep, separated by commas, the class logits first. A name is a "
        "key, a field or a number of what the forward returns, such as out, 0 or features.1. By default the output "
        "called logits, or the only one.",
    )
    preprocessing: Annotated[InstanceOf[Wish] | None, OptionsOf(PreprocessingConfig, _asked_preprocessing)] = Field(
        default=None, description="The parts of the preprocessing that differ from what model and data ask for."
    )
    run: Annotated[str | None, Option("--name", variable="RUN")] = Field(
        default=None, description="The name of the run; by default made of model and data."
    )
    replace: bool = Field(
        default=False, description="Replace a run of this name, even if it is of another model or other data."
    )
    seed: int = Field(default=0, ge=0, lt=SEEDS, description="The seed of every random choice.")
    processes: int | None = Field(
        default=None,
        ge=1,
        description="The number of processes of this machine that train together, on GPUs one on each; by default one, "
        "and under torchrun those that it has started.",
    )
    tensorboard: Annotated[Path | None, Option(metavar="DIR")] = Field(
        default=None,
        description="A folder for the curves of what is trained, which TensorBoard shows. It needs the extra "
        "tensorboard.",
    )
    remeasure: bool = Field(default=False, description="Measure all speeds again.")
    recommend: Annotated[Mapping[str, object], OptionsOf(Recommend, dict)] = Field(
        default_factory=dict, description="What differs from the recipe's rule of the recommendation."
    )
    trust_checkpoint: bool = Field(
        default=False,
        description="Let the checkpoint's pickle run code, which only a file of your own should do. By default "
        "such a file is refused.",
    )

    @property
    def brings_weights(self) -> bool:
        """Return whether the model needs no training."""
        return self.checkpoint is not None or self.weights is not None or not isinstance(self.model, str)

    @field_validator("run")
    @classmethod
    def _names_a_run(cls, name: str | None) -> str | None:
        if name is not None and name.endswith(layout.FOUND_ENDINGS):
            ending = Path(name).suffix
            raise ValueError(
                f"the name of a run must not end in {ending}: the folder {name} is for the results of `{ending[1:]}`"
            )
        if name is not None and not layout.is_run_name(name):
            raise ValueError(
                "the name of a run must have letters, digits, '-', '_' and '.' only, and begin with a letter or digit"
            )
        if name is not None and len(name) > _LONGEST_NAME:
            raise ValueError(
                f"the name of a run must have at most {_LONGEST_NAME} characters, this one has {len(name)}"
            )
        return name

    @field_validator("outputs")
    @classmethod
    def _names_each_output_once(cls, names: str | None) -> str | None:
        listed = names.split(",") if names is not None else []
        if not all(listed) or len(set(listed)) < len(listed):
            raise ValueError(f"outputs must be different names with commas in between, found {names!r}")
        return names

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the names in ``outputs``."""
        return tuple(self.outputs.split(",")) if self.outputs is not None else ()

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
                f"--weights-key {self.weights_key} needs a checkpoint, and none is given; add --checkpoint FILE"
            )
        if self.class_order == "checkpoint" and self.checkpoint is None and isinstance(self.model, str):
            raise ValueError("--class-order checkpoint needs a checkpoint, and none is given; add --checkpoint FILE")
        if self.trust_checkpoint and self.checkpoint is None:
            raise ValueError("--trust-checkpoint needs a checkpoint, and none is given; add --checkpoint FILE")
        if not isinstance(self.model, str) and (self.checkpoint is not None or self.weights is not None):
            raise ValueError(
                "a module has its weights already; leave out checkpoint and weights, or load them into the module"
            )
        return self

    def _wants_a_checkpoints_order(self) -> bool:
        if not isinstance(self.class_order, str):
            return False
        from optimize.data.class_order import CHECKPOINT  # imports torch

        return self.class_order == CHECKPOINT
