"""Copies a checkpoint's weights into a module: renames where nothing is lost, and reports all misfits together."""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize.models.checkpoint import PREFIXES, WEIGHTS_KEY, Checkpoint, State, cleaned
from serve.runtime.errors import UserError, listed

#: Names by the file's key, or by a shorter form of one.
Names = Mapping[str, str]

#: Beginnings of the names of torchvision's auxiliary heads, which are only for training.
_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.", "aux_classifier.")

#: Names in training scripts for values saved beside a network: weights of a loss, counts of a metric.
_BESIDE = re.compile(r"(^|_)(criterion|loss|metrics?)(_|\d|$)")


@dataclass(frozen=True)
class _Fit:
    """A state dict prepared for a module, or the reasons why it does not fit.

    Attributes:
        state: with the module's names, and the versions of its modules.
        notes: what was renamed and left out, in words.
        faults: what prevents loading, in words.
        lacking: whether the module needs more than there is.
    """

    state: Mapping[str, Any]
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    lacking: bool


def load_into(model: nn.Module, checkpoint: Checkpoint, path: Path) -> tuple[str, ...]:
    """Copy ``checkpoint`` into ``model``: every key must exist, be expected, and have its shape.

    A prefix that all keys of one side have and the other side lacks is bridged, such as the ``model.`` of a
    LightningModule. So are the marks that wrappers leave inside names. If one state dict contains several things, those
    with one prefix are taken, if they fit and are all that the model needs. Names that a module's own loading converts,
    as torch's weight norm does, are left to it. Some keys are left out without an error: BatchNorm's
    ``num_batches_tracked`` (absent before torch 0.4.1), and the auxiliary heads of torchvision's networks, which are
    only for training. If the file's state dicts have unusual places, the one that fits is taken.

    Returns:
        What was renamed and left out, in words for a reader.

    Raises:
        UserError: keys are missing, unexpected or have a wrong shape, or weights are integers or not finite. The
            message names all, and a prefix that would fit. Or several of the file's state dicts fit.
    """
    fit = _fit(model, checkpoint.state)
    if not checkpoint.sure or (fit.lacking and checkpoint.others):
        fit = _of_others(model, checkpoint, path) or fit
    if fit.faults:
        note = f" ({'; '.join(fit.notes)})" if fit.notes else ""
        all_of = "" if checkpoint.sure else f", with none of {listed(checkpoint.others, 4)}"
        raise UserError(f"{path}: does not fit the model{note}{all_of}: {'; '.join(fit.faults)}")
    model.load_state_dict(fit.state)
    return fit.notes


def _of_others(model: nn.Module, checkpoint: Checkpoint, path: Path) -> _Fit | None:
    """Return the only one of the file's other state dicts that fits. None if none does."""
    usable = ((place, cleaned(state)) for place, state in checkpoint.others.items())
    tried = ((place, _fit(model, found.state)) for place, found in usable if not found.faults)
    fits = {place: fit for place, fit in tried if not fit.faults}
    if len(fits) > 1:
        ways = " or ".join(f"{WEIGHTS_KEY} {place}" for place in fits)
        raise UserError(f"{path}: contains {len(fits)} state dicts that fit the model; choose one: {ways}")
    for place, fit in fits.items():
        return replace(fit, notes=(f"the weights of {place!r} are used, the only ones that fit", *fit.notes))
    return None


def _fit(model: nn.Module, state: State) -> _Fit:
    """Fit ``state`` to ``model``: the whole, or the part with the only prefix that fits."""
    own = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    views = list(_views(state, own))
    fits = [_judged(model, state, own, *_whole(*view)) for view in views]
    if not any(whole := [fit for fit in fits if not fit.faults]):
        whole = [fit for part in _parts(*views[-1]) if not (fit := _judged(model, state, own, *part)).faults]
    # If several parts fit, they are several networks, and the faults of the whole name each.
    return fits[0] if len(whole) != 1 and fits[0].faults else whole[0]


def _views(state: State, own: State) -> Iterator[tuple[Names, Names]]:
    """Yield both name maps unchanged, and without wrappers' marks in the middle of names if that is unique."""
    yield {key: key for key in state}, {key: key for key in own}
    bare, targets = {_bare(key): key for key in state}, {_bare(key): key for key in own}
    if len(bare) == len(state) and len(targets) == len(own):
        yield bare, targets


def _bare(key: str) -> str:
    """Return a name without the parts that `nn.DataParallel` and ``torch.compile`` add, at any place."""
    *parts, last = key.split(".")
    return ".".join([*(part for part in parts if f"{part}." not in PREFIXES), last])


