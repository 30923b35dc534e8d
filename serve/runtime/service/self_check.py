"""Checks that a newly opened model gives its known answer. It needs no server."""

from __future__ import annotations

import json
from pathlib import Path

from ..card.known_answer import KnownAnswer
from ..errors import CardError, Refusal
from .protocol import Request
from .service import Service

_ANSWER_S = 120.0


def check_known(service: Service, known: KnownAnswer, where: Path) -> str:
    """Request the known answer from a model, as a client would.

    Args:
        service: the model's service, which nobody else uses yet.
        known: the artifact's known answer.
        where: the artifact's origin, for messages.

    Returns:
        A line with the result.

    Raises:
        CardError: the answer is another one. The message names ``where``.
    """
    task = service.predictor.task
    request = Request((known.image,), task.options(task.complete), listed=False)
    outcome = service.submit(request).result(timeout=_ANSWER_S).outcomes[0]
    if isinstance(outcome, Refusal):
        raise CardError(f"{where}: the server refused its known image: {outcome.message}")
    try:
        task.check_known(known)
        return task.check_answer(known, json.loads(task.json(outcome)))
    except CardError as error:
        raise CardError(f"{where}: {error}") from None
