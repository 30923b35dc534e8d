"""Finds the order of classes that a checkpoint states beside its weights: which output means which name."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

#: Its names in training scripts, without case and punctuation. It is a list of names, or a mapping either way.
_CALLED = frozenset(
    {
        *("classes", "classnames", "names", "labels", "labelnames", "categories", "targetnames", "vocab"),
        *("classtoidx", "classtoindex", "classtoid", "class2idx", "class2id", "labeltoid", "label2id", "label2idx"),
        *("idxtoclass", "indextoclass", "idtoclass", "idx2class", "id2class", "idtolabel", "id2label", "idx2label"),
    }
)
_DEPTH = 5


def stated_classes(content: object) -> dict[str, tuple[str, ...]]:
    """Return every list of classes in a checkpoint's content by its place: names in the order of the outputs.

    Nested settings are searched: mappings, ``argparse.Namespace``, and a module's own attributes. A list must give each
    name an index, from 0 on.
    """
    return dict(_found(content, "", 0))


def metadata_of(path: Path) -> dict[str, Any]:
    """Return the metadata of a complete safetensors file. Texts in JSON are parsed."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: _parsed(text) for name, text in (file.metadata() or {}).items()}


def _parsed(text: str) -> object:
    try:
        parsed: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed


def _found(content: object, place: str, depth: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(content, nn.Module | argparse.Namespace):
        content = {name: value for name, value in vars(content).items() if not name.startswith("_")}
    if not isinstance(content, Mapping) or depth > _DEPTH:
        return
    for key, value in content.items():
        where = f"{place}.{key}" if place else str(key)
        if re.sub(r"[\W_]", "", str(key)).lower() in _CALLED and (names := _names(value)) is not None:
            yield where, names
        else:
            yield from _found(value, where, depth + 1)


def _names(value: object) -> tuple[str, ...] | None:
    """Return names in the order of their indices. None if the value does not give them."""
    if isinstance(value, list | tuple):
        return tuple(value) if len(value) > 1 and all(isinstance(name, str) for name in value) else None
    if not isinstance(value, Mapping) or len(value) < 2:
        return None
    if all(_is_index(index) for index in value.values()):
        by_index = {int(index): name for name, index in value.items()}
    elif all(_is_index(index) or (isinstance(index, str) and index.isdecimal()) for index in value):
        by_index = {int(index): name for index, name in value.items()}
    else:
        return None
    if sorted(by_index) != list(range(len(value))) or not all(isinstance(name, str) for name in by_index.values()):
        return None
    return tuple(by_index[index] for index in range(len(by_index)))


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
