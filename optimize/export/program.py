"""Writes a float module's program so that it opens without its Python code, and an artifact's weights."""

from __future__ import annotations

import io
import re
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from optimize.errors import PassError
from optimize.store.artifact import WEIGHTS_FILE
from optimize.tracing.aten_program import program_of
from serve.runtime.card.card import Format
from serve.runtime.errors import EngineError, one_line
from serve.runtime.model_files.program_file import save_program

_MANGLED = re.compile(rb"___torch_mangle_\d+")


def write_weights(module: nn.Module, folder: Path) -> None:
    """Write the state dict as ``weights.safetensors``. The eager module of a child artifact is rebuilt from it."""
    # Tied tensors are written once per name, because a state dict that is read back must be complete. Anything but
    # tensors from `get_extra_state` is restored by building the module.
    own = ((name, value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor))
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in own}
    save_file(state, folder / WEIGHTS_FILE)


def write_program(module: nn.Module, example: torch.Tensor, folder: Path, *, stem: str = "model") -> tuple[str, Format]:
    """Write a float module so that it opens without its Python code, with a dynamic batch.

    The file is a ``torch.export`` program if the model can be exported, and a traced TorchScript file otherwise.

    Args:
        module: in eval mode. Its dtype is the file's.
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
    except EngineError:  # the runtime would refuse it: a custom operator, a pickled tensor subclass …
        (folder / file).unlink()
        return write_script(module, example, folder, stem=stem), "torchscript"
    return file, "exported_program"


def write_script(module: nn.Module, example: torch.Tensor, folder: Path, *, stem: str = "model") -> str:
    """Trace, freeze and write a module as TorchScript, and return the file's name.

    TorchScript is the only file format for torch.ao's packed int8 modules. It warns of its deprecation since torch
    2.14.
    """
    file = f"{stem}.pt"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        memory = io.BytesIO()  # torch's own writer (2.14) ends the process where the disk is full
        torch.jit.save(torch.jit.freeze(traced), memory)
    (folder / file).write_bytes(_with_names_of_its_own(memory))
    return file


def _with_names_of_its_own(written: io.BytesIO) -> bytes:
    """Return a TorchScript file with type names that depend on the module alone.

    Torch (2.14) tells types of one name apart by a number that counts up in the process (``___torch_mangle_7``). The
    same module gave other bytes after an interruption. Here the types are numbered again within the file. The debug
    records (``.debug_pkl``) also contain these names, and the file's id is a hash of everything. No reader needs
    either, so both are left out.
    """
    numbers: dict[bytes, bytes] = {}

    def renamed(text: bytes) -> bytes:
        return _MANGLED.sub(lambda found: numbers.setdefault(found[0], b"___torch_mangle_%d" % len(numbers)), text)

    with zipfile.ZipFile(written) as opened:
        records = {entry.filename: opened.read(entry) for entry in opened.infolist()}
    root = next(name for name in records if name.endswith("/data.pkl")).removesuffix("data.pkl")
    kept = {f"{root}data.pkl": renamed(records.pop(f"{root}data.pkl"))}  # first, because it names the module's own type
    for name, content in records.items():
        if name.endswith((".py", ".pkl")):
            kept[renamed(name.encode()).decode()] = renamed(content)
        elif not name.endswith((".debug_pkl", "/serialization_id")):
            kept[name] = content
    anew = io.BytesIO()
    with zipfile.ZipFile(anew, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(kept):
            archive.writestr(zipfile.ZipInfo(name), kept[name])
    return anew.getvalue()
