"""Trained weights: a file or a download → a checked state dict, and a state dict → a module, safely.

Nothing here runs code from a checkpoint unless the caller says that it is trusted. What the weights
are loaded into is found by `optimize.models.source`.
"""

from __future__ import annotations

import argparse
import errno
import pathlib
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize.models.stated_classes import metadata_of, stated_classes
from serve.runtime.card import sha256_file
from serve.runtime.errors import UserError, did_you_mean, first_line

TRUST_FLAG = "--trust-checkpoint"

WEIGHTS_KEY = "--weights-key"

#: Where training scripts put averaged weights (timm, DeiT, ConvNeXt, YOLO, EMA classes of one's own).
_AVERAGED = (
    "ema",
    "ema_state_dict",
    "model_ema",
    "state_dict_ema",
    "ema_model",
    "ema_model_state_dict",
    "model_ema_state_dict",
)
#: Where they put the state dict, in order of preference.
_HOLDERS = ("state_dict", "model", "model_state_dict", "module", "shadow", "net", "network", "weights", "params")
#: What wrappers put before every name.
PREFIXES = ("module.", "_orig_mod.")
#: Settings that training scripts keep beside the weights, and that hold nothing but plain values.
_PLAIN_TYPES: list[Any] = [argparse.Namespace, pathlib.PosixPath, pathlib.PurePosixPath]
#: How every file of torch's format before 1.6 begins: the pickled magic number.
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_HEAD = 128  # bytes that tell what a file is


@dataclass(frozen=True)
class Checkpoint:
    """A state dict in host memory, its floating-point tensors in float32.

    Attributes:
        state: parameters and buffers by name, without wrappers' prefixes.
        sha256: of the file they were read from.
        info: plain numbers that stood beside the state dict, such as ``epoch`` or ``best_prec1``.
        place: where in the file they lay, such as ``model_ema``; empty if they are the whole file.
        notes: what a reader should know of the choice of that place.
        classes: lists of classes in the file, by their places, each in the order of the outputs.
    """

    state: Mapping[str, torch.Tensor]
    sha256: str
    info: dict[str, int | float] = field(default_factory=dict)
    place: str = ""
    notes: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Cleaned:
    """A usable state dict, and what is wrong with the tensors that are not in it."""

    state: Mapping[str, torch.Tensor]
    faults: tuple[str, ...] = ()


