"""Writing a float module's program so that it opens without its Python code; what an artifact's weights are kept as."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from optimize.errors import PassError
from optimize.export.aten import program_of
from optimize.store.artifact import WEIGHTS_FILE
from serve.runtime.card import Format
from serve.runtime.errors import EngineError, one_line
from serve.runtime.program_file import save_program


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
        program = program_of(module, example)
    except Exception as error:  # noqa: BLE001 - torch.export raises what the model's own code raises, and more
        try:
            return write_script(module, example, folder, stem=stem), "torchscript"
        except Exception:  # noqa: BLE001
            raise PassError(
                f"neither torch.export nor torch.jit.trace can write this model: {one_line(error)}"
            ) from None
    file = f"{stem}.pt2"
    try:
        save_program(program, folder / file)
    except EngineError:  # the runtime would refuse it: a custom operator, a tensor subclass that must be pickled …
        (folder / file).unlink()
        return write_script(module, example, folder, stem=stem), "torchscript"
    return file, "exported_program"


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
