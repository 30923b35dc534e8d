"""Loads artifacts that were saved to a folder into a session."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

from torch import nn

from optimize.passes.base import find_pass
from optimize.run.session import BASELINE, Planned, Session, Step, first_module
from optimize.store.artifact import EAGER, Artifact, Kind, Made, Product, write_product
from optimize.store.keys import TakenKey, opening
from optimize.store.objects import StoredObject
from serve.runtime.card.card import Ancestor, Card, load_card
from serve.runtime.errors import CardError, UserError


def take(session: Session, folder: Path) -> Step:
    """Return the artifact that was saved in ``folder`` as one of the session's.

    If the store still has the original with the same files, that is returned with its ancestors. If not, the files are
    copied into the store under a key of their content. Such an artifact can be measured and packed. Passes can follow
    it if it is a float module.

    Args:
        session: a session with the same classes and preprocessing.
        folder: the folder that ``save`` wrote. It is checked against its card.

    Raises:
        UserError: it is not a complete artifact, or does not fit this session.
    """
    try:
        card = load_card(folder)
    except CardError as error:
        raise UserError(f"{folder} cannot be loaded: {error}") from None
    context = session.context
    for what, saved, own in (
        ("model", card.model, session.source.name),
        ("list of classes", card.classes, context.data.classes),
        ("preprocessing", card.preprocessing, context.preprocessing),
    ):
        if saved != own:
            raise UserError(f"{folder} has another {what} than this session: {saved}, not {own}")
    if not card.lineage:
        raise UserError(f"{folder} cannot be loaded: its card does not name the pass that made it")
    return _found_again(session, card) or _copied(session, card, folder)


def _found_again(session: Session, card: Card) -> Step | None:
    """Return the same artifact with its ancestors, if the store has them all."""
    parent: Artifact | None = None
    step: Step | None = None
    for ancestor in card.lineage:
        made = session.store.open(ancestor.key)
        if made is None:
            return None
        step = session.named(_planned(ancestor), made, parent)
        parent = step.artifact
    # A key only identifies the inputs: training on another machine gives other weights.
    return step if step is not None and dict(step.artifact.card.files) == dict(card.files) else None


def _copied(session: Session, card: Card, folder: Path) -> Step:
    own = card.lineage[-1]
    key = TakenKey(artifact=opening(card)).digest
    product = Product(
        *(card.file, card.format, card.precision, card.device, card.input_dtype, card.target, card.notes),
        structure=own.structure,
    )

    def copy(target: Path) -> None:
        for name in card.files:
            shutil.copyfile(folder / name, target / name)
        write_product(Made(product, card.versions, card.machine), target)

    made: StoredObject = session.store.obtain(key, copy, about=f"{card.model} on {card.data.get('name')}: {card.name}")
    kind = _kind(own)
    build = functools.partial(_structure, session, card.lineage) if kind in EAGER else None
    planned = Planned(card.name, kind, own.operation, own.config, key, card.lineage[:-1])
    return session.named(planned, made, None, build)


def _kind(ancestor: Ancestor) -> Kind:
    return "module" if ancestor.operation == BASELINE else find_pass(ancestor.operation).yields


def _planned(ancestor: Ancestor) -> Planned:
    return Planned(ancestor.name, _kind(ancestor), ancestor.operation, ancestor.config, ancestor.key)


def _structure(session: Session, lineage: tuple[Ancestor, ...]) -> nn.Module:
    """Return a module of the structure that the lineage gives to the session's model, with arbitrary weights."""
    module = first_module(session, lineage[0].structure).eval()
    for ancestor in lineage[1:]:
        step = find_pass(ancestor.operation)
        module = step.rebuilt(module, session.context.example(), ancestor.structure).eval()
    return module
