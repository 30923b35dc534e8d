"""The health of a running server, counted from each model's workers.

TorchServe 0.12 itself is no help. It answers 200 to ``/ping`` when it says ``Unhealthy``, counts workers that have only
been started, and its ``/v2/health/ready`` is always true.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from serve.torchserve.client import Client, ServerError
from serve.torchserve.state import RunningServer, ServedModel

HEALTHY: Final = "Healthy"
PARTIAL: Final = "Partial Healthy"
UNHEALTHY: Final = "Unhealthy"


@dataclass(frozen=True)
class ModelHealth:
    """The current health of a model.

    Attributes:
        model: the served model.
        ready: number of loaded workers.
        wanted: number of configured workers.
        told: the handler's description. Empty without a ready worker.
        fault: why its state is unknown. Empty: it is known.
    """

    model: ServedModel
    ready: int
    wanted: int
    told: dict[str, Any]
    fault: str = ""


@dataclass(frozen=True)
class Health:
    """The current health of a server."""

    server: RunningServer
    models: tuple[ModelHealth, ...]

    @property
    def reached(self) -> bool:
        """Whether it has answered at all."""
        return any(not model.fault for model in self.models)

    @property
    def healthy(self) -> bool:
        """Whether every model has a ready worker."""
        return all(model.ready for model in self.models)

    @property
    def word(self) -> str:
        """``Healthy`` (every model has all its workers), ``Unhealthy`` (one has none) or ``Partial Healthy``."""
        if not self.healthy:
            return UNHEALTHY
        return HEALTHY if all(model.ready >= model.wanted for model in self.models) else PARTIAL

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "status": self.word,
            "pid": self.server.pid,
            "address": self.server.address,
            "ports": asdict(self.server.ports),
            "default_model": self.server.default_model,
            "models": [
                {
                    **asdict(entry.model),
                    "workers": {"ready": entry.ready, "wanted": entry.wanted},
                    "told": entry.told,
                    "fault": entry.fault or None,
                }
                for entry in self.models
            ],
            "left_out": self.server.left_out,
        }

    def text(self) -> str:
        """Return the same for a person, as lines."""
        runs = f"run{'s' if len(self.server.runs) > 1 else ''} {', '.join(self.server.runs)}"
        lines = [f"{self.word}: {runs}, pid {self.server.pid}, {self.server.address}"]
        for entry in self.models:
            lines += _lines(entry, default=entry.model.name == self.server.default_model)
        lines += [f"  left out: {name} ({reason})" for name, reason in self.server.left_out.items()]
        return "\n".join(lines)


def look(server: RunningServer, client: Client) -> Health:
    """Query the health of each model of a server."""
    return Health(server, tuple(_look(model, client) for model in server.served))


def _look(model: ServedModel, client: Client) -> ModelHealth:
    try:
        record = client.registered(model.name, model.version)
    except ServerError as error:
        return ModelHealth(model, 0, 0, {}, str(error))
    ready = sum(worker["status"] == "READY" for worker in record["workers"])
    wanted = int(record["minWorkers"])
    try:
        description = client.describe(model.name, model.version) if ready else {}
    except ServerError as error:
        return ModelHealth(model, 0, wanted, {}, str(error))
    return ModelHealth(model, ready, wanted, description)


def _lines(entry: ModelHealth, *, default: bool) -> list[str]:
    facts, ending = entry.told, "  (default)" if default else ""
    if entry.fault:
        return [f"  {entry.model.name}: {entry.fault}{ending}"]
    executed = (
        f", {facts.get('precision', '?')} by {facts.get('execution', '?')} ({facts.get('provider', '?')}, "
        f"threads: {facts.get('threads', '?')})"
        if facts
        else ""
    )
    version = "" if entry.model.version == "1.0" else f", version {entry.model.version}"
    return [
        f"  {entry.model.name}: {entry.ready} of {entry.wanted} worker(s) ready{executed}{version}{ending}",
        *([f"    known answer not checked: {entry.model.unchecked}"] if entry.model.unchecked else []),
        *(f"    passed over {other['execution']}: {other['reason']}" for other in facts.get("passed_over", ())),
    ]
