"""The artifact: a model file and its card in a folder, what it descends from, and its eager module if it has one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file
from torch import nn

from optimize.errors import PassError
from serve.runtime.card import Card, Device, FloatType, Format

#: What an artifact is, as far as the passes that may follow it care.
Kind = Literal["module", "half", "dynamic", "quantized", "onnx", "onnx-half", "onnx-int8"]


#: Name of each kind in messages.
KIND_NAMES: dict[Kind, str] = {
    "module": "a float module",
    "half": "a reduced-precision program",
    "dynamic": "a dynamically quantized program",
    "quantized": "a quantized (int8) module",
    "onnx": "a float ONNX graph",
    "onnx-half": "an FP16 ONNX graph",
    "onnx-int8": "an int8 ONNX graph",
}


WEIGHTS_FILE = "weights.safetensors"


REFERENCE_FILE = "reference.pt2"


@dataclass(frozen=True)
class Product:
    """What a step wrote into its folder: the model file and the facts of it that the card states."""

    file: str
    format: Format
    precision: str
    device: Device = "any"
    input_dtype: FloatType = "float32"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Artifact:
    """One measured-or-to-be-measured result of a step.

    Attributes:
        name: unique within its run.
        kind: what it is; decides which passes may follow.
        key: the content-addressed key that it is stored by.
        folder: where its files and card are; treat as read-only.
        card: its card, verified when it was opened.
        parent: what it was made from; None for the baseline.
    """

    name: str
    kind: Kind
    key: str
    folder: Path
    card: Card
    parent: Artifact | None = None
    build_module: Callable[[], nn.Module] | None = field(default=None, repr=False, compare=False)

    @property
    def path(self) -> Path:
        """The model file."""
        return self.folder / self.card.file

    def module(self) -> nn.Module:
        """A fresh eager float module with this artifact's weights, in eval mode on the CPU.

        Raises:
            PassError: artifacts of this kind have no eager module.
        """
        if self.build_module is None:
            raise PassError(f"{self.name} is {KIND_NAMES[self.kind]} and has no eager module")
        module = self.build_module()
        state = OrderedDict(load_file(self.folder / WEIGHTS_FILE))
        # MNASNet refuses a state dict without the versions that nn.Module.state_dict notes beside it.
        state._metadata = module.state_dict()._metadata  # type: ignore[attr-defined]
        module.load_state_dict(state)
        return module.eval()
