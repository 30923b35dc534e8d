"""Opens a finished run's model, data and artifacts again by its name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from optimize.data.class_order import in_recorded_order
from optimize.data.formats.base import open_data
from optimize.listener import Listener
from optimize.measure.rows import Report
from optimize.models.preprocessing_config import PreprocessingConfig, Wish
from optimize.report.finished_runs import artifact_folder, report_of
from optimize.run.identity import identity_of
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.run.saved_artifacts import take
from optimize.run.session import Session, Step
from serve.common import layout
from serve.runtime.card.card import LOGITS, load_card
from serve.runtime.errors import UserError


def reopen_run(
    store: Path, run: str, listener: Listener, *, seed: int = 0, device: str = "auto", skip_unreadable: bool = False
) -> tuple[Session, Report]:
    """Open a run's session as it was when the run was made, and its report.

    Args:
        store: the folder of the run.
        run: its name.
        listener: the session's listener.
        seed: the run's seed, which the run does not record.
        device: where to calibrate.
        skip_unreadable: leave out validation images that cannot be read. A run that did so is opened the same way.

    Raises:
        UserError: the run does not exist, or its model or data cannot be opened as they were.
    """
    report = report_of(store, run)
    identity = identity_of(store / run)
    if identity is None:
        raise UserError(f"{store / run / layout.IDENTITY_FILE} is missing or unreadable; run the model again")
    data = open_data(identity.data, seed=seed, listener=listener, accept_gaps=True)  # as the run did
    card = load_card(layout.artifact_folder(store, run, report.baseline.name))
    data = in_recorded_order(data, card.data)
    if len(card.classes) == len(data.classes):
        data = dataclasses.replace(data, classes=card.classes)  # names that a file gave to the run
    wished = {part.name: getattr(card.preprocessing, part.name) for part in dataclasses.fields(card.preprocessing)}
    job = Job(
        model=identity.model,
        data=data,
        store=store,
        device=device,
        seed=seed,
        skip_unreadable=skip_unreadable or _left_some_out(report),
        val_images=report.data.val if report.data.val_of else None,
        preprocessing=Wish(PreprocessingConfig(**wished), "the run's {}"),
        outputs=",".join(card.outputs) if card.outputs != (LOGITS,) else None,
    )
    session = open_job(job, listener).session
    own, then = session.context.data, report.data
    if (own.fingerprint, own.val.fingerprint) != (then.fingerprint, then.val_fingerprint):
        session.close()
        raise UserError(
            f"the images of {identity.data} are not those that {run} was made with: they have changed, or the run "
            f"had a --seed different from {seed}"
        )
    return session, report


def _left_some_out(report: Report) -> bool:
    """Return whether the run left out validation images that could not be read."""
    measured = [pair.measured for row in report.rows for pair in row.pairs]
    return any(each is not None and each.accuracy.left_out > 0 for each in measured)


def artifact_of(session: Session, run: str, name: str) -> Step:
    """Return an artifact of a run in its session, with its ancestors if the store still has them.

    Raises:
        UserError: the run has no such artifact, or it is damaged.
    """
    return take(session, artifact_folder(session.store.root, run, name))