def read_checkpoint(path: Path, *, trust_pickle: bool = False, weights_key: str | None = None) -> Checkpoint:
    """Read a ``.pt``/``.pth``/``.th``/``.tar``/``.ckpt`` or ``.safetensors`` file that holds a state dict.

    The state dict may be the whole file or lie under ``state_dict``, ``model``, ``model_state_dict`` …
    (nested too); averaged weights beside it (``ema``, ``model_ema``, ``state_dict_ema`` …) go first. The
    prefixes that wrappers add (``module.`` of DataParallel when every key has it, ``_orig_mod.`` of
    ``torch.compile``) are taken off.

    Args:
        path: the file.
        trust_pickle: unpickle it without restriction, which runs whatever code the file asks for; a
            whole pickled ``nn.Module`` is then accepted as well.
        weights_key: which weights of the file to take: their place, such as ``model`` or ``state_dict_ema``, or
            what the names of the wanted ones begin with, such as ``teacher.``; None chooses as said above.

    Raises:
        UserError: there is no such file, it is not a checkpoint, is broken, holds no state dict (none under
            ``weights_key``), or needs more than plain tensors while ``trust_pickle`` is false.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the checkpoint file itself")
    if not path.is_file():
        missing = "is no regular file" if path.exists() else "there is no such checkpoint file"
        raise UserError(f"{path}: {missing}")
    try:
        digest = sha256_file(path)
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not head:
        raise UserError(f"{path}: is empty (0 bytes), not a checkpoint")
    if (other := _another_kind(head)) is not None:
        raise UserError(f"{path}: is {other}")
    if path.suffix == ".safetensors":
        content: object = _load_safetensors(path)
    else:
        _refuse_torchscript(path)
        content = _load_pickle(path, head, trust_pickle)
    if weights_key is not None:
        place, cleaned = _asked_for(content, weights_key, path)
        notes: tuple[str, ...] = (f"the weights of {place!r} are used, as asked for",)
    else:
        place, cleaned, notes = _chosen(content, path)
    if cleaned.faults:
        raise UserError(f"{path}: needs dense tensors of real numbers: {listing(list(cleaned.faults))}")
    info = {
        key: value
        for key, value in (content.items() if isinstance(content, Mapping) else ())
        if isinstance(key, str) and isinstance(value, int | float) and not isinstance(value, bool)
    }
    classes = stated_classes(metadata_of(path) if path.suffix == ".safetensors" else content)
    return Checkpoint(cleaned.state, digest, info, place, notes, classes)


def _another_kind(head: bytes) -> str | None:
    """What a file is that somebody mistakes for its weights, by how it begins, and what to do; None for all others."""
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS and not the file itself; fetch that by `git lfs pull`"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "a web page and no checkpoint; the address that it was downloaded from answered with that"
    return None


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
    if not any(name.endswith("/data.pkl") for name in names):
        raise UserError(f"{path}: is a zip archive, but none that torch.save writes; take the checkpoint out of it")
    if any(name.endswith("/constants.pkl") for name in names):
        raise UserError(f"{path}: is a TorchScript archive, not a checkpoint; save model.state_dict() of the original")


def _load_pickle(path: Path, head: bytes, trust_pickle: bool) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Python 2 wrote text as bytes; latin-1 reads any of them.
            with torch.serialization.safe_globals(_PLAIN_TYPES):
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
            if head[8:9] == b"{":  # behind eight bytes of its length
                raise UserError(f"{path}: looks like a safetensors file; let its name end in .safetensors") from None
            raise UserError(f"{path}: is not a PyTorch checkpoint (nor does it end in .safetensors)") from None
        # Where a zip file ends within its last 64 kB or so, torch (2.14) seeks to before its beginning.
        broken = isinstance(error, EOFError) or (isinstance(error, OSError) and error.errno == errno.EINVAL)
        if broken or re.search(r"central directory|unexpected EOF|corrupted", text):
            raise UserError(f"{path}: is truncated or corrupted; copy or download it again") from None
        if not trust_pickle and (match := re.search(r"WeightsUnpickler error:\s*(\S.*)", text)):
            raise UserError(f"{path}: needs more than plain weights ({match.group(1)[:120]}); {opt_in}") from None
        raise UserError(f"{path}: cannot be read as a checkpoint ({first_line(error)})") from None


def _states(content: object, at: str = "", depth: int = 0) -> dict[str, Mapping[str, torch.Tensor]]:
    """Every mapping from names to tensors where training scripts put one, by its place; averaged weights first."""
    if isinstance(content, nn.Module):
        return {at: content.state_dict()}
    if not isinstance(content, Mapping) or depth > 4:
        return {}
    if content and all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items()):
        return {at: content}
    found: dict[str, Mapping[str, torch.Tensor]] = {}
    for holder in (*_AVERAGED, *_HOLDERS):
        found |= _states(content.get(holder), f"{at}.{holder}" if at else holder, depth + 1)
    return found


def _is_averaged(place: str) -> bool:
    return any(part in _AVERAGED for part in place.split("."))


def _chosen(content: object, path: Path) -> tuple[str, _Cleaned, tuple[str, ...]]:
    """Where the weights lie by themselves, they, and what a reader should know of the choice.

    Averaged weights are those that their training reported and meant to be used, so they go first, unless they lack
    what the others have (averages of parameters alone have no batch-norm statistics).
    """
    states = _states(content)
    if not states:
        raise UserError(f"{path}: holds no state dict ({_outline(content)}); save model.state_dict()")
    averaged = next((place for place in states if _is_averaged(place)), None)
    plain = next((place for place in states if not _is_averaged(place)), None)
    if averaged is None or plain is None:
        place = plain if plain is not None else averaged
        assert place is not None
        note = (f"the weights are averaged ones (EMA), of {place!r}",) if averaged is not None else ()
        return place, _clean(states[place]), note
    smooth, last = _clean(states[averaged]), _clean(states[plain])
    if lacking := [key for key in last.state if key not in smooth.state]:
        told = f"the averaged weights (EMA) of {averaged!r} lack {listing(lacking, 2)}, those of {plain!r} are used"
        return plain, last, (told,)
    told = f"the averaged weights (EMA) of {averaged!r} are used; {WEIGHTS_KEY} {plain} takes the others"
    return averaged, smooth, (told,)


def _asked_for(content: object, wanted: str, path: Path) -> tuple[str, _Cleaned]:
    """The weights in the place that the user names, or those whose names begin with what the user names."""
    value = content
    for part in wanted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    for place, state in _states(value, wanted).items():
        return place, _clean(state)
    states = _states(content)
    prefix = wanted.rstrip(".") + "."
    for place, state in states.items():
        cleaned = _clean(state)
        if kept := {key: value for key, value in cleaned.state.items() if key.startswith(prefix)}:
            faults = tuple(fault for fault in cleaned.faults if fault.startswith(prefix))
            return f"{place}:{prefix}" if place else prefix, _Cleaned(
                {key.removeprefix(prefix): value for key, value in kept.items()}, faults
            )
    prefixes = sorted({f"{key.partition('.')[0]}." for state in states.values() for key in state if "." in key})
    known = [*filter(None, states), *prefixes]
    there = listing(known, 12) or "none"
    raise UserError(f"{path}: holds no weights under {wanted!r}{did_you_mean(wanted, known)}; there are {there}")


def _clean(found: Mapping[str, torch.Tensor]) -> _Cleaned:
    """Take wrappers' prefixes off and make every tensor plain, on the host, in float32 if it is floating."""
    metadata = getattr(found, "_metadata", None)
    # torch.optim.swa_utils.AveragedModel counts its steps beside the wrapped module's keys.
    state = {key: value for key, value in found.items() if key != "n_averaged"}
    while state and (prefix := next((p for p in PREFIXES if all(k.startswith(p) for k in state)), None)):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
        if isinstance(metadata, Mapping):
            metadata = {key.removeprefix(prefix): value for key, value in metadata.items() if key + "." != prefix}
    # A compiled child leaves its mark in the middle of a name; no module's own name contains it.
    marked = {key.replace("_orig_mod.", ""): value for key, value in state.items()}
    clean: OrderedDict[str, torch.Tensor] = OrderedDict()
    faults = []
    for key, value in marked.items():
        if (kind := _unfit(value)) is not None:
            faults.append(f"{key} is {kind}")
            continue
        value = value.detach()  # noqa: PLW2901 - parameters become plain tensors
        try:
            clean[key] = value.to(torch.float32) if value.is_floating_point() else value
        except (NotImplementedError, RuntimeError):  # of 4 bits, two in a byte (torch 2.14)
            faults.append(f"{key} is of {str(value.dtype).removeprefix('torch.')}, which torch does not convert")
    if isinstance(metadata, Mapping):
        clean._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return _Cleaned(clean, tuple(faults))


def _unfit(value: torch.Tensor) -> str | None:
    """Of what kind a tensor is that holds no plain numbers; None for those that do."""
    if value.is_quantized:
        return "quantized"
    if value.is_meta:
        return "without data"
    if value.layout is not torch.strided:
        return str(value.layout)
    return "complex" if value.is_complex() else None


def _outline(content: object) -> str:
    if isinstance(content, Mapping):
        keys = [str(key) for key in content]
        return f"a dict with the keys {listing(keys)}" if keys else "an empty dict"
    return f"a {type(content).__name__}"


def listing(names: list[str], most: int = 8) -> str:
    """The first ``most`` of the names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
