"""Loads a model from an archive: copy it, check all hashes, open it, warm it up, check its known answer."""

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
    """Open an archive. This takes seconds, so do not call it in the event loop.

    Args:
        wanted: the version to load.
        gpu: index of the GPU. None: no GPU.
        queue: most waiting requests. None: the archive's own limit.
        policy: which archives may be loaded.

    Returns:
        The model, warm. No check has failed.

    Raises:
        UserError: there is no such archive.
        SignatureError: the policy does not allow the archive.
        CardError: the archive is damaged, or its known image gets another answer than when it was measured, or it has
            no known answer and the policy needs one.
        EngineError: no engine that may run it works here.
    """
    with _unpacked(wanted.archive, policy) as (folder, digest):
        known = read_known(folder)
        if known is None:
            policy.without_known(wanted.archive)
        service = open_service(folder, gpu, queue_limit=queue)
        try:
            card = service.predictor.card
            checked = [
                f"{len(card.files) + len(card.packed)} files match the SHA-256 in their card",
                f"warmed up with {service.predictor.max_batch} images",
                f"known answer not checked: {NOTHING_KNOWN}"
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
    """Extract an archive into a private folder. Yield the folder and the archive's SHA-256.

    The folder is removed at the end of the block. Files that an engine has mapped stay until it is closed.

    Raises:
        UserError: there is no space for the files, or no such archive.
    """
    with ExitStack() as stack:
        try:
            private = stack.enter_context(scratch("serve-"))
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"{archive}: cannot create a folder for a private copy ({why})") from None
        # The Python code in the archive is not run: this process uses its own runtime.
        copy = verified_copy(archive, policy, private, foreign=None)
        digest = sha256_file(copy)
        folder = private / "archive"
        try:
            with zipfile.ZipFile(copy) as opened:
                opened.extractall(folder)  # the names come from the card, which allows only plain ones
        except OSError as error:
            raise UserError(f"{archive}: cannot be unpacked to {folder} ({error.strerror or error})") from None
        copy.unlink()
        yield folder, digest
