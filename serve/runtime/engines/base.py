"""The interface of engines: which artifacts they accept, how they open and run them. Also their registry.

An engine is one file of this package. The registry finds it there, and the archive packs it. The keys cover its source,
and the machine's versions list the libraries that it declares. An engine reports what really runs. If the wanted
provider is not active, it raises an error and never falls back silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from ..card.card import Card
from ..card.execution import Execution, Option
from ..device.buckets import StaticBatches
from ..device.cpu_integers import ANY_X86, VNNI_X86, saturates
from ..errors import EngineError, UserError, did_you_mean, one_line
from ..outputs import Outputs
from ..registry import Registry


class Engine(Protocol):
    """An opened model file. `EngineType` says whether only the thread that opened it may call it.

    ``run`` maps the network's input, ``(N, C, H, W)`` of the card's input dtype on ``device``, to its outputs, in the
    order of the card's ``outputs``. ``provider`` names what really runs it.
    """

    device: torch.device
    provider: str

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        ...


@dataclass(frozen=True)
class EngineOption:
    """One of an engine's own options: its default, which also gives its type, and its meaning."""

    default: Option
    description: str


def _accepts_all(card: Card) -> str | None:
    return None


@dataclass(frozen=True)
class EngineType:
    """One registered engine.

    Attributes:
        name: the name in recipes, archives and reports.
        formats: formats of model files that it opens. Other engines may open the same.
        open: opens a card's verified model file in a folder, for an execution.
        probe: opens a session on a device (``cpu``, ``cuda``) and runs it. It raises whatever fails, because a listed
            provider proves nothing.
        devices: where it runs, the usual device first.
        rank: order of preference without measurements, lowest first.
        accepts: returns why it cannot run an artifact of one of its formats. None: it can.
        targets: the integers that it computes exactly, if the processor does too; see `cpu_integers`.
        computes_with_torch: whether it uses torch's threads. If not, torch gets one thread in the engine's process.
        any_thread: whether different threads may run it on the CPU, one at a time. It then has no thread-bound state
            and no threads for each caller.
        options: its own options by name.
        libraries: distributions that it needs, besides torch.
        on_request: devices on which it runs only if it is named, because opening takes long.
        companions: endings of files that may belong to a model file of these formats.
        keeps_buckets: whether it handles an execution's buckets itself. If not, it gets padded batches.
    """

    name: str
    formats: tuple[str, ...]
    open: Callable[[Path, Card, Execution], Engine]
    probe: Callable[[torch.device], object]
    devices: tuple[str, ...] = ("cpu",)
    rank: int = 50
    accepts: Callable[[Card], str | None] = _accepts_all
    targets: tuple[str, ...] = (ANY_X86, VNNI_X86)
    computes_with_torch: bool = True
    any_thread: bool = False
    options: Mapping[str, EngineOption] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    on_request: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    keeps_buckets: bool = False

    @property
    def module(self) -> str:
        """The engine's module. An archive packs it and a key covers it."""
        return self.open.__module__

    def refuses(self, card: Card, device: str) -> str | None:
        """Return why this engine cannot run an artifact on a device (``cpu``, ``cuda``) here. None: it can."""
        return self.never_runs(card, device) or saturates(card.target)

    def never_runs(self, card: Card, device: str) -> str | None:
        """Return why this engine can run an artifact on a device of no machine. None: it can on some."""
        if card.format not in self.formats:
            return f"{self.name} opens {' and '.join(self.formats)} files, not {card.format}"
        if card.device not in ("any", device):
            return f"this artifact runs on {card.device} only, not on {device}"
        if device not in self.devices:
            return f"{self.name} runs on {' and '.join(self.devices)}, not on {device}"
        if card.target is not None and card.target not in self.targets:
            return f"{self.name} computes integers built for {' and '.join(self.targets)}, not for {card.target}"
        return self.accepts(card)

    def settings(self, options: Mapping[str, Option]) -> dict[str, Any]:
        """Return all options: the given ones, and defaults for the others.

        Raises:
            UserError: an option is unknown or of another type.
        """
        for name, value in options.items():
            if name not in self.options:
                known = f"; known: {', '.join(self.options)}" if self.options else ": it has none"
                raise UserError(f"{self.name} has no option {name!r}{did_you_mean(name, self.options)}{known}")
            wanted = type(self.options[name].default)
            if type(value) is not wanted and not (wanted is float and type(value) is int):
                raise UserError(f"{self.name}: option {name} must be of type {wanted.__name__}, found {value!r}")
        return {name: options.get(name, option.default) for name, option in self.options.items()}


_REGISTRY: Registry[EngineType] = Registry("engine", package=__package__, group="serve.engines", may_lack=True)


def register(entry: EngineType) -> EngineType:
    """Add an engine to the registry.

    Raises:
        ValueError: the name is taken, or the engine has no formats or no devices.
    """
    if not entry.formats:
        raise ValueError(f"the engine {entry.name!r} must list the formats that it opens")
    if not entry.devices or not set(entry.devices) <= {"cpu", "cuda"}:
        raise ValueError(f"the engine {entry.name!r} must list its devices: cpu, cuda or both")
    return _REGISTRY.register(entry)


def engines() -> dict[str, EngineType]:
    """Return all engines by name."""
    return _REGISTRY.all()


