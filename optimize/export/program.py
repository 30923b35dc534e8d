"""Writing a float module's program so that it opens without its Python code; what an artifact's weights are kept as."""

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
    """Write the state dict as ``weights.safetensors``, which is what a child's eager module is rebuilt from."""
    # Tied tensors are written once per name: a state dict read back must be complete.
    # What `get_extra_state` gives beside tensors is as the module is built.
    own = ((name, value) for name, value in module.state_dict().items() if isinstance(value, torch.Tensor))
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in own}
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
        memory = io.BytesIO()  # torch's own writer (2.14) ends the process where the disk is full
        torch.jit.save(torch.jit.freeze(traced), memory)
    (folder / file).write_bytes(_with_names_of_its_own(memory))
    return file


def _with_names_of_its_own(written: io.BytesIO) -> bytes:
    """A TorchScript file with type names that depend on the module alone.

    torch (2.14) tells types of one name apart by a number that counts up in the process (``___torch_mangle_7``): the
    same module gave other bytes after an interruption. They are counted anew in the file. What tells where code came
    from (``.debug_pkl``) has these names, too, and the id of the file is a hash of all that; no reader needs either.
    """
    numbers: dict[bytes, bytes] = {}

    def renamed(text: bytes) -> bytes:
        return _MANGLED.sub(lambda found: numbers.setdefault(found[0], b"___torch_mangle_%d" % len(numbers)), text)

    with zipfile.ZipFile(written) as opened:
        records = {entry.filename: opened.read(entry) for entry in opened.infolist()}
    root = next(name for name in records if name.endswith("/data.pkl")).removesuffix("data.pkl")
    kept = {f"{root}data.pkl": renamed(records.pop(f"{root}data.pkl"))}  # the first: it names the module's own type
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
