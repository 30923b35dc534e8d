"""From an archive to a model that answers: a private copy, every hash checked, opened, warm, its known image asked."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from serve.archive.verification import Policy, verified_copy
from serve.asgi.http.served_models import Served
from serve.asgi.process.serving_plan import Wanted
from serve.common.scratch import scratch
from serve.runtime.card.card import sha256_file
from serve.runtime.card.known_answer import NOTHING_KNOWN, read_known
from serve.runtime.errors import UserError
from serve.runtime.service.self_check import check_known
from serve.runtime.service.service import open_service


def load(wanted: Wanted, *, gpu: int | None, queue: int | None, policy: Policy) -> Served:
    """Open an archive. It takes seconds: not in the event loop.

    Args:
        wanted: what is to be served.
        gpu: index of the GPU for what runs on one; None: no GPU.
        queue: requests that may wait; None: as the archive says.
        policy: what may be loaded.

    Returns:
        The model, warm, and ready where nothing that was checked spoke against it.

    Raises:
        UserError: there is no such archive.
        SignatureError: the policy does not allow it.
        CardError: it is not whole, has no known answer where the policy asks for one, or does not answer its known
            image as it did when it was measured.
        EngineError: nothing that may run it works here.
    """
    with _unpacked(wanted.archive, policy) as (folder, digest):
        known = read_known(folder)
        if known is None:
            policy.without_known(wanted.archive)
        service = open_service(folder, gpu, queue_limit=queue)
        try:
            card = service.predictor.card
            checked = [
                f"{len(card.files) + len(card.packed)} files have the SHA-256 that their card says",
                f"warm at {service.predictor.max_batch} images",
                f"not asked for a known answer: {NOTHING_KNOWN}"
                if known is None
                else check_known(service, known, wanted.archive),
            ]
        except BaseException:
            service.close()
            raise
    return Served(
        name=wanted.name,
        version=wanted.version,
        predictor=service.predictor,
        serving=service.serving,
        service=service,
        weight=wanted.weight,
        checked=tuple(checked),
        unchecked=NOTHING_KNOWN if known is None else "",
        digest=digest,
    )


@contextmanager
def _unpacked(archive: Path, policy: Policy) -> Iterator[tuple[Path, str]]:
    """A folder with an archive's files that nobody else can change, and the archive's SHA-256.

    The folder goes at the end of the block; what an engine has mapped stays until it is closed.

    Raises:
        UserError: there is no room for them, or no such archive.
    """
    with ExitStack() as stack:
        try:
            private = stack.enter_context(scratch("serve-"))
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"{archive}: no folder can be made for a private copy ({why})") from None
        # Its Python is not run: this process has the runtime that it was started with.
        copy = verified_copy(archive, policy, private, foreign=None)
        digest = sha256_file(copy)
        folder = private / "archive"
        try:
            with zipfile.ZipFile(copy) as opened:
                opened.extractall(folder)  # names are those of the card, which are plain
        except OSError as error:
            raise UserError(f"{archive}: cannot be unpacked to {folder} ({error.strerror or error})") from None
        copy.unlink()
        yield folder, digest
