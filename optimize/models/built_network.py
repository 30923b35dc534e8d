"""Hashes the network that a user's factory builds, because a digest of the code misses what the code reads elsewhere.

A factory may read ``arch.json`` or an environment variable, and so may its network when it runs. So the network is
built and examined: structure, plain attributes, values, and answers.
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
#: Significant decimals relative to an answer's largest number. Threads add in varying order, so that the last digits
#: differ.
_DIGITS = {torch.float64: 6, torch.float32: 3}


def architecture_of(source: ModelSource, outputs: int, preprocessing: Preprocessing) -> tuple[str, str]:
    """Return the identity of an architecture in keys: the digest of its code, and the factory's name.

    For a user's own factory it includes the digest of what it builds here: see `built_digest`. A library's factory is
    identified by the library's version.

    Raises:
        UserError: the factory does not build a module.
    """
    if source.origin != "user":
        return source.fingerprint, source.name
    built = built_digest(lambda: source.build(outputs, preprocessing.crop[0]), preprocessing.shape)
    return f"{source.fingerprint}/{built}", source.name


def built_digest(build: Callable[[], nn.Module], shape: tuple[int, int, int]) -> str:
    """Return the SHA-256 over a built module: structure, plain attributes, values of all tensors, and answers.

    The module is built twice, each time with the same random numbers. A part that differs between the two (its numbers
    come from elsewhere, or it counts its copies) says nothing about the next build, and is left out.

    Args:
        build: the factory with its arguments.
        shape: ``(C, H, W)`` of one input.

    Raises:
        UserError: as the factory does.
    """
    with _same_random_numbers():
        first = _examined(build())
    with _same_random_numbers():
        module = build()
        second = _examined(module)
        stable = {name: value if second[name] == value else None for name, value in first.items()}
        if None not in stable.values():
            module.eval()
            stable["answers"] = _digest_or_error(lambda: _answers(module, shape))
            module.train()
            stable["answers in training"] = _digest_or_error(lambda: _answers(module, shape))
    return make_key(**stable)


def _examined(module: nn.Module) -> dict[str, str | None]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "structure": _digest_or_error(lambda: module_digest(module)),
        "values": _digest_or_error(lambda: tensors_digest(tensors)),
    }


def _digest_or_error(digest: Callable[[], str]) -> str:
    """Return a digest, or the kind of the error. A fault of the network is reported where the network is used."""
    try:
        return digest()
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return f"raises {type(error).__name__}"


def _answers(module: nn.Module, shape: tuple[int, int, int]) -> str:
    """Digest the answers to fixed images to the reliable digits, in 64 bits if the network can compute in them."""
    images = torch.rand((_IMAGES, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        return _answers_in(module.double(), images)
    except Exception:  # noqa: BLE001 - it may make 32-bit tensors internally
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
        rounded = np.round(values / largest, _DIGITS[images.dtype]) + 0.0  # turns -0.0 into 0.0
        digest.update(f"{answer.shape} {largest:.{_DIGITS[images.dtype]}g} ".encode())
        digest.update(rounded.tobytes())
    return digest.hexdigest()


def _tensors(answer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a network's answer in order."""
    if isinstance(answer, torch.Tensor):
        yield answer
    elif isinstance(answer, Mapping):
        for value in answer.values():
            yield from _tensors(value)
    elif isinstance(answer, list | tuple):
        for value in answer:
            yield from _tensors(value)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Use the same random numbers in each block, and restore the generators afterwards."""
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
