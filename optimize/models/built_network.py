"""What a factory of the user's really builds, as a hash: what its code reads elsewhere is in no digest of the code.

A factory may read ``arch.json`` or a variable of the environment, and its network may do so when it runs. So the
network is built and looked at: structure, plain attributes, values, and what it answers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from optimize.models.live_objects import module_digest, tensors_digest
from optimize.models.source import ModelSource
from optimize.store.keys import make_key
from serve.runtime.card.card import Preprocessing

_IMAGES = 2  # a norm in training needs more than one value
#: Decimals of an answer's largest number that count: threads add in another order, and their last digits differ.
_DIGITS = {torch.float64: 6, torch.float32: 3}


def architecture_of(source: ModelSource, classes: int, preprocessing: Preprocessing) -> tuple[str, str]:
    """What an architecture is known by in keys: the digest of its code, and the factory's name.

    Of the user's own factory, with the digest of what it builds here: see `built_digest`. A library's is told by its
    version.

    Raises:
        UserError: the factory does not build a module.
    """
    if source.origin != "user":
        return source.fingerprint, source.name
    built = built_digest(lambda: source.build(classes, preprocessing.crop[0]), preprocessing.shape)
    return f"{source.fingerprint}/{built}", source.name


def built_digest(build: Callable[[], nn.Module], shape: tuple[int, int, int]) -> str:
    """SHA-256 over what a factory builds: structure, plain attributes, values of all tensors, and answers.

    It is built twice, each time with the same random numbers. What differs between the two (its numbers come from
    elsewhere, or it counts its copies) tells nothing of the next one, and is left out.

    Args:
        build: the factory, with its arguments.
        shape: ``(C, H, W)`` of one input.

    Raises:
        UserError: as the factory does.
    """
    with _same_chance():
        first = _looked_at(build())
    with _same_chance():
        module = build()
        second = _looked_at(module)
        stable = {name: value if second[name] == value else None for name, value in first.items()}
        if None not in stable.values():
            module.eval()
            stable["answers"] = _told(lambda: _answers(module, shape))
            module.train()
            stable["answers in training"] = _told(lambda: _answers(module, shape))
    return make_key(**stable)


def _looked_at(module: nn.Module) -> dict[str, str | None]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {"structure": _told(lambda: module_digest(module)), "values": _told(lambda: tensors_digest(tensors))}


def _told(digest: Callable[[], str]) -> str:
    """A digest, or the kind of the error that there was: what is wrong with the network is said where it is used."""
    try:
        return digest()
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return f"raises {type(error).__name__}"


def _answers(module: nn.Module, shape: tuple[int, int, int]) -> str:
    """What it answers to fixed images, with 64 bits where it computes with them, to as many digits as are sure."""
    images = torch.rand((_IMAGES, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        return _answers_in(module.double(), images)
    except Exception:  # noqa: BLE001 - it may make tensors of 32 bits on its way
        return _answers_in(module.float(), images.float())
    finally:
        module.float()


def _answers_in(module: nn.Module, images: torch.Tensor) -> str:
    torch.manual_seed(0)  # dropout
    with torch.no_grad():
        answered = list(_tensors(module(images)))
    digest = hashlib.sha256()
    for answer in answered:
        values = answer.detach().double().numpy()
        largest = np.abs(values).max(initial=0.0) or 1.0
        rounded = np.round(values / largest, _DIGITS[images.dtype]) + 0.0  # of -0.0, 0.0
        digest.update(f"{answer.shape} {largest:.{_DIGITS[images.dtype]}g} ".encode())
        digest.update(rounded.tobytes())
    return digest.hexdigest()


def _tensors(answer: Any) -> Iterator[torch.Tensor]:
    """The tensors of what a network answers, in their order."""
    if isinstance(answer, torch.Tensor):
        yield answer
    elif isinstance(answer, Mapping):
        for value in answer.values():
            yield from _tensors(value)
    elif isinstance(answer, list | tuple):
        for value in answer:
            yield from _tensors(value)


@contextmanager
def _same_chance() -> Iterator[None]:
    """The same random numbers each time, and afterwards those that there would have been."""
    before, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)
