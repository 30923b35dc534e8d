"""Chooses the executions of an artifact to measure: all that can run it, or those that the user names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from serve.runtime.card.card import Card
from serve.runtime.card.execution import Execution
from serve.runtime.device.cpu_integers import saturates
from serve.runtime.engines.base import execution_id, executions_for, find_engine
from serve.runtime.errors import EngineError, UserError

#: The name of an engine, which stands for its default settings on every measured device, or one execution.
Wanted = str | Execution


def check_wanted(wanted: Iterable[Wanted]) -> None:
    """Check that the engines of this machine can understand these names and executions.

    Raises:
        UserError: the engine does not exist, lacks the option, or does not run on that device.
    """
    for entry in wanted:
        engine = find_engine(entry if isinstance(entry, str) else entry.engine)
        if isinstance(entry, Execution):
            engine.settings(entry.options)
            if entry.device_type not in engine.devices:
                raise UserError(f"{engine.name} runs on {' and '.join(engine.devices)}, not on {entry.device}")


def wanted_executions(
    card: Card, devices: Sequence[str], wanted: Sequence[Wanted] | None, *, needed: bool
) -> list[Execution]:
    """Return the executions to measure an artifact with, the preferred one first.

    Args:
        card: the artifact's card.
        devices: where to measure.
        wanted: the executions that the user names. None takes all with their default settings.
        needed: whether there must be one, even if none of those named can run the artifact.

    Raises:
        EngineError: there is none. The message is the reason.
    """
    usual = [execution for device in devices for execution in executions_for(card, device)]
    if not usual:
        raise EngineError(_nowhere(card, devices))
    if wanted is None:
        return usual
    chosen: list[Execution] = []
    for entry in wanted:
        if isinstance(entry, str):
            chosen += [execution for execution in usual if execution.engine == entry]
        elif entry.device in devices and find_engine(entry.engine).refuses(card, entry.device_type) is None:
            chosen.append(entry)
    if not chosen and not needed:
        said = ", ".join(entry if isinstance(entry, str) else execution_id(entry) for entry in wanted)
        raise EngineError(f"none of the chosen executions can run it: {said}")
    chosen = chosen or usual[:1]
    return [each for number, each in enumerate(chosen) if each not in chosen[:number]]


def _nowhere(card: Card, devices: Sequence[str]) -> str:
    """Say why an artifact cannot be measured on any of the devices."""
    here = ", ".join(devices)
    if "cpu" in devices and (reason := saturates(card.target)) is not None:
        return reason
    if card.device == "cuda":
        lack = "this machine has no CUDA device"
        return f"runs on CUDA only, and {'is measured with MEASURE=cuda' if torch.cuda.is_available() else lack}"
    if card.device == "cpu":
        return f"runs on the CPU only, and this is measured on {here}; measure it with MEASURE=cpu"
    return f"no engine runs {card.format} files on {here}"
