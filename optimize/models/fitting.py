"""Copying a checkpoint's weights into a module: names bridged where nothing is lost, all misfits said at once."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from optimize.models.checkpoint import PREFIXES, WEIGHTS_KEY, Checkpoint, listing
from serve.runtime.errors import UserError

State = Mapping[str, torch.Tensor]


def load_into(model: nn.Module, checkpoint: Checkpoint, path: Path) -> tuple[str, ...]:
    """Copy ``checkpoint`` into ``model``: every key must be there, be expected, and have its shape.

    A prefix that all keys of one of the two have and the other lacks is bridged, such as the ``model.`` of a
    LightningModule. Left out without complaint: BatchNorm's ``num_batches_tracked`` (absent before torch 0.4.1), and
    the auxiliary classifiers of GoogLeNet and Inception, which serve training only.

    Returns:
        What was bridged, in words for a reader.

    Raises:
        UserError: keys are missing, unexpected or mis-shaped, or weights are integers or not finite; all by name, and
            with the prefix that would fit if there is one.
    """
    own: State = model.state_dict()
    renamed, note = _bridged(checkpoint.state, own)
    state = _fitted(renamed, own)
    if faults := _faults(state, own):
        raise UserError(f"{path}: does not fit the model{f' ({note})' if note else ''}: {'; '.join(faults)}")
    loaded = OrderedDict(state)
    # Some modules (torchvision's MNASNet, 0.29) refuse a state dict without the version that
    # ``state_dict()`` keeps in this attribute, and rewrite themselves for an old one.
    metadata = getattr(checkpoint.state, "_metadata", None) if renamed is checkpoint.state else None
    metadata = metadata or getattr(own, "_metadata", None)
    if metadata is not None:
        loaded._metadata = metadata  # type: ignore[attr-defined]
    model.load_state_dict(loaded)
    return (note,) if note else ()


def _bridged(state: State, own: State) -> tuple[State, str]:
    """``state`` without, or with, the prefix that makes more of its keys fit; and what was done."""
    as_it_is = sum(key in own for key in state)
    off = _best(_prefixes(state, own))
    if off and off[1] > as_it_is and all(key.startswith(off[0]) for key in state):
        short = {key.removeprefix(off[0]): value for key, value in state.items()}
        return short, f"the prefix {off[0]!r} of its names is left out"
    on = _best(_prefixes(own, state))
    if on and on[1] > as_it_is and all(key.startswith(on[0]) for key in own):
        # The model itself may have one child called ``module``: then the prefix was no wrapper's.
        note = "" if on[0] in PREFIXES else f"the prefix {on[0]!r} is put before its names"
        return {on[0] + key: value for key, value in state.items()}, note
    return state, ""


def _prefixes(keys: Iterable[str], targets: State) -> Counter[str]:
    """How many of ``keys`` are one of ``targets`` behind a prefix, for each prefix."""
    found: Counter[str] = Counter()
    for key in keys:
        for dot in re.finditer(r"\.", key):
            if key[dot.end() :] in targets:
                found[key[: dot.end()]] += 1
    return found


def _best(prefixes: Counter[str]) -> tuple[str, int] | None:
    return max(prefixes.items(), key=lambda entry: (entry[1], -len(entry[0])), default=None)


def _fitted(state: State, own: State) -> dict[str, torch.Tensor]:
    """Bridge the differences in naming that carry no information."""
    fitted = dict(state)
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


def _faults(state: State, own: State) -> list[str]:
    """Everything that keeps ``state`` from being loaded, in words."""
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    misshaped = [key for key in own if key in state and state[key].shape != own[key].shape]
    # Of int8 tensors that stand for reals by a scale elsewhere, the integers alone would be loaded as they are.
    integers = [key for key in own if key in state and own[key].is_floating_point() > state[key].is_floating_point()]
    broken = [key for key, value in state.items() if value.is_floating_point() and not value.isfinite().all()]
    faults = []
    if missing or unexpected:
        groups = (("missing", missing), ("unexpected", unexpected))
        faults += [f"{len(keys)} {what}: {listing(keys)}" for what, keys in groups if keys]
        faults += _that_would_fit(state, own)
    if misshaped:
        shapes = [f"{key} (file {tuple(state[key].shape)}, model {tuple(own[key].shape)})" for key in misshaped]
        faults.append(_explained_head(state, own, misshaped) or f"{len(shapes)} of another shape: {listing(shapes)}")
        if any("pos_embed" in key for key in misshaped):
            faults.append("position embeddings differ in shape if the images did in size (see the image size)")
    if integers:
        kinds = [f"{key} ({str(state[key].dtype).removeprefix('torch.')})" for key in integers]
        faults.append(f"{len(kinds)} are integers where the model has floating-point weights: {listing(kinds)}")
    if broken:
        faults.append(f"{len(broken)} tensors hold NaN or infinite weights: {listing(broken)}")
    return faults


def _that_would_fit(state: State, own: State) -> list[str]:
    """The prefixes under which ``state`` holds all that the model needs, beside other things."""
    needed = {key for key in own if not key.endswith("num_batches_tracked")}
    if needed and all(key in state and state[key].shape == own[key].shape for key in needed):
        return ["what the model needs is there and fits, beside what it does not know"]
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
    """The friendlier message, if all shapes that differ do so in the number of outputs of one layer."""
    layers = {key.rpartition(".")[0] for key in misshaped}
    if len(layers) != 1 or any(state[key].shape[1:] != own[key].shape[1:] for key in misshaped):
        return None
    theirs, ours = state[misshaped[0]].shape[0], own[misshaped[0]].shape[0]
    return (
        f"the checkpoint's head has {theirs} outputs, the data has {ours} classes ({layers.pop()}); "
        f"give data with {theirs} classes, or a checkpoint trained on these {ours}"
    )
