"""The artifact: a folder with a model file and its card, the artifact's ancestors, and its eager module if any."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import nn

from optimize.errors import PassError
from optimize.store.atomic_files import write_json
from optimize.store.training_history import History
from serve.runtime.card.card import LOGITS, Card, Device, Format, InputType, Probabilities, load_card
from serve.runtime.display import Described
from serve.runtime.errors import CardError, UserError

#: The kind of an artifact, which decides the passes that may follow it.
Kind = Literal["module", "half", "dynamic", "quantized", "lowbit", "onnx", "onnx-half", "onnx-int8"]


#: The name of each kind in messages.
KIND_NAMES: dict[Kind, str] = {
    "module": "a float module",
    "half": "a reduced-precision program",
    "dynamic": "a dynamically quantized program",
    "quantized": "a quantized (int8) module",
    "lowbit": "a module trained with fewer bits",
    "onnx": "a float ONNX graph",
    "onnx-half": "an FP16 ONNX graph",
    "onnx-int8": "an int8 ONNX graph",
}


#: The kinds with an eager float module, whose weights are stored beside the program.
EAGER: frozenset[Kind] = frozenset({"module", "lowbit"})

#: The kinds that are ONNX graphs.
GRAPHS: frozenset[Kind] = frozenset({"onnx", "onnx-half", "onnx-int8"})

WEIGHTS_FILE = "weights.safetensors"
REFERENCE_FILE = "reference.pt2"
PRODUCT_FILE = "product.json"


@dataclass(frozen=True)
class Product:
    """What a step wrote into its folder: the model file, and the facts about it that the card states.

    ``structure`` is what the pass's ``resize`` needs to give a parent's module the shapes of this one, as JSON values.
    ``training`` is the history of each training behind the product, for reports: two products of one key differ in
    their times. ``probabilities`` says how the baseline's logits become probabilities, and ``outputs`` names its
    outputs. All that is made from the baseline inherits both. ``ending`` is as in the card.
    """

    file: str
    format: Format
    precision: str
    device: Device = "any"
    input_dtype: InputType = "float32"
    target: str | None = None
    notes: tuple[str, ...] = ()
    structure: Mapping[str, Any] = field(default_factory=dict)
    training: tuple[History, ...] = ()
    probabilities: Probabilities = "softmax"
    outputs: tuple[str, ...] = (LOGITS,)
    ending: tuple[str, ...] = ()


@dataclass(frozen=True)
class Made:
    """A product and its origin: the part of a card that does not depend on a name.

    Attributes:
        product: the product.
        versions: versions of the libraries that made it.
        machine: the machine that made it, with the device that it was trained on.
    """

    product: Product
    versions: Mapping[str, str]
    machine: Mapping[str, Any]


def write_product(made: Made, folder: Path) -> None:
    """Write ``product.json`` beside the files that it describes."""
    write_json(dataclasses.asdict(made), folder / PRODUCT_FILE)


def read_product(folder: Path) -> Made:
    """Read what `write_product` wrote."""
    body: dict[str, Any] = json.loads((folder / PRODUCT_FILE).read_text(encoding="utf-8"))
    product: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in body["product"].items()
    }
    product["training"] = tuple(map(History.from_json, product.get("training", ())))
    return Made(Product(**product), body["versions"], body["machine"])


@dataclass(frozen=True, repr=False)
class Artifact(Described):
    """The result of one step.

    It pickles as its keys and its place in the store. It is checked when it is unpickled.

    Attributes:
        name: unique within its run.
        kind: decides which passes may follow.
        key: identifies what it was made from. It does not depend on the name.
        folder: its files and card. Treat it as read-only.
        card: its card, verified when the artifact was opened.
        parent: the artifact that it was made from. None for the baseline.
        build_module: builds an eager module of its structure, with arbitrary weights. None if it has no such module.
        objects: keys of the store's objects that it consists of.
    """

    name: str
    kind: Kind
    key: str
    folder: Path
    card: Card
    parent: Artifact | None = None
    build_module: Callable[[], nn.Module] | None = field(default=None, compare=False)
    objects: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Callable[..., Artifact], tuple[Any, ...]]:
        place = self.folder.resolve()
        return _reopened, (self.name, self.kind, self.key, place, self.parent, self.build_module, self.objects)

    def line(self) -> Iterator[Artifact]:
        """Yield the artifact's ancestors, the baseline first, and then the artifact itself."""
        if self.parent is not None:
            yield from self.parent.line()
        yield self

    @property
    def path(self) -> Path:
        """Return the path of the model file."""
        return self.folder / self.card.file

    def module(self) -> nn.Module:
        """Return a new eager float module with this artifact's weights, in eval mode on the CPU.

        Raises:
            PassError: artifacts of this kind have no eager module.
        """
        if self.build_module is None:
            raise PassError(f"{self.name} is {KIND_NAMES[self.kind]} and has no eager module")
        module = self.build_module()
        own = module.state_dict()
        extra = {name: value for name, value in own.items() if not isinstance(value, torch.Tensor)}
        state = OrderedDict({**extra, **load_file(self.folder / WEIGHTS_FILE)})
        # MNASNet refuses a state dict without the versions that nn.Module.state_dict stores beside it.
        state._metadata = own._metadata  # type: ignore[attr-defined]
        module.load_state_dict(state)
        return module.eval()

    def _facts(self) -> dict[str, str]:
        made_from = {"made from": self.parent.name} if self.parent is not None else {}
        return {
            "name": self.name,
            "model": self.card.model,
            "kind": KIND_NAMES[self.kind],
            "format": self.card.format,
            "precision": self.card.precision,
            **made_from,
            "folder": str(self.folder),
        }


def _reopened(  # noqa: PLR0917 - pickle calls it
    name: str,
    kind: Kind,
    key: str,
    folder: Path,
    parent: Artifact | None,
    build_module: Callable[[], nn.Module] | None,
    objects: tuple[str, ...],
) -> Artifact:
    try:
        card = load_card(folder)
    except CardError as error:
        raise UserError(f"{name} cannot be opened, make it again: {error}") from None
    return Artifact(name, kind, key, folder, card, parent, build_module, objects)
