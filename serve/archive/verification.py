"""Loads only a private copy of an archive or artifact folder that was checked after copying.

A file in the store could be changed between its check and its use. Nobody but this user can reach the copy.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from serve.archive.archive_file import OpenArchive, open_archive
from serve.archive.ceilings import Ceilings
from serve.archive.private_copy import copy_file, private_copy, remove_copy
from serve.archive.signature import SignatureError, check_signature, signature_path
from serve.common.config import Config
from serve.common.options import ServingOptions
from serve.runtime.card.card import Card, load_card
from serve.runtime.card.known_answer import NOTHING_KNOWN
from serve.runtime.errors import CardError, UserError, did_you_mean

#: A store's own settings.
SETTINGS_FILE = "serve.toml"


@dataclass(frozen=True)
class Policy:
    """The rules for what may be loaded.

    Attributes:
        keys: public keys, one of which must have signed it. Empty: no signature is needed.
        foreign_code: whether TorchServe, which runs an archive's Python, may load an unsigned archive with other Python
            than this installation's.
        known: whether a known answer is needed, and is checked first.
        ceilings: the most that an archive may demand.
    """

    keys: tuple[Path, ...] = ()
    foreign_code: bool = False
    known: bool = False
    ceilings: Ceilings = field(default_factory=Ceilings)

    def without_known(self, archive: Path) -> None:
        """Check that an archive without a known answer may be served.

        Raises:
            CardError: it may not.
        """
        if self.known:
            raise CardError(
                f"{archive}: cannot be checked before serving ({NOTHING_KNOWN}): let `python -m optimize run` "
                "measure and pack it, or start without --require-known"
            )


class SigningSettings(Config):
    """The table ``[signing]`` of a store's ``serve.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="[signing]")

    require: tuple[str, ...] = Field(
        default=(),
        description="Public keys, as paths relative to the store; one of them must have signed each archive.",
    )
    foreign_code: bool = Field(
        default=False,
        description="Whether TorchServe may run Python of unsigned archives that this installation does not pack.",
    )


class KnownSettings(Config):
    """The table ``[known]`` of a store's ``serve.toml``."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="[known]")

    require: bool = Field(
        default=False,
        description="Whether each archive must contain an image with a known answer and pass this check.",
    )


# The tables of a store's ``serve.toml``.
_TABLES = ("signing", "known", "ceilings")


def policy_of(
    store: Path,
    required: Sequence[Path] = (),
    *,
    foreign_code: bool = False,
    known: bool = False,
    options: ServingOptions | None = None,
) -> Policy:
    """Return the policy of a store, from its ``serve.toml`` and a command line.

    Args:
        store: the folder of the runs.
        required: keys from the command line, in place of the file's.
        foreign_code: allow foreign code, whatever the file says.
        known: need known answers, whatever the file says.
        options: serving options of the command line. They raise the ceilings that they exceed.

    Raises:
        UserError: the file cannot be read or is invalid, or a key does not exist.
    """
    path = store / SETTINGS_FILE
    tables: dict[str, Any] = {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    for name in tables:
        if name not in _TABLES:
            hint = did_you_mean(name, _TABLES)
            raise UserError(f"{path}: unknown name {name!r}{hint}; the tables are [{'] and ['.join(_TABLES)}]")
    for name in _TABLES:
        if not isinstance(tables.get(name, {}), dict):
            raise UserError(f"{path}: {name} must be a table, found {tables[name]!r}")
    try:
        settings = SigningSettings(**tables.get("signing", {}))
        known = known or KnownSettings(**tables.get("known", {})).require
        ceilings = Ceilings(**tables.get("ceilings", {}))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    keys = tuple(required) or tuple(store / key for key in settings.require)
    for key in keys:
        if not key.is_file():
            raise UserError(f"{key}: there is no such public key; every archive must be signed with it")
    if options is not None:
        ceilings = ceilings.raised_by(options)
    return Policy(keys, foreign_code or settings.foreign_code, known, ceilings)


#: Returns the paths of code or configuration in an archive that this installation would not pack.
ForeignParts = Callable[[OpenArchive, Card], list[str]]


def verified_copy(source: Path, policy: Policy, into: Path, *, foreign: ForeignParts | None) -> Path:
    """Copy an archive or an artifact folder to a private folder, check the copy, and return it.

    The hashes in its card must match. An archive must demand no more than the ceilings. If the policy needs a
    signature, the archive must also have the model name of its file, so that no signed archive can replace another.

    Args:
        source: a ``.mar`` file, or an artifact folder.
        policy: the rules for what may be loaded.
        into: a private folder (700) of the caller.
        foreign: `serve.torchserve.archive_builder.foreign_parts` if the archive's Python will be run, as in TorchServe.
            The Python must then be signed or this installation's, unless the policy allows others. None: it is not run.

    Returns:
        The copy: a path in ``into`` with the same name.

    Raises:
        SignatureError: the policy does not allow it.
        CardError: it is damaged, or no archive or artifact.
        UserError: it does not exist or cannot be copied, or ``into`` is open to others.
    """
    copy = into / source.name
    signature = signature_path(copy)
    try:
        with _source_errors(source, copy):
            private_copy(source, into)
            if policy.keys:
                if not signature_path(source).is_file():
                    raise SignatureError(
                        f"{source}: is not signed; it must be signed by "
                        f"{' or '.join(key.name for key in policy.keys)}: sign it with `python -m serve sign`"
                    )
                copy_file(signature_path(source), signature, follow=True)
                check_signature(copy, policy.keys)
            if copy.is_dir():
                load_card(copy)
            else:
                with open_archive(copy) as archive:
                    _check_archive(source, archive, policy, foreign)
    except BaseException:
        remove_copy(copy)
        raise
    finally:
        signature.unlink(missing_ok=True)
    return copy


@contextmanager
def _source_errors(source: Path, copy: Path) -> Iterator[None]:
    """Name the source in errors about a copy, because the copy is gone when somebody reads them."""
    try:
        yield
    except (CardError, SignatureError) as error:
        raise type(error)(str(error).replace(str(copy), str(source))) from None


def _check_archive(source: Path, archive: OpenArchive, policy: Policy, foreign: ForeignParts | None) -> None:
    card = archive.check()
    # The own server runs no Python of an archive, and never more processes than cores.
    requested = archive.serving()
    policy.ceilings.check(source, requested if foreign is not None else dataclasses.replace(requested, workers=1))
    if policy.keys:
        if (name := archive.name()) != source.stem:
            raise SignatureError(f"{source}: is the signed archive of {name}, not of {source.stem}")
        return
    if foreign is None or policy.foreign_code:
        return
    if parts := foreign(archive, card):
        raise SignatureError(
            f"{source}: contains code that is not from this installation ({parts[0]}): pack it again with `python "
            "-m serve package`, start with --require-signed, or trust it with --foreign-code"
        )
