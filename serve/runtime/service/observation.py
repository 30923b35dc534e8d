"""What is told of each request when it is over, for metrics and logs."""

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

# Of this process and of one request: random numbers for each would be a system call each.
_PROCESS = secrets.token_hex(4)
_NUMBER = itertools.count(secrets.randbelow(1 << 20))


def _new_id() -> str:
    return f"{_PROCESS}{next(_NUMBER):08x}"


def request_id(given: str, own: Callable[[], str] = _new_id) -> str:
    """The client's word for its request where that is one (visible ASCII, at most 128 of it), or the server's.

    Args:
        given: by the client; empty: nothing.
        own: the server's; without it a new one is made.
    """
    return given if _ID.fullmatch(given) else own()


@dataclass(slots=True)
class Observation:
    """One request, filled while it is answered; an observer gets it once, whole, and changes nothing.

    Attributes:
        request_id: the client's, or one of ours.
        route: the path as it was added to the router, or ``grpc/METHOD``; empty where nothing answers. Of TorchServe,
            which tells a worker no path: ``predict``, ``explain`` or ``describe``.
        model: name of the model that was asked; None: none, or an unknown one.
        version: of the model that answered.
        status: HTTP status of the answer; 499: the client was gone before it.
        seconds: from the request's headers to its answer. Of TorchServe: from when the request was whole.
        stages: where the service's time went; None: it was not asked.
        batch_size: images that went through the network together with this request's first.
        images: how many this request held.
        refusals: a word for each refusal, of the request or of one of its images (``item-415``).
        frontend_ms: which of that it waited before this process had it; None: nobody else was before.
        probe: whether it asked for the server's health only.
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
        """Fill in what the service did."""
        self.stages, self.batch_size = answered.stages, answered.batch_size
        self.refusals += tuple(f"item-{found.status}" for found in answered.outcomes if isinstance(found, Refusal))


#: Called in the event loop, once for each request: it must neither wait nor raise.
Observer = Callable[[Observation], None]
