"""Whether a model that has just been opened answers its known image as when it was measured; no server is needed."""

from __future__ import annotations

from pathlib import Path

from ..card.known_answer import KnownAnswer
from ..errors import CardError, Refusal
from .protocol import Request
from .service import Service

_ANSWER_S = 120.0


def check_known(service: Service, known: KnownAnswer, where: Path) -> str:
    """Ask a model for the answer that is known, as a client would.

    Args:
        service: which answers nobody else yet.
        known: of its artifact.
        where: it was opened from, for messages.

    Returns:
        A line that says what was seen.

    Raises:
        CardError: it answers otherwise; ``where`` is named.
    """
    classes = len(service.predictor.card.classes)
    answered = service.submit(Request((known.image,), k=classes, listed=False)).result(timeout=_ANSWER_S)
    outcome = answered.outcomes[0]
    if isinstance(outcome, Refusal):
        raise CardError(f"{where}: its known image is refused: {outcome.message}")
    try:
        return known.seen_in({label.index: label.probability for label in outcome})
    except CardError as error:
        raise CardError(f"{where}: {error}") from None
