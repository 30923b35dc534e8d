"""Finds the first of an archive's executions that works here, and the reasons why earlier ones do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ..card.card import read_card
from ..card.evidence import evidence_for
from ..card.execution import Execution, settle, unset
from ..card.serving import SERVING_FILE, Serving, read_serving
from ..decoders.base import CPU, open_decoder
from ..device.buckets import warm_sizes
from ..engines.base import execution_id, find_engine, unavailable
from ..errors import CardError, EngineError, PipelineError, RequestError, UserError, message_of
from ..tasks.base import open_task
from .predictor import PassedOver, Predictor

_LOG = logging.getLogger(__name__)
#: Why an execution for CUDA does not run without a GPU. It is not worth a report.
NO_GPU = "it needs a GPU, and none was assigned to this worker"


def open_served(folder: Path, gpu: int | None) -> tuple[Predictor, Serving]:
    """Open an unpacked archive as its ``serving.json`` says, and warm it up. The process must serve nothing else.

    The log names the execution that runs, and why preferred ones do not. A CUDA execution without a GPU is not
    reported.

    Args:
        folder: folder of the archive. Every file is checked against its card.
        gpu: index of the GPU assigned to this process. None: no GPU.

    Returns:
        The artifact, open and warm, and its serving settings.

    Raises:
        CardError: a file does not match the card, or there is no ``serving.json``.
        EngineError: no execution works here, or not the first and ``serving.json`` is strict. Each is named, with its
            reason.
    """
    card = read_card(folder)  # the files themselves are checked before one is opened
    serving = read_serving(folder)
    if serving is None:
        raise CardError(f"{folder}: there is no {SERVING_FILE}, which lists its engines; pack it again")
    try:
        open_task(card).options({}, serving)
    except RequestError as error:
        raise CardError(f"{folder / SERVING_FILE}: {error}") from None
    predictor = first_working(
        card.name, serving, lambda execution, passed: _open(folder, execution, gpu, serving, passed)
    )
    _log(predictor)
    return predictor, serving


def first_working(
    name: str, serving: Serving, opened: Callable[[Execution, tuple[PassedOver, ...]], Predictor]
) -> Predictor:
    """Return the first of an archive's executions that works, with the decoder of its ``serving.json``.

    Args:
        name: the artifact's name, for messages.
        serving: has the executions in order, and the decoder.
        opened: opens the artifact for an execution. It gets the executions that were passed over before.

    Raises:
        CardError: ``opened`` raised one: a file does not match the card.
        EngineError: no execution works here, or not the first and ``serving.json`` is strict. Each is named, with its
            reason.
    """
    passed: list[PassedOver] = []
    for execution in serving.executions:
        reported = tuple(entry for entry in passed if entry.reason != NO_GPU)
        try:
            predictor = opened(execution, reported)
        except CardError:
            raise
        except Exception as error:  # noqa: BLE001 - a library may fail in any way; the next may work
            passed.append(PassedOver(_execution_name(execution), message_of(error)))
        else:
            _add_decoder(predictor, serving)
            return predictor
        if serving.strict:
            break
    reasons = "; ".join(f"{entry.execution}: {entry.reason}" for entry in passed)
    rule = f" ({SERVING_FILE} is strict, so no other engine may run it)" if serving.strict else ""
    raise EngineError(f"{name}: its engine does not work here{rule}: {reasons}")


def _open(
    folder: Path, execution: Execution, gpu: int | None, serving: Serving, passed: tuple[PassedOver, ...]
) -> Predictor:
    """Return the artifact, open and warm.

    Raises:
        EngineError: the engine does not work here, or does not run this file.
        Exception: whatever its library raises.
    """
    if execution.device_type == "cuda":
        if gpu is None:
            raise EngineError(NO_GPU)
        execution = replace(execution, device=f"cuda:{gpu}")
        if torch.cuda.is_available():
            torch.cuda.set_device(gpu)
    if (reason := unavailable(execution.engine, execution.device_type)) is not None:
        raise EngineError(reason)
    # Before anything runs. Else the threads of a previously tried engine would stay.
    settle(execution, computes_with_torch=find_engine(execution.engine).computes_with_torch)
    predictor = Predictor(
        folder,
        execution,
        max_batch=serving.batch_size,
        budget=serving.allowance,
        passed_over=passed,
        serving=serving,
    )
    predictor.accuracy = evidence_for(serving.evidence, execution)
    predictor.warm_up(warm_sizes(execution.buckets, serving.batch_size), repeats=2)
    return predictor


def _add_decoder(predictor: Predictor, serving: Serving) -> None:
    """Open the decoder of ``serving``. If it does not work, the runtime's own decoder is used.

    Raises:
        EngineError: the decoder does not work, and ``serving.json`` is strict.
    """
    try:
        predictor.decoder = open_decoder(serving.decoder, predictor.device)
    except (EngineError, UserError) as error:
        if serving.strict:
            raise EngineError(
                f"{predictor.card.name}: {error} ({SERVING_FILE} is strict, so no other engine may run it)"
            ) from None
        predictor.passed_over = (*predictor.passed_over, PassedOver(f"decoder {serving.decoder}", str(error)))


def _execution_name(execution: Execution) -> str:
    """Return the name of an execution, even if its engine is not installed."""
    try:
        return execution_id(execution)
    except PipelineError:
        return execution.engine


def _log(predictor: Predictor) -> None:
    facts = predictor.describe()
    _LOG.info(
        "%s: runs with %s (%s, threads: %d)",
        facts["artifact"],
        facts["execution"],
        facts["provider"],
        facts["threads"],
    )
    if facts["decoder"] != CPU:
        _LOG.warning(
            "%s: images are decoded by %s; its accuracy was measured with another decoder, so pixels differ",
            facts["artifact"],
            facts["decoder"],
        )
    engine = find_engine(predictor.execution.engine)
    if (missing := unset(predictor.execution, computes_with_torch=engine.computes_with_torch)) is not None:
        _LOG.warning("%s: %s", facts["artifact"], missing)
    for entry in predictor.passed_over:
        _LOG.warning("%s: passed over %s: %s", facts["artifact"], entry.execution, entry.reason)