def _whole(names: Names, targets: Names) -> tuple[dict[str, str], str]:
    """Map each of a file's names to a module's with the prefix that fits most, and describe the change.

    Args:
        names: the file's keys, by their names here.
        targets: the module's keys, by their names here.
    """
    as_it_is = sum(name in targets for name in names)
    renamed, note = {name: name for name in names}, ""
    off = _best(_prefixes(names, targets))
    on = _best(_prefixes(targets, names))
    if off and off[1] > as_it_is and all(name.startswith(off[0]) for name in names):
        renamed = {name: name.removeprefix(off[0]) for name in names}
        note = f"the prefix {off[0]!r} of its names is removed"
    elif on and on[1] > as_it_is and all(target.startswith(on[0]) for target in targets):
        renamed = {name: on[0] + name for name in names}
        # The model itself may have one child called ``module``: then the prefix was no wrapper's.
        note = "" if on[0] in PREFIXES else f"the prefix {on[0]!r} is added to its names"
    return {names[name]: targets.get(new, new) for name, new in renamed.items()}, note


def _parts(names: Names, targets: Names) -> Iterator[tuple[dict[str, str], str]]:
    """Do the same as `_whole` for names with one prefix only, under which there is most of what is needed."""
    needed = [target for target in targets if not target.endswith("num_batches_tracked")]
    counts = _prefixes(names, targets)
    for prefix in [prefix for prefix, count in counts.items() if 2 * count > len(needed)]:
        part = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        left = [names[name] for name in names if name not in part]
        note = f"those of its names are used that begin with {prefix!r}, and not {listed(left, 4)}"
        yield {names[name]: targets.get(new, new) for name, new in part.items()}, note


def _prefixes(keys: Iterable[str], targets: Container[str]) -> Counter[str]:
    """Count for each prefix how many of ``keys`` are that prefix and one of ``targets``."""
    found: Counter[str] = Counter()
    for key in keys:
        for dot in re.finditer(r"\.", key):
            if key[dot.end() :] in targets:
                found[key[: dot.end()]] += 1
    return found


def _best(prefixes: Counter[str]) -> tuple[str, int] | None:
    return max(prefixes.items(), key=lambda entry: (entry[1], -len(entry[0])), default=None)


def _judged(model: nn.Module, state: State, own: State, names: Names, note: str) -> _Fit:
    """Check whether a state dict can be loaded under a module's names, and what is left out of it."""
    fitted, left = _fitted({name: state[key] for key, name in names.items()}, own)
    notes = (*filter(None, [note]), *([f"left out: {listed(left)}"] if left else []))
    # A module's own extra state besides tensors (`get_extra_state`) stays as it is built.
    extra = {key: value for key, value in model.state_dict().items() if key not in own}
    told = _versions(getattr(state, "_metadata", None), names)
    ours = getattr(model.state_dict(), "_metadata", None)
    missing, unexpected = [key for key in own if key not in fitted], [key for key in fitted if key not in own]
    if missing or unexpected:
        for versions in (told,) if told else (ours, {}):
            loaded = _with_versions({**extra, **fitted}, versions)
            if _takes(model, loaded):
                return _Fit(loaded, notes, tuple(_broken(fitted)), lacking=False)
    # Some modules (torchvision's MNASNet, 0.29) refuse a state dict without the version that ``state_dict()`` keeps in
    # this attribute, and rewrite themselves for an old one.
    loaded = _with_versions({**extra, **fitted}, told or ours)
    return _Fit(loaded, notes, tuple(_faults(fitted, own)), bool(missing))


