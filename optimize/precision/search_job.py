"""A search from the command line: from a job to the result, written beside the runs."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Final

from optimize.listener import Listener
from optimize.models.preprocessing_config import Wish
from optimize.passes.ptq import Ptq
from optimize.precision.precision_records import Found
from optimize.precision.search import Search, search
from optimize.precision.search_files import RECIPE_FILE, write_search
from optimize.precision.sensitivity import one_image
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.run.pipeline import make_baseline
from optimize.run.recipe import DEFAULT_RECIPE, load_recipe
from serve.common.command_options import entries
from serve.common.config import defaults
from serve.common.hints import command
from serve.runtime.errors import UserError

#: Settings of a job that are elsewhere in a command, and settings that a search does not have.
_SAID_OTHERWISE: Final = frozenset({"model", "recipe", "store"})


def search_job(job: Job, by: Search, listener: Listener) -> tuple[Found, Path]:
    """Open the inputs of a job, search, and write the result.

    Args:
        job: as for a run. Its recipe gives the baseline, the preprocessing, the measurement and the first ``ptq``
            stage. The written recipe has all of its sections.
        by: the request.
        listener: receives every step.

    Returns:
        The result, and its folder.

    Raises:
        UserError: something is missing, unreadable, or does not fit.
        PipelineError: the float network cannot be made or measured.
    """
    if job.val_images == 1:
        raise UserError("--val-images must be at least 2 here: one half chooses the layers, the other half judges them")
    path = job.recipe or DEFAULT_RECIPE
    recipe = load_recipe(path)
    ptq = next((stage.config for stage in recipe.stages if isinstance(stage.config, Ptq)), Ptq())
    opened = open_job(job, listener, Wish(recipe.preprocessing, f"preprocessing.{{}} in {path.name}"))
    session = opened.session
    with contextlib.closing(session):
        session.check(ptq)
        baseline = make_baseline(opened, recipe, listener)
        found, keys = search(session, baseline, by, ptq=ptq, timing=one_image(recipe.measure), devices=opened.devices)
        folder = write_search(found, keys, session.store, opened.run, recipe)
    return found, folder


def to_pack(job: Job, folder: Path) -> str:
    """Return the command that makes, measures and packs the result of a search: ``run`` with the search's settings.

    Args:
        job: the job of the search.
        folder: the folder of the result.
    """
    usual = defaults(Job)
    words = ["optimize", "run", str(job.model), "--recipe", str(folder / RECIPE_FILE)]
    for entry in entries(Job):
        if entry.within or entry.name in _SAID_OTHERWISE:
            continue
        value = getattr(job, entry.name)
        if value != usual[entry.name]:
            words += [entry.flag] if value is True else [entry.flag, str(value)]
    return command(shlex.join(words), job.store)
