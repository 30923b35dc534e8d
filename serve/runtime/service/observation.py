"""The record of a finished request, for metrics and logs."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Refusal
from .stages import Stages

if TYPE_CHECKING:  # it imports torch
    from .pending_request import Answered

_ID = re.compile(r"[!-~]{1,128}")

# A prefix for the process and a counter. Random numbers for each request would need a system call each.
_PROCESS = secrets.token_hex(4)
_NUMBER = itertools.count(secrets.randbelow(1 << 20))


def _new_id() -> str:
    return f"{_PROCESS}{next(_NUMBER):08x}"


def request_id(given: str, own: Callable[[], str] = _new_id) -> str:
    """Return the client's ID of a request if it is valid (1 to 128 visible ASCII characters), or else the server's.

    Args:
        given: the client's ID. Empty: none.
        own: returns the server's ID. By default a new one.
    """
    return given if _ID.fullmatch(given) else own()


@dataclass(slots=True)
class Observation:
    """The record of one request, filled while the request is answered. Observers get it once and must not change it.

    Attributes:
        request_id: the client's ID, or the server's.
        route: the path as in the router, or ``grpc/METHOD``. Empty if there is no such route. In TorchServe, which
            passes no path to a worker: ``predict``, ``explain`` or ``describe``.
        model: name of the model. None: no model, or an unknown one.
        version: version of the model.
        status: HTTP status of the response. 499: the client disconnected before it.
        seconds: from the request's headers to its response. In TorchServe from when the request was complete.
        stages: times of the service's stages. None: the service was not called.
        batch_size: images in the batch of this request's first image.
        images: number of images in this request.
        refusals: a word for each refusal of the request or one of its images (``item-415``).
        frontend_ms: milliseconds in a frontend's queue before this process got it. None: there is no frontend.
        probe: whether it is a health probe.
    """

    request_id: str = ""
    route: str = ""
    model: str | None = None
    version: str | None = None
    status: int = 0
    seconds: float = 0.0
    stages: Stages | None = None
    batch_size: int = 0
    images: int = 0
    refusals: tuple[str, ...] = ()
    frontend_ms: float | None = None
    probe: bool = False

    def tell(self, answered: Answered) -> None:
        """Record the service's answer."""
        self.stages, self.batch_size = answered.stages, answered.batch_size
        self.refusals += tuple(f"item-{found.status}" for found in answered.outcomes if isinstance(found, Refusal))


#: Called in the event loop, once for each request. It must neither block nor raise.
Observer = Callable[[Observation], None]
