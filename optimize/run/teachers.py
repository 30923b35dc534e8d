"""Finds and checks the teacher of a training before anything trains: a word, an artifact or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimize.context import Context
from optimize.measure.machine import installed_version
from optimize.models.built_network import architecture_of
from optimize.models.checkpoint import Checkpoint, read_checkpoint
from optimize.models.logits import ending_of, giving_logits
from optimize.models.model_names import resolve_model, with_checkpoint, with_named_weights
from optimize.models.module_source import module_source
from optimize.models.source import ModelSource
from optimize.models.teacher import Served, Teacher, Teaching
from optimize.models.weight_matching import load_into
from optimize.store.artifact import KIND_NAMES, Artifact
from optimize.store.keys import content, make_key
from optimize.store.sources import source_digest
from optimize.training.baseline import new_module
from optimize.training.distil import SELF, Distil, TeacherModel
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import find_engine, preferred
from serve.runtime.errors import UserError, did_you_mean
from serve.runtime.images.image_preprocessing import normalise

#: The number of images whose answers show what a teacher's network ends in, such as a softmax.
_EXAMPLES = 8


def find_teacher(distil: Distil, context: Context, parent: Artifact | None, others: Mapping[str, Artifact]) -> Teaching:
    """Return the teacher that settings name.

    Args:
        distil: the settings.
        context: the student's context. The teacher must have the same classes and input shape.
        parent: the artifact that the pass starts from, with its ancestors. None for the baseline.
        others: artifacts by the names that settings may use.

    Raises:
        UserError: the teacher does not exist, or has no weights, other classes, another input or no features.
        EngineError: the teacher is an artifact that no engine runs here.
    """
    given = distil.teacher
    if isinstance(given, TeacherModel | nn.Module):
        return _model(given, context)
    if isinstance(given, str):
        line = {artifact.name: artifact for artifact in parent.line()} if parent is not None else {}
        given = _itself(line) if given == SELF else _called(given, {**line, **others})
    return _artifact(given, distil, context)


def _itself(line: Mapping[str, Artifact]) -> Artifact:
    """Return the last float module of a lineage."""
    floats = [artifact for artifact in line.values() if artifact.kind == "module"]
    if not floats:
        raise UserError(
            f"distil.teacher: {SELF!r} is the float network that a pass starts from, but the baseline has none; "
            f"give a model with its weights: {{model: …, checkpoint: …}}"
        )
    return floats[-1]


def _called(name: str, known: Mapping[str, Artifact]) -> Artifact:
    if name not in known:
        there = ", ".join(known) or "none yet"
        raise UserError(
            f"distil.teacher: there is no artifact {name!r}{did_you_mean(name, known)}; the artifacts are {there}"
        )
    return known[name]


def _artifact(artifact: Artifact, distil: Distil, context: Context) -> Teaching:
    card, name = artifact.card, artifact.name
    if distil.features and artifact.kind != "module":
        raise UserError(f"distil.features: {name} is {KIND_NAMES[artifact.kind]}; use a float module")
    if card.classes != context.data.classes:
        counts = len(card.classes), len(context.data.classes)
        which = f"{counts[0]} classes, the data has {counts[1]}" if counts[0] != counts[1] else "other classes"
        raise UserError(
            f"distil.teacher: {name} ({card.model}) has {which}; a teacher must have the same as the student"
        )
    own, ours = card.preprocessing, context.preprocessing
    if own.shape != ours.shape:
        shapes = " and ".join("x".join(map(str, each.shape)) for each in (own, ours))
        raise UserError(f"distil.teacher: inputs of {name} ({card.model}) and the student differ: {shapes}")
    if artifact.kind == "module":
        digest = _digest(content(card), own)
        return Teaching(digest, lambda: Teacher(name, digest, artifact.module(), own.mean, own.std))
    execution = preferred(card, "cpu")
    served = Served(artifact.folder, card, execution)
    digest = _digest(make_key(network=content(card), runs=_runs(execution)), own)
    return Teaching(digest, lambda: Teacher(name, digest, served.eval(), own.mean, own.std))


def _runs(execution: Execution) -> dict[str, Any]:
    """Return what the answers of an artifact depend on if an engine runs it."""
    engine = find_engine(execution.engine)
    versions = {name: installed_version(name) for name in ("torch", *engine.libraries)}
    return {"execution": execution.to_json(), "libraries": versions, "code": source_digest(engine.module)}


def _model(given: TeacherModel | nn.Module, context: Context) -> Teaching:
    """Open a model with weights, built for the student's classes and image size."""
    source, checkpoint, origin = _weights(given)
    _check_order(checkpoint, source, context)
    own = _normalised(source, context)

    def build() -> Teacher:
        module = new_module(source, dataclasses.replace(context, outputs=()))  # only its logits teach
        try:
            load_into(module, checkpoint, origin)
        except UserError as error:
            said = str(error).removeprefix(f"{source.name}: ")  # the prefix is the origin of a module's own weights
            raise UserError(f"distil.teacher: {source.name}: {said}") from None
        module = giving_logits(module, ending_of(module.eval(), _images(context, own)))
        return Teacher(source.name, digest, module, own.mean, own.std)

    architecture = architecture_of(source, context.width, context.preprocessing)
    digest = _digest(make_key(source=architecture, weights=[checkpoint.sha256, checkpoint.place]), own)
    return Teaching(digest, build)


def _check_order(checkpoint: Checkpoint, source: ModelSource, context: Context) -> None:
    """Refuse a teacher whose checkpoint states the student's classes in another order."""
    data = context.data
    for place, names in checkpoint.classes.items():
        known = next((own for own in (data.order or data.classes, data.classes) if set(own) == set(names)), names)
        if tuple(known) != names:
            raise UserError(
                f"distil.teacher: {source.name} has the same classes as the student in another order ({place!r} of "
                f"its checkpoint: {', '.join(names[:3])} …); give the student that order: --class-order FILE"
            )


def _weights(given: TeacherModel | nn.Module) -> tuple[ModelSource, Checkpoint, Path]:
    if isinstance(given, nn.Module):
        source, checkpoint = module_source(given)
        return source, checkpoint, Path(source.name)
    source = resolve_model(given.model)
    if given.weights is not None:
        source, checkpoint = with_named_weights(source, given.weights)
        return source, checkpoint, Path(f"torchvision's {given.weights}")
    assert given.checkpoint is not None
    checkpoint = read_checkpoint(
        given.checkpoint, trust_pickle=given.trust_checkpoint, weights_key=given.weights_key, home=source.home
    )
    return with_checkpoint(source, checkpoint), checkpoint, given.checkpoint


def _normalised(source: ModelSource, context: Context) -> Preprocessing:
    """Return the student's preprocessing with the teacher's mean and std, if it declares them for these channels."""
    ours, own = context.preprocessing, source.preprocessing
    if own is None or {"mean", "std"} & source.undeclared or own.channels != ours.channels:
        return ours
    return dataclasses.replace(ours, mean=own.mean, std=own.std)


def _images(context: Context, own: Preprocessing) -> torch.Tensor:
    """Return real images as a teacher takes them, ``float32 (N, C, H, W)``."""
    return normalise(context.pixels(_EXAMPLES), own, torch.device("cpu"), torch.float32)


def _digest(network: str, preprocessing: Preprocessing) -> str:
    return make_key(network=network, mean=preprocessing.mean, std=preprocessing.std)
