"""The server's metrics for Prometheus: counters and histograms of requests, and gauges read at a scrape."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve.asgi.http.messages import Response
from serve.runtime.service.stages import STAGE_BUCKETS, STAGES

if TYPE_CHECKING:
    from serve.asgi.http.application import Application
    from serve.asgi.http.call import Call
    from serve.asgi.http.served_models import Served
    from serve.asgi.process.metrics_exchange import MetricsExchange
    from serve.runtime.service.observation import Observation

#: Seconds, for whole requests.
REQUEST_BUCKETS: Final = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 15.0, 30.0),
)

BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128)

_MODEL = ("model", "version")
_Metric = TypeVar("_Metric", Counter, Histogram)
_LONGEST_REASON = 200  # characters of a reason in a label


class Metrics:
    """The metrics of one application. They are updated in its event loop.

    Args:
        application: the observed application. ``GET /metrics`` is added to it.
        siblings: the other processes of the same server, whose metrics are included. None: there are none.
    """

    def __init__(self, application: Application, siblings: MetricsExchange | None = None) -> None:
        # Else each counter and histogram has an extra series with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(_CurrentState(application))
        self._children: dict[tuple[object, ...], Any] = {}
        self._requests = self._counter("serve_requests", "Finished requests", "route", *_MODEL, "status")
        self._images = self._counter("serve_images", "Images of finished requests", *_MODEL)
        self._refusals = self._counter("serve_refusals", "Refused requests and images", *_MODEL, "kind")
        self._seconds = self._histogram(
            "serve_request_seconds",
            "Time from the headers of a request to its answer",
            REQUEST_BUCKETS,
            "route",
            *_MODEL,
        )
        self._stages = self._histogram(
            "serve_stage_seconds", "Time that an answered request spent in each stage", STAGE_BUCKETS, *_MODEL, "stage"
        )
        self._batches = self._histogram(
            "serve_batch_images", "Images in the batch that a request was part of", BATCH_BUCKETS, *_MODEL
        )
        application.observers.append(self.observe)
        application.router.add("GET", "/metrics", self.answer)
        self._siblings = siblings
        if siblings is not None:
            application.on_start.append(functools.partial(siblings.listen, self.registry.collect))
            application.on_stop.append(siblings.close)

    def observe(self, observation: Observation) -> None:
        """Count a finished request."""
        route, model, version = observation.route, observation.model or "", observation.version or ""
        self._child(self._requests, route, model, version, str(observation.status)).inc()
        self._child(self._seconds, route, model, version).observe(observation.seconds)
        for kind in observation.refusals:
            self._child(self._refusals, model, version, kind).inc()
        if observation.images:
            self._child(self._images, model, version).inc(observation.images)
        if observation.stages is not None:
            for stage in STAGES:
                self._child(self._stages, model, version, stage).observe(getattr(observation.stages, stage) / 1e3)
            if observation.batch_size:
                self._child(self._batches, model, version).observe(observation.batch_size)

    async def answer(self, call: Call) -> Response:
        """Answer ``GET /metrics`` in the exposition format that the scraper asks for."""
        try:
            encode, content_type = choose_encoder(call.headers.get("accept", ""))
        except TypeError:  # prometheus_client 0.26 raises for a version that is not a number
            encode, content_type = choose_encoder("")
        collected: _CollectedMetrics | CollectorRegistry = self.registry
        if self._siblings is not None:
            collected = _CollectedMetrics(await self._siblings.gather(self.registry.collect()))
        return Response(200, encode(collected), content_type)

    def _child(self, metric: _Metric, *values: str) -> _Metric:
        """Return the series of these labels. It is looked up only once: that is most of the cost of counting."""
        child = self._children.get((metric, *values))
        if child is None:
            child = self._children[metric, *values] = metric.labels(*values)
        return child

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(name, description, labels, registry=self.registry)

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, description, labels, buckets=buckets, registry=self.registry)


class _CollectedMetrics(Collector):
    """Metrics that are collected already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        """Return the collected metrics."""
        return self._metrics


class _CurrentState(Collector):
    """Gauges, read from the application at each scrape."""

    def __init__(self, application: Application) -> None:
        self._application = application

    def collect(self) -> Iterator[Metric]:
        """Yield each metric, with a value for each version of each model."""
        ready = GaugeMetricFamily("serve_ready", "1 if the server is ready for requests")
        ready.add_metric((), float(self._application.unready is None))
        yield ready
        for name, description, amount in (
            ("serve_requests_in_flight", "Requests that are being received or answered", self._application.in_flight),
            ("serve_held_bytes", "Bytes of the bodies of requests in flight", self._application.held.bytes),
            (
                "serve_held_limit_bytes",
                "Limit of these bytes; the server refuses requests beyond it",
                self._application.held.limit,
            ),
        ):
            yield GaugeMetricFamily(name, description, value=amount)
        served = list(self._application.models)
        for name, description, value in (
            ("serve_queue_requests", "Requests that a model has accepted and not yet answered", _waiting),
            ("serve_queue_limit", "Limit of these requests; the server refuses more", _limit),
            ("serve_model_ready", "1 if the model is ready", lambda entry: float(entry.ready)),
            (
                "serve_model_weight",
                "Share of the requests that do not name a version",
                lambda entry: float(entry.weight),
            ),
        ):
            family = GaugeMetricFamily(name, description, labels=_MODEL)
            for entry in served:
                family.add_metric((entry.name, entry.version), value(entry))
            yield family
        yield _info_metric(served)
        yield _passed_over_metric(served)


def _info_metric(served: list[Served]) -> Metric:
    labels = ("artifact", "format", "precision", "execution", "provider", "device", "threads", "max_batch", "content")
    family = GaugeMetricFamily(
        "serve_model_info", "The served artifact and the engine that runs it", labels=(*_MODEL, *labels)
    )
    for entry in served:
        description = entry.predictor.describe()
        family.add_metric((entry.name, entry.version, *(str(description[label]) for label in labels)), 1.0)
    return family


def _passed_over_metric(served: list[Served]) -> Metric:
    family = GaugeMetricFamily(
        "serve_passed_over",
        "A preferred execution that does not work here",
        labels=(*_MODEL, "execution", "reason"),
    )
    for entry in served:
        for passed in entry.predictor.passed_over:
            family.add_metric((entry.name, entry.version, passed.execution, passed.reason[:_LONGEST_REASON]), 1.0)
    return family


def _waiting(entry: Served) -> float:
    return float(entry.service.waiting)


def _limit(entry: Served) -> float:
    return float(getattr(entry.service, "queue_limit", 0))
