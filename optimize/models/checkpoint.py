"""Trained weights: a file or a download → a checked state dict, and a state dict → a module, safely.

Nothing here runs code from a checkpoint unless the caller says that it is trusted. What the weights
are loaded into is found by `optimize.models.source`.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from serve.runtime.card import sha256_file
from serve.runtime.errors import UserError, first_line

TRUST_FLAG = "--trust-checkpoint"

#: Where training scripts put the state dict, in order of preference.
_HOLDERS = ("state_dict", "model", "model_state_dict", "ema", "ema_state_dict", "model_ema", "module")
_PREFIXES = ("module.", "_orig_mod.")
#: How every file of torch's format before 1.6 begins: the pickled magic number.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LISTED = 8


@dataclass(frozen=True)
class Checkpoint:
    """A state dict in host memory, its floating-point tensors in float32.

    Attributes:
        state: parameters and buffers by name, without wrappers' prefixes.
        sha256: of the file they were read from.
        info: plain numbers that stood beside the state dict, such as ``epoch`` or ``best_prec1``.
    """

    state: Mapping[str, torch.Tensor]
    sha256: str
    info: dict[str, int | float] = field(default_factory=dict)


def read_checkpoint(path: Path, *, trust_pickle: bool = False) -> Checkpoint:
    """Read a ``.pt``/``.pth``/``.th``/``.tar`` or ``.safetensors`` file that holds a state dict.

    The state dict may be the whole file or lie under ``state_dict``, ``model``, ``model_state_dict``
    or ``ema`` (nested too). The prefixes that wrappers add (``module.`` of DataParallel when every key
    has it, ``_orig_mod.`` of ``torch.compile``) are taken off.

    Args:
        path: the file.
        trust_pickle: unpickle it without restriction, which runs whatever code the file asks for; a
            whole pickled ``nn.Module`` is then accepted as well.

    Raises:
        UserError: there is no such file, it is not a checkpoint, is broken, holds no state dict, or
            needs more than plain tensors while ``trust_pickle`` is false.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the checkpoint file itself")
    if not path.is_file():
        raise UserError(f"{path}: there is no such checkpoint file")
    try:
        digest = sha256_file(path)
        with path.open("rb") as stream:
            head = stream.read(len(_LEGACY_MAGIC))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not head:
        raise UserError(f"{path}: is empty (0 bytes), not a checkpoint")
    if path.suffix == ".safetensors":
        content: object = _load_safetensors(path)
    else:
        _refuse_torchscript(path)
        content = _load_pickle(path, head, trust_pickle)
    found = _find_state(content)
    if not found:
        raise UserError(f"{path}: holds no state dict ({_outline(content)}); save model.state_dict()")
    info = {
        key: value
        for key, value in (content.items() if isinstance(content, Mapping) else ())
        if isinstance(key, str) and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return Checkpoint(_clean(found, path), digest, info)


def load_into(model: nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    """Copy ``checkpoint`` into ``model``: every key must be there, be expected, and have its shape.

    Left out without complaint: BatchNorm's ``num_batches_tracked`` (absent before torch 0.4.1), and the
    auxiliary classifiers of GoogLeNet and Inception, which serve training only.

    Raises:
        UserError: keys are missing, unexpected or mis-shaped, or weights are not finite; all by name.
    """
    own: Mapping[str, torch.Tensor] = model.state_dict()
    state = _fitted(checkpoint.state, own)
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    misshaped = [key for key in own if key in state and state[key].shape != own[key].shape]
    if misshaped and not missing and not unexpected:
        _explain_head(state, own, misshaped, path)
    if missing or unexpected or misshaped:
        shapes = [f"{key} (file {tuple(state[key].shape)}, model {tuple(own[key].shape)})" for key in misshaped]
        faults = (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        listed = "; ".join(f"{len(keys)} {what}: {_listing(keys)}" for what, keys in faults if keys)
        raise UserError(f"{path}: does not fit the model, keys {listed}")
    broken = [key for key, value in state.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise UserError(f"{path}: {len(broken)} tensors hold NaN or infinite weights: {_listing(broken)}")
    loaded = OrderedDict(state)
    # Some modules (torchvision's MNASNet, 0.29) refuse a state dict without the version that
    # ``state_dict()`` keeps in this attribute, and rewrite themselves for an old one.
    metadata = getattr(checkpoint.state, "_metadata", None) or getattr(own, "_metadata", None)
    if metadata is not None:
        loaded._metadata = metadata  # type: ignore[attr-defined]
    model.load_state_dict(loaded)


def _load_safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({first_line(error)})") from None


def _refuse_torchscript(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # noqa: BLE001 - not a zip, or a broken one: torch.load says which
        return
    if any(name.endswith("/constants.pkl") for name in names):
        raise UserError(f"{path}: is a TorchScript archive, not a checkpoint; save model.state_dict() of the original")


def _load_pickle(path: Path, head: bytes, trust_pickle: bool) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Python 2 wrote text as bytes; latin-1 reads any of them.
            return torch.load(path, map_location="cpu", weights_only=not trust_pickle, encoding="latin1")
    except Exception as error:  # noqa: BLE001 - unpicklers raise KeyError, IndexError, EOFError, UnicodeError …
        text = re.sub(r"\x1b\[\d*m", "", str(error))
        opt_in = f"if you trust where the file comes from, add {TRUST_FLAG}"
        if not trust_pickle and (match := re.search(r"GLOBAL ([\w.]+)", text)):
            raise UserError(
                f"{path}: is not only weights, loading it would run code: it needs the Python object "
                f"{match.group(1)}; {opt_in}"
            ) from None
        if not head.startswith((b"PK\x03\x04", _LEGACY_MAGIC)):
            if "legacy .tar" in text:
                raise UserError(f"{path}: torch's tar format of 2016 loads only by running code; {opt_in}") from None
            raise UserError(f"{path}: is not a PyTorch checkpoint (nor does it end in .safetensors)") from None
        if isinstance(error, EOFError) or re.search(r"central directory|unexpected EOF|corrupted", text):
            raise UserError(f"{path}: is truncated or corrupted; copy or download it again") from None
        if not trust_pickle and (match := re.search(r"WeightsUnpickler error:\s*(\S.*)", text)):
            raise UserError(f"{path}: needs more than plain weights ({match.group(1)[:120]}); {opt_in}") from None
        raise UserError(f"{path}: cannot be read as a checkpoint ({first_line(error)})") from None


def _find_state(content: object, depth: int = 0) -> Mapping[str, torch.Tensor] | None:
    """The first mapping from names to tensors, looked for where training scripts put it."""
    if isinstance(content, nn.Module):
        return content.state_dict()
    if not isinstance(content, Mapping) or depth > 4:
        return None
    if content and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items()):
        return content
    for holder in _HOLDERS:
        found = _find_state(content.get(holder), depth + 1)
        if found:
            return found
    return None


def _clean(found: Mapping[str, torch.Tensor], path: Path) -> Mapping[str, torch.Tensor]:
    """Take wrappers' prefixes off and make every tensor plain, on the host, in float32 if it is floating."""
    metadata = getattr(found, "_metadata", None)
    # torch.optim.swa_utils.AveragedModel counts its steps beside the wrapped module's keys.
    state = {key: value for key, value in found.items() if key != "n_averaged"}
    while state and (prefix := next((p for p in _PREFIXES if all(k.startswith(p) for k in state)), None)):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
        if isinstance(metadata, Mapping):
            metadata = {key.removeprefix(prefix): value for key, value in metadata.items() if key + "." != prefix}
    # A compiled child leaves its mark in the middle of a name; no module's own name contains it.
    marked = {key.replace("_orig_mod.", ""): value for key, value in state.items()}
    clean: OrderedDict[str, torch.Tensor] = OrderedDict()
    for key, value in marked.items():
        if value.is_quantized or value.layout is not torch.strided or value.is_meta:
            kind = "quantized" if value.is_quantized else "without data" if value.is_meta else str(value.layout)
            raise UserError(f"{path}: the tensor {key} is {kind}; a dense floating-point checkpoint is needed")
        value = value.detach()  # noqa: PLW2901 - parameters become plain tensors
        clean[key] = value.to(torch.float32) if value.is_floating_point() else value
    if isinstance(metadata, Mapping):
        clean._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return clean


def _fitted(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bridge the differences in naming that carry no information."""
    fitted = dict(state)
    for prefix in _PREFIXES:
        # The model itself may have one child called ``module``: then the prefix was no wrapper's.
        if all(key.startswith(prefix) for key in own) and not any(key.startswith(prefix) for key in fitted):
            fitted = {prefix + key: value for key, value in fitted.items()}
    for key in list(fitted):
        # torchvision's DenseNet files predate the ban on dots in names: "norm.1.weight".
        renamed = re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", key)
        if key not in own and renamed in own:
            fitted[renamed] = fitted.pop(key)
        elif key not in own and key.startswith(("AuxLogits.", "aux1.", "aux2.")):
            del fitted[key]
    for key, value in own.items():
        if key.endswith("num_batches_tracked") and key not in fitted:
            fitted[key] = torch.zeros_like(value, device="cpu")
    return fitted


def _explain_head(
    state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], misshaped: list[str], path: Path
) -> None:
    """Raise the friendlier message if all that differs is the number of outputs of one layer."""
    layers = {key.rpartition(".")[0] for key in misshaped}
    if len(layers) != 1 or any(state[key].shape[1:] != own[key].shape[1:] for key in misshaped):
        return
    theirs, ours = state[misshaped[0]].shape[0], own[misshaped[0]].shape[0]
    raise UserError(
        f"{path}: the checkpoint's head has {theirs} outputs, the data has {ours} classes ({layers.pop()}); "
        f"give data with {theirs} classes, or a checkpoint trained on these {ours}"
    )


def _outline(content: object) -> str:
    if isinstance(content, Mapping):
        keys = [str(key) for key in content]
        return f"a dict with the keys {_listing(keys)}" if keys else "an empty dict"
    return f"a {type(content).__name__}"


def _listing(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
