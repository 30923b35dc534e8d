"""The artifact: a model file and its card in a folder, what it descends from, and its eager module if it has one."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import fx, nn

from optimize.errors import NotApplicableError, PassError
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

_FP16_MAX = 65504.0

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


def write_weights(module: nn.Module, folder: Path) -> None:
    """Write the state dict as ``weights.safetensors``, which is what a child's eager module is rebuilt from."""
    # Tied tensors are written once per name: a state dict read back must be complete.
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in module.state_dict().items()}
    save_file(state, folder / WEIGHTS_FILE)


def write_program(module: nn.Module, example: torch.Tensor, folder: Path, *, stem: str = "model") -> tuple[str, Format]:
    """Write a float module so that it opens without its Python code, with a dynamic batch.

    A ``torch.export`` program where the model can be exported, else a traced TorchScript file.

    Args:
        module: in eval mode; its dtype is the file's.
        example: ``(N, C, H, W)`` of the module's dtype, N >= 2.
        folder: where to write.
        stem: file name without suffix.

    Returns:
        The file's name and format.
    """
    try:
        program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    except Exception as error:  # noqa: BLE001 - torch.export raises what the model's own code raises, and more
        try:
            return write_script(module, example, folder, stem=stem), "torchscript"
        except Exception:  # noqa: BLE001
            raise PassError(
                f"neither torch.export nor torch.jit.trace can write this model: {one_line(error)}"
            ) from None
    file = f"{stem}.pt2"
    save_program(program, folder / file)
    return file, "exported_program"


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write an exported program without what does not belong into an artifact.

    ``torch.export.save`` (2.11 to 2.14) also writes the example inputs: images of the user's data, which at
    224x224 pixels would be 600 kB each.
    """
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # names the builder's source paths
        node.meta.pop("from_node", None)  # and addresses in its memory, which differ from run to run
    program.example_inputs = None
    torch.export.save(program, path)


def write_script(module: nn.Module, example: torch.Tensor, folder: Path, *, stem: str = "model") -> str:
    """Trace, freeze and write a module as TorchScript; returns the file's name.

    TorchScript is the only file format for torch.ao's packed int8 modules; it warns of its deprecation
    since torch 2.14.
    """
    file = f"{stem}.pt"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        torch.jit.save(torch.jit.freeze(traced), str(folder / file))
    return file


def check_fp16_range(module: nn.Module) -> None:
    """Refuse weights that FP16 cannot hold.

    Raises:
        NotApplicableError: one is larger than 65504 in magnitude, named.
    """
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and tensor.abs().max() > _FP16_MAX:
            raise NotApplicableError(f"weight {name} holds {tensor.abs().max():.3g}, more than FP16's {_FP16_MAX:.0f}")


def trace(module: nn.Module) -> fx.GraphModule:
    """Symbolically trace a module in eval mode.

    Eval matters: FX bakes ``self.training`` into calls such as ``F.dropout(x, training=…)`` and
    torchvision's ``stochastic_depth``; traced in training mode they would stay active for ever.

    Raises:
        PassError: its forward cannot be traced, such as one that branches on tensor values.
    """
    try:
        return fx.symbolic_trace(module.eval())
    except Exception as error:  # noqa: BLE001 - the user's forward runs on proxies and may raise anything
        raise PassError(f"torch.fx cannot trace this model: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """The first non-empty line of an exception's message, with its type, for a one-line report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
