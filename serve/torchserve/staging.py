"""Puts archives where a server takes them from: a folder of its own, so that nothing that a run does removes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from serve.archive.archive_file import MODEL_VERSION, Instructions, instructions_in, with_version
from serve.archive.verification import Policy, verified_copy
from serve.runtime.errors import UserError
from serve.torchserve.state import ServedModel

#: Packs a model, which is named, otherwise than its archive, into the file that it is given.
Pack = Callable[[str, Path], object]


def stage(
    folder: Path, model: ServedModel, archive: Path, pack: Pack | None = None, policy: Policy | None = None
) -> Instructions:
    """Put a model's archive into the server's folder, as the file and with the version that it is served with.

    Args:
        folder: the server's.
        model: how it is served.
        archive: the run's archive, which is copied and checked; it may be replaced or removed afterwards.
        pack: packs it otherwise; None serves it as it is.
        policy: what may be loaded; None: what is whole, and has no other code than this installation's.

    Returns:
        What it tells the server.

    Raises:
        UserError: it cannot be packed so, or must be signed and is to be packed otherwise.
        CardError: the archive is not whole, or has no known answer where the policy asks for one.
        SignatureError: the policy does not allow it.
    """
    policy = policy or Policy()
    folder.mkdir(mode=0o700, exist_ok=True)
    staged = folder / model.file
    staged.unlink(missing_ok=True)
    if pack is None:
        from serve.torchserve.archive_builder import foreign_parts  # imports torch

        verified_copy(archive, policy, folder, foreign=foreign_parts).replace(staged)
    elif policy.keys:
        raise UserError(
            "what must be signed is served as its archive says: pack it so with `python -m serve package … --sign KEY`"
        )
    else:
        pack(model.name, staged)
    told = instructions_in(staged)
    policy.ceilings.check(archive, told.serving)
    if policy.known and told.known is None:
        policy.without_known(archive)
    if model.version != MODEL_VERSION:
        with_version(staged, model.version, staged)
    return told
