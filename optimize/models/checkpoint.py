"""Loads trained weights safely: from a file or a download to a checked state dict, and into a module.

Code from a checkpoint runs only if the caller trusts it. `optimize.models.source` finds the module that the weights are
loaded into.
"""

from __future__ import annotations

import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize.models.stated_classes import metadata_of, stated_classes
from optimize.models.unpickling import load_pickle
from serve.runtime.card.card import sha256_file
from serve.runtime.errors import UserError, did_you_mean, first_line, listed

WEIGHTS_KEY = "--weights-key"

#: Where training scripts put averaged weights (timm, DeiT, ConvNeXt, YOLO, and users' own EMA classes).
_AVERAGED = (
    "ema",
    "ema_state_dict",
    "model_ema",
    "state_dict_ema",
    "ema_model",
    "ema_model_state_dict",
    "model_ema_state_dict",
)
#: Where training scripts put the state dict, in order of preference.
_HOLDERS = ("state_dict", "model", "model_state_dict", "module", "shadow", "net", "network", "weights", "params")
#: Prefixes that wrappers add to every name.
PREFIXES = ("module.", "_orig_mod.")
_HEAD = 128  # bytes that identify a file's type
#: The depth of dicts and lists in which weights are searched for, and the longest such list.
_DEEPEST, _LONGEST = 4, 64


State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A state dict in host memory, with floating-point tensors in float32.

    Attributes:
        state: parameters and buffers by name, without wrappers' prefixes.
        sha256: SHA-256 of the file.
        info: plain numbers beside the state dict, such as ``epoch`` or ``best_prec1``.
        place: their place in the file, such as ``model_ema``. Empty if they are the whole file, or if only the network
            can decide.
        notes: remarks on the choice of that place.
        classes: lists of classes in the file, by their places, each in the order of the outputs.
        others: the file's other state dicts by their place, unchanged; see `cleaned`.
        sure: whether ``state`` was chosen by the user or by names. If not, it is only the largest, and its place is in
            ``others`` too.
    """

    state: State
    sha256: str
    info: dict[str, int | float] = field(default_factory=dict)
    place: str = ""
    notes: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    others: Mapping[str, State] = field(default_factory=dict, repr=False)
    sure: bool = True


@dataclass(frozen=True)
class Cleaned:
    """A usable state dict, the faults of tensors that were left out, and the names of values that are no tensors."""

    state: State
    faults: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def read_checkpoint(
    path: Path, *, trust_pickle: bool = False, weights_key: str | None = None, home: types.ModuleType | None = None
) -> Checkpoint:
    """Read a ``.pt``/``.pth``/``.th``/``.tar``/``.ckpt`` or ``.safetensors`` file that contains a state dict.

    The state dict may be the whole file or anywhere in its dicts and lists. The usual places of training scripts
    (``state_dict``, ``model``, ``model_state_dict`` …) are searched first. Averaged weights beside them (``ema``,
    ``model_ema``, ``state_dict_ema`` …) take precedence. Between other places the network decides, see
    `optimize.models.weight_matching`. The prefixes of wrappers are removed: ``module.`` of DataParallel if every key
    has it, and ``_orig_mod.`` of ``torch.compile``.

    Args:
        path: the file.
        trust_pickle: unpickle it without restriction, which runs whatever code the file contains. A whole pickled
            ``nn.Module`` is then accepted too.
        weights_key: which weights of the file to take: their place, such as ``model`` or ``state_dict_ema``, or the
            prefix of their names, such as ``teacher.``. None chooses as above.
        home: the module to search for classes of a trusted pickle that cannot be imported under their own names.

    Raises:
        UserError: the file does not exist, is not a checkpoint, is damaged, or contains no state dict (none under
            ``weights_key``). Or it needs more than plain tensors while ``trust_pickle`` is false.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the checkpoint file itself")
    if not path.is_file():
        missing = "is not a regular file" if path.exists() else "there is no such checkpoint file"
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
        content = load_pickle(path, head, trust=trust_pickle, home=home)
    states = _states(content)
    if weights_key is not None:
        place, chosen = _asked_for(content, states, weights_key, path)
        notes: tuple[str, ...] = (f"the weights of {place!r} are used, as requested",)
        others: dict[str, State] = {}
        sure = True
    else:
        place, chosen, notes = _chosen(states, content, path)
        sure = len(states) == 1 or _is_usual(place, states[place])
        others = {at: state for at, state in states.items() if at != place or not sure}
    if chosen.faults:
        raise UserError(f"{path}: needs dense tensors of real numbers: {listed(chosen.faults)}")
    if chosen.left:
        notes = (*notes, f"left out, because they are not tensors: {listed(chosen.left)}")
    info = {
        key: value
        for key, value in (content.items() if isinstance(content, Mapping) else ())
        if isinstance(key, str) and isinstance(value, int | float) and not isinstance(value, bool)
    }
    classes = stated_classes(metadata_of(path) if path.suffix == ".safetensors" else content)
    place, notes = (place, notes) if sure else ("", ())
    return Checkpoint(chosen.state, digest, info, place, notes, classes, others, sure)


