"""Finds the artifacts of a run that can be certified: those with static integers and their reference program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optimize.report.finished_runs import artifact_folder
from serve.common.layout import run_and_artifact
from serve.runtime.card.card import Card, load_card
from serve.runtime.errors import UserError

#: The reference program beside a quantized artifact. The name is repeated here because `optimize.store.artifact`
#: imports torch.
_REFERENCE_FILE = "reference.pt2"


@dataclass(frozen=True)
class Subject:
    """An INT8 artifact of a run: its folder and card, and the reference program of its integers with its SHA-256."""

    run: str
    folder: Path
    card: Card
    reference: Path
    reference_sha256: str


def subject(store: Path, name: str) -> Subject:
    """Return the artifact ``RUN/ARTIFACT`` after checking its files.

    Raises:
        UserError: it does not exist, or has no integers to certify.
        CardError: it is damaged or incomplete.
    """
    run, artifact = run_and_artifact(name)
    if not artifact:
        raise UserError(f"certify takes RUN/ARTIFACT, such as {run}/onnx-int8, not only a run")
    folder = artifact_folder(store, run, artifact)
    card = load_card(folder)
    own = _REFERENCE_FILE in card.files
    if card.target is None or (card.format != "onnx" and not own):
        raise UserError(
            f"{name} ({card.precision}) has no static integers to certify: ptq, qat and onnx-int8 make them"
        )
    if card.file == _REFERENCE_FILE:
        raise UserError(f"{name} is its own reference; certify its graph (onnx-int8)")
    if own:
        return Subject(run, folder, card, folder / _REFERENCE_FILE, card.files[_REFERENCE_FILE])
    for parent in reversed(card.lineage[:-1]):  # from a packed graph to the graph to the integers
        made_from = artifact_folder(store, run, parent.name)
        origin = load_card(made_from)
        if origin.lineage[-1].key != parent.key:
            break
        if _REFERENCE_FILE in origin.files:
            return Subject(run, folder, card, made_from / _REFERENCE_FILE, origin.files[_REFERENCE_FILE])
        if origin.format != "onnx":
            break
    raise UserError(f"{run}/{parent.name} has changed since {name} was made from it; run the model again")
