"""A network's outputs: a tuple of tensors, batch first, in the order in which the card names them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from .errors import EngineError

if TYPE_CHECKING:
    from .card.card import Card

#: One tensor ``(N, …)`` for each output. All have the same N.
Outputs = tuple[torch.Tensor, ...]

#: What a network returns: the tensor itself if it has one output.
Answer = torch.Tensor | Outputs


def as_outputs(answer: torch.Tensor | Sequence[torch.Tensor]) -> Outputs:
    """Return what a network returns as a tuple."""
    return (answer,) if isinstance(answer, torch.Tensor) else tuple(answer)


def first_output(answer: Answer) -> torch.Tensor:
    """Return the first output of what a network returns, for example logits ``(N, classes)``."""
    return answer[0] if isinstance(answer, tuple) else answer


def joined(parts: Iterable[Outputs]) -> Outputs:
    """Return the outputs of the parts of a batch as those of the whole."""
    return tuple(of_all[0] if len(of_all) == 1 else torch.cat(of_all) for of_all in zip(*parts, strict=True))


def wanted_outputs(card: Card, names: Iterable[str]) -> list[str]:
    """Return the names of the card's outputs, which must be among those that its file has.

    Raises:
        EngineError: the file does not have all of them.
    """
    known = {*names}
    if missing := [name for name in card.outputs if name not in known]:
        raise EngineError(f"{card.name}: the file has no output {missing[0]!r}")
    return list(card.outputs)