def _another_kind(head: bytes) -> str | None:
    """Identify a file that is often mistaken for its weights, and say what to do. None for others."""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; fetch the file with `git lfs pull`"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "a web page, not a checkpoint; check the address that you downloaded it from"
    return None


def _load_safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: is not a complete safetensors file ({first_line(error)})") from None


def _refuse_torchscript(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # noqa: BLE001 - not a zip, or a broken one: torch.load says which
        return
    if not any(name.endswith("/data.pkl") for name in names):
        raise UserError(f"{path}: is a zip archive, but not one that torch.save wrote; extract the checkpoint from it")
    if any(name.endswith("/constants.pkl") for name in names):
        raise UserError(f"{path}: is a TorchScript archive, not a checkpoint; save model.state_dict() of the original")


def _states(content: Any, at: str = "", depth: int = 0) -> dict[str, State]:
    """Find every mapping from names to tensors by its place in a file.

    Averaged weights come first, then the usual places.
    """
    if isinstance(content, nn.Module):
        return {at: content.state_dict()}
    if depth > _DEEPEST:
        return {}
    found: dict[str, State] = {}
    for part, value in _entries(content):
        found |= _states(value, f"{at}.{part}" if at else part, depth + 1)
    named = isinstance(content, Mapping) and all(isinstance(key, str) for key in content)
    if named and any(isinstance(value, torch.Tensor) for value in content.values()):
        found[at] = content
    return dict(sorted(found.items(), key=lambda entry: _rank(*entry))) if not depth else found


def _entries(content: object) -> Iterator[tuple[str, object]]:
    """Yield the entries of a dict or a list by name or number, the usual names first."""
    if isinstance(content, list | tuple):
        yield from ((str(number), value) for number, value in enumerate(content[:_LONGEST]))
    elif isinstance(content, Mapping):
        usual = (*_AVERAGED, *_HOLDERS)
        yield from ((name, content[name]) for name in usual if name in content)
        # A module's extra state may not be tensors, and an optimizer's state may use the parameters' names.
        yield from (
            (name, value)
            for name, value in content.items()
            if isinstance(name, str) and name not in usual and not _is_extra(name) and not _is_optimizer(value)
        )


def _is_extra(name: str) -> bool:
    """Return whether a name of a state dict comes from `nn.Module.get_extra_state`, which may have any type."""
    return name.rpartition(".")[2] == "_extra_state"


def _is_optimizer(value: object) -> bool:
    """Return whether a value comes from `torch.optim.Optimizer.state_dict`."""
    return isinstance(value, Mapping) and "param_groups" in value


def _is_named_optimizer(place: str) -> bool:
    return any(part.startswith("optim") for part in place.split("."))


def _is_averaged(place: str) -> bool:
    return any(part in _AVERAGED for part in place.split("."))


def _is_usual(place: str, state: Mapping[str, Any]) -> bool:
    """Return whether weights are in a usual place of training scripts, with nothing else beside them."""
    parts = filter(None, place.split("."))
    return all(part in (*_AVERAGED, *_HOLDERS) for part in parts) and not any(
        isinstance(value, Mapping | list | tuple) and not _is_extra(name) for name, value in state.items()
    )


def _rank(place: str, state: State) -> int:
    if _is_usual(place, state):
        return 0 if _is_averaged(place) else 1
    return 3 if _is_named_optimizer(place) else 2


def _chosen(states: Mapping[str, State], content: object, path: Path) -> tuple[str, Cleaned, tuple[str, ...]]:
    """Choose the weights without the network. Returns their place, the weights, and remarks on the choice.

    Averaged weights are those that their training reported and meant to be used, so they take precedence. They do not
    if they lack tensors that the others have: averages of parameters alone have no batch-norm statistics. If no place
    is a usual one, the largest that is not named after an optimizer is chosen.
    """
    if not states:
        raise UserError(f"{path}: contains no state dict ({_outline(content)}); save model.state_dict()")
    usual = [place for place, state in states.items() if _is_usual(place, state)]
    averaged = next((place for place in usual if _is_averaged(place)), None)
    plain = next((place for place in usual if not _is_averaged(place)), None)
    if averaged is None or plain is None:
        place = plain if plain is not None else averaged
        if place is None:
            place = max(states, key=lambda at: (not _is_named_optimizer(at), len(states[at])))
            return place, cleaned(states[place]), (f"the weights are in {place!r}",)
        note = (f"the weights are averaged ones (EMA), from {place!r}",) if averaged is not None else ()
        alike = [at for at, state in states.items() if at != place and state.keys() == states[place].keys()]
        if alike and averaged is None:
            note = (f"the weights of {place!r} are used; {WEIGHTS_KEY} {alike[0]} selects others",)
        return place, cleaned(states[place]), note
    smooth, last = cleaned(states[averaged]), cleaned(states[plain])
    if lacking := [key for key in last.state if key not in smooth.state]:
        told = f"the averaged weights (EMA) of {averaged!r} lack {listed(lacking, 2)}, those of {plain!r} are used"
        return plain, last, (told,)
    told = f"the averaged weights (EMA) of {averaged!r} are used; {WEIGHTS_KEY} {plain} selects the others"
    return averaged, smooth, (told,)


def _asked_for(content: object, states: Mapping[str, State], wanted: str, path: Path) -> tuple[str, Cleaned]:
    """Return the weights at the place that the user names, or those whose names have that prefix."""
    if wanted in states:
        return wanted, cleaned(states[wanted])
    value = content
    for part in wanted.split("."):
        value = dict(_entries(value)).get(part)
    for place, state in _states(value, wanted).items():
        return place, cleaned(state)
    prefix = wanted.rstrip(".") + "."
    for place, state in states.items():
        whole = cleaned(state)
        if kept := {key: value for key, value in whole.state.items() if key.startswith(prefix)}:
            faults = tuple(fault for fault in whole.faults if fault.startswith(prefix))
            return f"{place}:{prefix}" if place else prefix, Cleaned(
                {key.removeprefix(prefix): value for key, value in kept.items()}, faults
            )
    prefixes = sorted({f"{key.partition('.')[0]}." for state in states.values() for key in state if "." in key})
    known = [*filter(None, states), *prefixes]
    there = listed(known, 12) or "none"
    raise UserError(f"{path}: contains no weights under {wanted!r}{did_you_mean(wanted, known)}; it has {there}")


def cleaned(found: State) -> Cleaned:
    """Remove wrappers' prefixes, and make every tensor plain, on the host, and in float32 if it is floating."""
    metadata = getattr(found, "_metadata", None)
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    left = tuple(key for key in found if key not in tensors)
    # torch.optim.swa_utils.AveragedModel counts its steps beside the wrapped module's keys.
    state = {key: value for key, value in tensors.items() if key != "n_averaged"}
    while state and (prefix := next((p for p in PREFIXES if all(k.startswith(p) for k in state)), None)):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
        if isinstance(metadata, Mapping):
            metadata = {key.removeprefix(prefix): value for key, value in metadata.items() if key + "." != prefix}
    # A compiled child leaves its mark in the middle of a name. No module's own name contains it.
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
        except (NotImplementedError, RuntimeError):  # 4 bits, two in a byte (torch 2.14)
            faults.append(f"{key} is of {str(value.dtype).removeprefix('torch.')}, which torch does not convert")
    if isinstance(metadata, Mapping):
        clean._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return Cleaned(clean, tuple(faults), left)


def _unfit(value: torch.Tensor) -> str | None:
    """Return the kind of a tensor without plain numbers. None for a plain tensor."""
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
        return f"a dict with the keys {listed(keys)}" if keys else "an empty dict"
    return f"a {type(content).__name__}"
