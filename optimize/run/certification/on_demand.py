"""Certifies a run's INT8 artifact on demand: its parity certificate, and each of its layers."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import torch

from optimize.certify.layer_certification import check_layers, in_process
from optimize.certify.layer_findings import Engine
from optimize.data.class_order import in_recorded_order
from optimize.data.formats.base import open_data
from optimize.data.loading import loader
from optimize.data.records import ImageData, Split
from optimize.data.splits import subset
from optimize.listener import Listener
from optimize.measure import processes
from optimize.measure.key_inputs import surroundings
from optimize.report.finished_runs import report_of
from optimize.run.certification.parity_certificates import UNOPTIMIZED
from optimize.run.certification.subject import Subject
from optimize.run.identity import identity_of
from optimize.store.atomic_files import write_json
from optimize.store.keys import LayersKey, opening
from optimize.store.objects import Store
from serve.common import layout
from serve.runtime.card.card import Card, read_card
from serve.runtime.card.execution import Execution
from serve.runtime.device.cpu_integers import TENSORRT, saturates
from serve.runtime.engines.base import execution_id, find_engine
from serve.runtime.errors import PipelineError, UserError

_FILE = "layers.json"


def certify_layers(
    store: Path, certified: Subject, *, images: int, data: str | None = None, seed: int = 0, listener: Listener
) -> tuple[Engine, ...]:
    """Run each layer of an artifact alone, with every engine, on the integers of the reference.

    Each engine has its own process. The store keeps the findings for artifact, engine, libraries, processor and images.

    Args:
        store: the folder of the run.
        certified: the artifact.
        images: the number of validation images that the integers come from, drawn evenly from the classes.
        data: other images than the run's.
        seed: the run's seed, which its images may depend on. The run does not record it.
        listener: receives the progress.

    Raises:
        UserError: the run's images cannot be found, or are not those that it was measured on.
    """
    opened = Store(store)
    split = _of_run(store, certified.run, seed, listener) if data is None else _opened(data, seed, listener).val
    pixels = _pixels(split, certified.card, images)
    found = []
    with contextlib.closing(opened.hold()):
        for execution in _executions(certified.card):
            name = f"layers of {execution_id(execution)}"
            listener.started(name)
            engine, seconds, cached = _checked(opened, certified, execution, pixels)
            listener.ended(name, seconds, cached=cached, skipped=engine.reason)
            found.append(engine)
    return tuple(found)


def _executions(card: Card) -> tuple[Execution, ...]:
    """Return the executions that compute an artifact's layers on this machine."""
    if card.target == TENSORRT:  # no engine here does: ONNX Runtime without optimizations replaces it
        return (UNOPTIMIZED,)
    if card.format == "onnx":
        return (UNOPTIMIZED, Execution("onnxruntime"), Execution("openvino"))
    return (Execution("torchscript"),)


def _checked(
    store: Store, certified: Subject, execution: Execution, pixels: torch.Tensor
) -> tuple[Engine, float, bool]:
    """Return the findings about an engine, how many seconds they took, and whether they come from the store."""
    reason = saturates(certified.card.target)
    if reason is not None:
        return Engine(execution_id(execution), reason=reason), 0.0, False
    key = LayersKey(
        artifact=opening(certified.card),
        reference=certified.reference_sha256,
        execution=execution.to_json(),
        images=hashlib.sha256(pixels.numpy().tobytes()).hexdigest(),
        **surroundings(execution, makers=(check_layers, find_engine(execution.engine).open)),
    )

    def build(folder: Path) -> None:
        with processes.worker() as worker:
            body = worker.invoke(
                in_process,
                pixels,
                folder=str(certified.folder.resolve()),
                reference=str(certified.reference.resolve()),
                execution=execution.to_json(),
                shape=list(pixels.shape),
            )
        write_json(body, folder / _FILE)

    about = f"{certified.card.model} on {certified.card.data.get('name')}: layers"
    try:
        stored = store.obtain(key.digest, build, about=about)
    except UserError:
        raise
    except PipelineError as error:  # an engine that is not installed, or a graph that it rejects
        return Engine(execution_id(execution), reason=str(error)), 0.0, False
    found = Engine.from_json(json.loads((stored.folder / _FILE).read_text(encoding="utf-8")))
    return found, stored.seconds, stored.cached


def _of_run(store: Path, run: str, seed: int, listener: Listener) -> Split:
    """Return exactly the images that a run was measured on. With another seed some may be training images.

    Raises:
        UserError: they are not found, or differ.
    """
    identity = identity_of(store / run)
    if identity is None:
        raise UserError(f"{run} does not record its data; give it with --data")
    then = report_of(store, run).data
    card = read_card(layout.artifact_folder(store, run, report_of(store, run).baseline.name))
    split = in_recorded_order(_opened(identity.data, seed, listener), card.data).val
    if then.val_of is not None:
        split = subset(split, then.val, seed)
    if split.fingerprint != then.val_fingerprint:
        raise UserError(
            f"the validation images of {identity.data} are not those that {run} was measured on: they have "
            f"changed, or the run had a --seed different from {seed}; give the right seed, or other images with "
            "--data"
        )
    return split


def _opened(data: str, seed: int, listener: Listener) -> ImageData:
    return open_data(data, seed=seed, listener=listener, accept_gaps=True)


def _pixels(split: Split, card: Card, images: int) -> torch.Tensor:
    """Return images ``uint8 (images, C, H, W)`` of a split."""
    batches = loader(
        split,
        card.preprocessing,
        batch_size=images,
        device=torch.device("cpu"),
        limit=min(images, len(split)),
        skip_unreadable=1.0,
    )
    pixels, _ = next(iter(batches))
    return pixels
