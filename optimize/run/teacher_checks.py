"""Tries the teachers of a recipe before anything trains: their answers, and whether their features fit."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import nn

from optimize.errors import PassError
from optimize.run.recipe import Recipe, Stage
from optimize.run.session import BASELINE, Session, first_module
from optimize.run.teachers import find_teacher
from optimize.training.config import distillations
from optimize.training.distil import SELF, Distil
from optimize.training.features import match
from optimize.training.objective import check_answers
from serve.runtime.errors import PipelineError


def check_teaching(session: Session, recipe: Recipe, stage: Stage | None) -> None:
    """Refuse a teacher that does not fit, as far as that is known before anything is made.

    An artifact that does not exist yet is represented by its future structure with random weights. If only the pass
    itself determines the structure (pruned channels), features are checked at that time.

    Args:
        session: the run's session.
        recipe: the recipe whose artifacts may teach.
        stage: the stage that is taught. None: the baseline.

    Raises:
        UserError: the teacher has no weights or other classes, a feature does not exist, or shapes do not fit.
    """
    config = recipe.baseline if stage is None else stage.config
    for distil in distillations(config):
        teacher = _taught_by(session, recipe, distil, stage)
        student = (
            _structure(session, recipe, stage.parent if stage is not None else BASELINE) if distil.features else None
        )
        if student is not None and teacher is not None:
            learner, nodes = _learner(session, stage, student)
            match(learner, teacher, distil.features, session.context.example(2), nodes)


def _learner(session: Session, stage: Stage | None, student: nn.Module) -> tuple[nn.Module, Mapping[str, str] | None]:
    """Return the part of a student that a stage trains, and the names of its nodes there; see `match`."""
    if stage is None or stage.operation.learner is None:
        return student, None
    try:
        build = functools.partial(first_module, session)
        return stage.operation.learner(student, stage.config, build, session.context.example())
    except PipelineError:  # the stage itself will raise it
        return student, None


def _taught_by(session: Session, recipe: Recipe, distil: Distil, stage: Stage | None) -> nn.Module | None:
    """Return a teacher model after checking its answers, or the structure of an artifact whose features are used."""
    if not isinstance(distil.teacher, str):
        opened = find_teacher(distil, session.context, None, {}).open()
        check_answers(opened, session.context, session.context.example(2))
        return opened.module
    if not distil.features:
        return None
    assert stage is not None
    name = distil.teacher
    if name == SELF:
        stages = {each.name: each for each in recipe.stages}
        name = stage.parent
        while name != BASELINE and stages[name].operation.yields != "module":
            name = stages[name].parent
    return _structure(session, recipe, name)


def _structure(session: Session, recipe: Recipe, name: str) -> nn.Module | None:
    """Return a module of an artifact's structure, with random weights. None if it is not known yet."""
    if name == BASELINE:
        return first_module(session).eval()
    stage = next(each for each in recipe.stages if each.name == name)
    parent = _structure(session, recipe, stage.parent)
    if parent is None or stage.operation.rebuild is None:
        return None
    try:
        return stage.operation.rebuild(parent, session.context.example()).eval()
    except PassError:  # the stage itself will raise it
        return None