def _takes(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether a module loads unknown names by converting them itself. The module is not changed."""
    try:
        result = copy.deepcopy(model).load_state_dict(state, strict=False)
    except Exception:  # noqa: BLE001 - another shape, or whatever the user's own loading raises
        return False
    return not result.missing_keys and not result.unexpected_keys


def _with_versions(state: Mapping[str, Any], versions: Mapping[str, Any] | None) -> OrderedDict[str, Any]:
    ordered = OrderedDict(state)
    if versions is not None:
        ordered._metadata = OrderedDict(versions)  # type: ignore[attr-defined]
    return ordered


def _versions(metadata: object, names: Names) -> dict[str, Any]:
    """Return what a state dict records of each module (its version), by the modules' new names."""
    if not isinstance(metadata, Mapping) or not metadata:
        return {}
    moved = {}
    for key, name in names.items():
        for dot in [0, *(match.end() for match in re.finditer(r"\.", key))]:
            module, rest = key[:dot].rstrip("."), key[dot:]
            if module in metadata and name.endswith(rest):
                moved[name.removesuffix(rest).rstrip(".")] = metadata[module]
    return moved


def _fitted(state: State, own: State) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Bridge differences in naming that carry no information. Also returns names outside the network."""
    fitted, left = dict(state), []
    tops = {key.partition(".")[0] for key in own}
    for key, value in state.items():
        # torchvision's DenseNet files predate the ban on dots in names: "norm.1.weight".
        renamed = re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2", key)
        top = key.partition(".")[0]
        beside = top not in tops and (_BESIDE.search(top) is not None or (top == key and not value.shape))
        if key not in own and renamed in own:
            fitted[renamed] = fitted.pop(key)
        elif key not in own and key.startswith(_AUXILIARY):
            del fitted[key]
        elif key not in own and (beside or key.endswith("_extra_state")):
            del fitted[key]
            left.append(key)
    for key, value in own.items():
        if key.endswith(("num_batches_tracked", "_extra_state")) and key not in fitted:
            fitted[key] = torch.zeros_like(value, device="cpu") if key.endswith("tracked") else value
    return fitted, left


def _faults(state: State, own: State) -> list[str]:
    """Return everything that prevents loading ``state``, in words."""
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    misshaped = [key for key in own if key in state and state[key].shape != own[key].shape]
    # If int8 tensors stand for reals with a scale elsewhere, the integers alone would be loaded unchanged.
    integers = [key for key in own if key in state and own[key].is_floating_point() > state[key].is_floating_point()]
    faults = []
    if missing or unexpected:
        groups = (("missing", missing), ("unexpected", unexpected))
        faults += [f"{len(keys)} {what}: {listed(keys)}" for what, keys in groups if keys]
        faults += _that_would_fit(state, own)
    if misshaped:
        shapes = [f"{key} (file {tuple(state[key].shape)}, model {tuple(own[key].shape)})" for key in misshaped]
        faults.append(_explained_head(state, own, misshaped) or f"{len(shapes)} of another shape: {listed(shapes)}")
        if any("pos_embed" in key for key in misshaped):
            faults.append("position embeddings have another shape if the model was trained with another image size")
    if integers:
        kinds = [f"{key} ({str(state[key].dtype).removeprefix('torch.')})" for key in integers]
        faults.append(f"{len(kinds)} are integers where the model has floating-point weights: {listed(kinds)}")
    return faults + _broken(state)


def _broken(state: State) -> list[str]:
    broken = [key for key, value in state.items() if value.is_floating_point() and not value.isfinite().all()]
    return [f"{len(broken)} tensors hold NaN or infinite weights: {listed(broken)}"] if broken else []


def _that_would_fit(state: State, own: State) -> list[str]:
    """Name the prefixes under which ``state`` has all that the model needs, besides other things."""
    needed = {key for key in own if not key.endswith("num_batches_tracked")}
    if needed and all(key in state and state[key].shape == own[key].shape for key in needed):
        return ["everything that the model needs is there and fits, but there are unknown tensors"]
    counts = _prefixes(state, {key: own[key] for key in needed})
    whole = sorted(prefix for prefix, count in counts.items() if count == len(needed))
    fitting = [prefix for prefix in whole if all(state[prefix + key].shape == own[key].shape for key in needed)]
    if fitting or whole:
        would = "would fit" if fitting else "has all names that the model needs"
    elif (best := _best(counts)) is not None and 2 * best[1] > len(needed):
        whole, would = [best[0]], f"has {best[1]} of the {len(needed)} names that the model needs"
    else:
        return []
    return [f"what begins with {prefix!r} {would}: {WEIGHTS_KEY} {prefix}" for prefix in fitting or whole]


def _explained_head(state: State, own: State, misshaped: list[str]) -> str | None:
    """Return a friendlier message if all wrong shapes differ only in the number of outputs of one layer."""
    layers = {key.rpartition(".")[0] for key in misshaped}
    if len(layers) != 1 or any(state[key].shape[1:] != own[key].shape[1:] for key in misshaped):
        return None
    theirs, ours = state[misshaped[0]].shape[0], own[misshaped[0]].shape[0]
    return (
        f"the checkpoint's head has {theirs} outputs, the data has {ours} classes ({layers.pop()}); "
        f"give data with {theirs} classes, or a checkpoint trained on these {ours}"
    )
