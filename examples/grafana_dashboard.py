"""Writes the Grafana dashboard of our own server.

``python -m examples.grafana_dashboard > docs/guides/grafana-dashboard.json``; Grafana takes it by *Dashboards*, *New*,
*Import*. It is built with Grafana's own library, whose types are Grafana's schema.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import LegendPlacement, StackingMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Query = tuple[str, str]  # PromQL, legend

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${source}")
OF = 'instance=~"$instance",model=~"$model"'
ALL = 'instance=~"$instance"'
HEIGHT = 8
WIDTH = 8  # of 24


def rate(metric: str, selector: str = OF) -> str:
    """A counter's growth by second."""
    return f"rate({metric}{{{selector}}}[$__rate_interval])"


def mean(histogram: str, by: str) -> str:
    """The mean of a histogram's values."""
    return f"sum by ({by}) ({rate(f'{histogram}_sum')}) / sum by ({by}) ({rate(f'{histogram}_count')})"


def quantile(q: float, histogram: str, by: str = "") -> str:
    """A quantile of a histogram's values, as exact as its buckets are."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q:g}, sum by ({labels}) ({rate(f'{histogram}_bucket')}))"


def target(query: str, legend: str, ref: str) -> prometheus.Dataquery:
    """One query of a panel."""
    return prometheus.Dataquery().expr(query).legend_format(legend).ref_id(ref).range()


def graph(
    title: str, unit: str, queries: Sequence[Query], description: str, *, stacked: bool = False
) -> timeseries.Panel:
    """Lines over time."""
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(SOURCE).min(0)
    panel = panel.legend(VizLegendOptions().show_legend(True).placement(LegendPlacement.BOTTOM))
    panel = panel.height(HEIGHT).span(WIDTH)
    if stacked:
        panel = panel.stacking(StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(30)
    for ref, (query, legend) in zip("ABCDEF", queries, strict=False):
        panel = panel.with_target(target(query, legend, ref))
    return panel


def number(title: str, query: str, legend: str, description: str) -> stat.Panel:
    """What is so now."""
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .height(HEIGHT)
        .span(WIDTH)
        .with_target(target(query, legend, "A"))
    )


def labels(title: str, query: str, description: str) -> table.Panel:
    """A metric whose labels are what it tells."""
    return (
        table.Panel()
        .show_header(True)
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .height(HEIGHT)
        .span(24)
        .with_target(prometheus.Dataquery().expr(query).ref_id("A").instant().format(PromQueryFormat.TABLE))
    )


def dashboard() -> model.Dashboard:
    """The whole dashboard."""
    variables = [
        build.DatasourceVariable("source").label("Prometheus").type("prometheus"),
        *(
            build.QueryVariable(name)
            .label(name)
            .datasource(SOURCE)
            .query(f"label_values({metric}, {name})")
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(model.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            for name, metric in (("instance", "serve_ready"), ("model", "serve_model_ready"))
        ),
    ]
    built = (
        build.Dashboard("optimize-and-serve")
        .uid("optimize-and-serve")
        .description("Our own server: traffic, where the time goes, what runs.")
        .tags(["serving"])
        .refresh("10s")
        .time("now-30m", "now")
        .editable()
        .variables(variables)
    )
    identifiers = itertools.count(1)
    for title, panels in rows():
        built = built.with_row(build.Row(title).id(next(identifiers)))
        for panel in panels:
            built = built.with_panel(panel.id(next(identifiers)))
    return built.build()


def rows() -> list[tuple[str, list[timeseries.Panel | stat.Panel | table.Panel]]]:
    """The panels by row."""
    return [
        (
            "Traffic",
            [
                graph(
                    "Requests",
                    "reqps",
                    [
                        (
                            f"sum by (model, version, status) ({rate('serve_requests_total')})",
                            "{{model}} {{version}} {{status}}",
                        )
                    ],
                    "Requests that were over, by HTTP status (gRPC's are told as the HTTP status that they stand for).",
                ),
                graph(
                    "Time of a request",
                    "s",
                    [(quantile(q, "serve_request_seconds"), f"p{100 * q:g}") for q in (0.5, 0.95, 0.99)],
                    "From the headers to the answer.",
                ),
                graph(
                    "Images",
                    "ops",
                    [(f"sum by (model, version) ({rate('serve_images_total')})", "{{model}} {{version}}")],
                    "Images of requests that were over.",
                ),
                graph(
                    "Refusals",
                    "ops",
                    [(f"sum by (kind) ({rate('serve_refusals_total', ALL)})", "{{kind}}")],
                    "By kind: queue-full and deadline are the server's load, item-415 and the like a client's image.",
                ),
                graph(
                    "Waiting",
                    "short",
                    [
                        (f"sum by (model, version) (serve_queue_requests{{{OF}}})", "{{model}} {{version}}"),
                        (f"min by (model, version) (serve_queue_limit{{{OF}}})", "limit of {{model}} {{version}}"),
                    ],
                    "Requests that a model's service has accepted and not answered; beyond the limit they are refused.",
                ),
                graph(
                    "In flight",
                    "short",
                    [(f"sum by (instance) (serve_requests_in_flight{{{ALL}}})", "{{instance}}")],
                    "Requests, also those whose bodies are still coming.",
                ),
            ],
        ),
        (
            "Where the time goes",
            [
                graph(
                    "Mean time by stage",
                    "s",
                    [(mean("serve_stage_seconds", "stage"), "{{stage}}")],
                    "Of one request. Queue is the time in which nothing of it was worked on.",
                    stacked=True,
                ),
                graph(
                    "p99 by stage",
                    "s",
                    [(quantile(0.99, "serve_stage_seconds", "stage"), "{{stage}}")],
                    "The stages' worst cases do not meet in one request: they do not add up.",
                ),
                graph(
                    "Batch",
                    "short",
                    [
                        (mean("serve_batch_images", "model, version"), "mean of {{model}} {{version}}"),
                        (quantile(0.95, "serve_batch_images"), "p95"),
                    ],
                    "Images that went through the network together, as a request met it.",
                ),
            ],
        ),
        (
            "The process",
            [
                number(
                    "Ready",
                    f"min by (model, version) (serve_model_ready{{{OF}}})",
                    "{{model}} {{version}}",
                    "1 if the model is ready.",
                ),
                graph(
                    "Processor",
                    "short",
                    [(f"sum by (instance) ({rate('process_cpu_seconds_total', ALL)})", "{{instance}}")],
                    "Cores in use.",
                ),
                graph(
                    "Memory",
                    "bytes",
                    [
                        (f"sum by (instance) (process_resident_memory_bytes{{{ALL}}})", "resident in {{instance}}"),
                        (f"sum by (instance) (serve_held_bytes{{{ALL}}})", "bodies in {{instance}}"),
                    ],
                    "Of the process, and of the bodies of requests among it.",
                ),
                labels(
                    "What runs",
                    f"serve_model_info{{{OF}}}",
                    "Artifact, execution, and the provider that is really active.",
                ),
                labels(
                    "Passed over",
                    f"serve_passed_over{{{OF}}}",
                    "Executions that the archive prefers and that do not work here, with the reason.",
                ),
            ],
        ),
    ]


def text() -> str:
    """The dashboard's file."""
    return str(JSONEncoder(sort_keys=True, indent=2).encode(dashboard())) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
