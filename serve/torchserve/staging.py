"""Copies archives to the server's own folder, so that no action on a run can remove them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from serve.archive.archive_file import MODEL_VERSION, Instructions, instructions_in, with_version
from serve.archive.verification import Policy, verified_copy
from serve.runtime.errors import UserError
from serve.torchserve.state import ServedModel

#: Packs the named model, in place of its archive, into the given file.
Pack = Callable[[str, Path], object]


def stage(
    folder: Path, model: ServedModel, archive: Path, pack: Pack | None = None, policy: Policy | None = None
) -> Instructions:
    """Put a model's archive into the server's folder, with the file name and version that it is served with.

    Args:
        folder: the server's folder.
        model: the model.
        archive: the run's archive. It is copied and checked, so it may be replaced or removed afterwards.
        pack: packs the model in place of its archive. None: the archive is used.
        policy: which archives may be loaded. None: complete ones with only this installation's code.

    Returns:
        The archive's instructions for the server.

    Raises:
        UserError: the archive cannot be packed so. Or it must be signed, and ``pack`` would change it.
        CardError: the archive is damaged, or has no known answer and the policy needs one.
        SignatureError: the policy does not allow the archive.
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
            "serving options cannot change a signed archive: pack it with these options, with `python -m serve "
            "package … --sign KEY`"
        )
    else:
        pack(model.name, staged)
    instructions = instructions_in(staged)
    policy.ceilings.check(archive, instructions.serving)
    if policy.known and instructions.known is None:
        policy.without_known(archive)
    if model.version != MODEL_VERSION:
        with_version(staged, model.version, staged)
    return instructions
