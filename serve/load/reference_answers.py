"""Computes the known answers of a workload in process, by the same code that serves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from serve.load.workload import Item, Known, Workload
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.errors import EngineError, Refusal
from serve.runtime.service.execution_chain import NO_GPU, first_working
from serve.runtime.service.predictor import PassedOver, Predictor

_KINDS = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG": "image/png"}


def opened(folder: Path, serving: Serving) -> Predictor:
    """Open an artifact as a server on this CPU does: the first execution that works, and the decoder.

    Raises:
        CardError: a file does not match the card.
        EngineError: no execution works.
    """

    def on_cpu(execution: Execution, passed: tuple[PassedOver, ...]) -> Predictor:
        if execution.device_type != "cpu":
            raise EngineError(NO_GPU)
        return Predictor(folder, execution, max_batch=1, budget=serving.allowance, passed_over=passed)

    return first_working(folder.name, serving, on_cpu)


def known_answers(predictor: Predictor, images: Iterable[bytes]) -> list[Known]:
    """Return the whole answer for each image alone, or the refusal's status."""
    task = predictor.task
    options = task.options(task.complete)
    found = []
    for image in images:
        (outcome,) = predictor.predict([image], options)
        refused = isinstance(outcome, Refusal)
        found.append(Known(status=outcome.status) if refused else Known(json.loads(task.json(outcome))))
    return found


def items(predictor: Predictor, images: Sequence[tuple[str, bytes]], weight: float = 1.0) -> tuple[Item, ...]:
    """Return requests of one image each, by name, with their known answers."""
    known = known_answers(predictor, (image for _, image in images))
    return tuple(
        Item(name, image, _content_type(image), (answer,), weight=weight)
        for (name, image), answer in zip(images, known, strict=True)
    )


def workload(predictor: Predictor, sent: Sequence[Item], serving: Serving) -> Workload:
    """Return requests as a workload for an artifact that is served so."""
    return Workload(tuple(sent), predictor.task.name, tolerance(serving.executions))


def tolerance(executions: Sequence[Execution]) -> float:
    """Return how far a served probability may be from the known one, because engines and batch sizes round differently.

    For ResNet-18's int8 graph the difference was at most 0.054 between ONNX Runtime 1.31 and OpenVINO 2026.4 over 40
    photographs. In each of them, batches of 1 and of 8 gave the same.
    """
    return 0.1 if len({execution.engine for execution in executions}) > 1 else 0.05


def _content_type(image: bytes) -> str:
    return next((kind for start, kind in _KINDS.items() if image.startswith(start)), "application/octet-stream")
