"""A search as it is asked for on the command line: from a job to what was found, written beside the runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

from optimize.listener import Listener
from optimize.models.preprocessing import Wish
from optimize.passes.ptq import Ptq
from optimize.precision.files import write_search
from optimize.precision.records import Found
from optimize.precision.search import Search, search
from optimize.precision.sensitivity import one_image
from optimize.run.job import Job, open_job
from optimize.run.recipe import DEFAULT_RECIPE, load_recipe
from optimize.run.session import BASELINE


def search_job(job: Job, by: Search, listener: Listener) -> tuple[Found, Path]:
    """Open what a job names, search, and write what was found.

    Args:
        job: as for a run; of its recipe the baseline, the preprocessing, the measurement and the first ``ptq`` stage
            are taken.
        by: what is searched.
        listener: told of every step.

    Returns:
        What was found, and the folder that holds it.

    Raises:
        UserError: something is missing, unreadable, or does not fit.
        PipelineError: the float network cannot be made or measured.
    """
    path = job.recipe or DEFAULT_RECIPE
    recipe = load_recipe(path)
    ptq = next((stage.config for stage in recipe.stages if isinstance(stage.config, Ptq)), Ptq())
    opened = open_job(job, listener, Wish(recipe.preprocessing, f"preprocessing.{{}} in {path.name}"))
    session = opened.session
    with contextlib.closing(session):
        session.check(ptq)
        listener.started(BASELINE)
        baseline = session.baseline(recipe.baseline, opened.checkpoint, opened.origin)
        listener.ended(BASELINE, baseline.seconds, cached=baseline.cached, skipped=None)
        found, keys = search(session, baseline, by, ptq=ptq, timing=one_image(recipe.measure), devices=opened.devices)
        folder = write_search(found, keys, session.store, opened.run)
    return found, folder