def find_engine(name: str) -> EngineType:
    """Return the engine called ``name``.

    Raises:
        UserError: there is none. The message names the closest and lists all.
    """
    return _REGISTRY.find(name)


def engines_for(card: Card) -> list[EngineType]:
    """Return the engines that run an artifact on this or another machine, the preferred one first.

    Raises:
        EngineError: there is none for its format.
    """
    known = engines().values()
    found = [entry for entry in known if any(entry.never_runs(card, device) is None for device in entry.devices)]
    if not found:
        formats = sorted({format_ for entry in known for format_ in entry.formats})
        raise EngineError(
            f"{card.name}: no installed engine opens {card.format!r} files; there are engines for {', '.join(formats)}"
        )
    return sorted(found, key=lambda entry: (entry.rank, entry.name))


def executions_for(card: Card, device: str = "cpu") -> list[Execution]:
    """Return every execution of an artifact on a device here with default settings, the preferred one first.

    Args:
        card: the artifact's card.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        EngineError: no engine opens its format.
    """
    kind = device.partition(":")[0]
    return [
        Execution(entry.name, device)
        for entry in engines_for(card)
        if entry.refuses(card, kind) is None and kind not in entry.on_request
    ]


def chain_for(card: Card) -> tuple[Execution, ...]:
    """Return every execution of an artifact on any machine with default settings, those for CUDA first.

    Raises:
        EngineError: no engine opens its format.
    """
    return tuple(
        Execution(entry.name, device)
        for device in ("cuda", "cpu")
        for entry in engines_for(card)
        if entry.never_runs(card, device) is None and device not in entry.on_request
    )


def preferred(card: Card, device: str) -> Execution:
    """Return the first execution of an artifact on a device that works on this machine.

    Args:
        card: the artifact's card.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        EngineError: there is none. The message names each engine that does not work, with the reason.
    """
    reasons = []
    for execution in executions_for(card, device):
        reason = unavailable(execution.engine, execution.device_type)
        if reason is None:
            return execution
        reasons.append(reason)
    if not reasons:
        entries = engines_for(card)
        kind = device.partition(":")[0]
        reasons = list(dict.fromkeys(reason for entry in entries if (reason := entry.refuses(card, kind)) is not None))
    raise EngineError(f"{card.name}: {'; '.join(reasons)}")


def execution_id(execution: Execution) -> str:
    """Return a name for an execution: its engine, and in brackets all settings that differ from the engine's defaults.

    ``openvino``, ``exported[cuda]``, ``onnxruntime[threads=1]``.
    """
    usual = find_engine(execution.engine)
    said = [] if execution.device == usual.devices[0] else [execution.device]
    said += [f"threads={execution.threads}"] if execution.threads is not None else []
    said += [f"buckets={'+'.join(map(str, execution.buckets))}"] if execution.buckets else []
    said += [f"{name}={value}" for name, value in sorted(execution.options.items())]
    return execution.engine + (f"[{','.join(said)}]" if said else "")


def pair_id(artifact: str, execution: Execution) -> str:
    """Return the name of an artifact with its execution, for recipes, reports and archives: ``onnx-int8@openvino``."""
    return f"{artifact}@{execution_id(execution)}"


@functools.cache
def unavailable(engine: str, device: str) -> str | None:
    """Return why an engine does not work on a device (``cpu``, ``cuda``) here. None: its probe ran.

    It is probed once for each process.
    """
    entry = find_engine(engine)
    if device not in entry.devices:
        return f"{entry.name} runs on {' and '.join(entry.devices)}, not on {device}"
    if device == "cuda" and not torch.cuda.is_available():
        return "this machine has no usable CUDA device"
    try:
        entry.probe(torch.device(device))
    except Exception as error:  # noqa: BLE001 - an incomplete library may fail in any way
        said = str(error) if isinstance(error, EngineError) else one_line(error)
        return f"{entry.name} does not run here: {said}"
    return None


def open_engine(folder: Path, card: Card, execution: Execution) -> Engine:
    """Open the card's model file.

    Args:
        folder: the artifact's folder.
        card: its card, already verified.
        execution: how to run it.

    Raises:
        UserError: there is no such engine, or it has no such option.
        EngineError: the engine cannot run this artifact on that device, or a provider is not active.
    """
    entry = find_engine(execution.engine)
    entry.settings(execution.options)
    if (reason := entry.refuses(card, execution.device_type)) is not None:
        raise EngineError(f"{card.name}: {reason}")
    if execution.device_type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f"{card.name}: CUDA is requested, but this machine has no usable CUDA device")
    engine = entry.open(folder, card, execution)
    return _Bucketed(engine, card, execution.buckets) if execution.buckets and not entry.keeps_buckets else engine


class _Bucketed:
    """An engine for any batch, which gets only batches of a few sizes."""

    def __init__(self, engine: Engine, card: Card, buckets: tuple[int, ...]) -> None:
        self.device, self.provider = engine.device, engine.provider
        dtype: torch.dtype = getattr(torch, card.input_dtype)
        batches = StaticBatches(buckets, card.preprocessing.shape, dtype, engine.device)
        self._batches, self._compute = batches, lambda bucket: engine.run(batches.input(bucket))

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        return self._batches.run(batch, self._compute)
