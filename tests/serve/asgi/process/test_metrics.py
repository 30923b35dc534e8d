"""What our own server tells Prometheus, scraped from it while it runs; and the dashboard that asks for it."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import tritonclient.grpc as triton
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from examples import grafana_dashboard
from serve.runtime.service.stages import STAGES
from serve.torchserve.configuration import metrics_yaml
from tests.serve import artifacts
from tests.serve.own_server import PASSED_OVER, Running, bearer

ROOT = Path(__file__).parents[4]
OBSERVABILITY = ROOT / "docs" / "explanations" / "observability.md"
SMALL = {"model": "small", "version": "1.0"}


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.families = list(parse_text(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels, and maybe others."""
        return sum(
            entry.value for entry in self.samples if entry.name == name and labels.items() <= entry.labels.items()
        )

    def labels(self, name: str, **labels: str) -> dict[str, str]:
        """All labels of the one sample that has these."""
        (found,) = [
            entry.labels for entry in self.samples if entry.name == name and labels.items() <= entry.labels.items()
        ]
        return found


@pytest.fixture(scope="module")
def client(own_server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{own_server.http}", headers=bearer()) as client:
        yield client


def scrape(client: httpx.Client) -> Scrape:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape(answer.text)


def ask(client: httpx.Client, images: list[bytes], model: str = "small") -> httpx.Response:
    instances = [base64.b64encode(image).decode() for image in images]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(images)], "data": instances}
    return client.post(f"/v2/models/{model}/versions/1.0/infer", json={"inputs": [tensor]})


def test_a_stranger_does_not_read_the_metrics(own_server: Running) -> None:
    assert httpx.get(f"http://{own_server.http}/metrics").status_code == 401


def test_each_request_is_counted_once_with_its_stages(client: httpx.Client) -> None:
    before = scrape(client)
    answers = [ask(client, [artifacts.jpeg(seed), artifacts.jpeg(seed + 1)]) for seed in range(3)]
    after = scrape(client)

    def more(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    route = "/v2/models/{name}/versions/{version}/infer"
    assert more("serve_requests_total", route=route, status="200", **SMALL) == 3
    assert more("serve_request_seconds_count", route=route, **SMALL) == 3
    assert more("serve_images_total", **SMALL) == 6
    assert more("serve_batch_images_count", **SMALL) == 3
    assert 3 <= more("serve_batch_images_sum", **SMALL) <= 6
    for stage in STAGES:
        assert more("serve_stage_seconds_count", stage=stage, **SMALL) == 3
        told = sum(float(re.findall(rf"{stage};dur=([0-9.]+)", entry.headers["server-timing"])[0]) for entry in answers)
        assert more("serve_stage_seconds_sum", stage=stage, **SMALL) == pytest.approx(told / 1e3, abs=3 * 0.000_006)


def test_a_refusal_is_counted_by_its_kind_and_an_unknown_model_by_no_name(client: httpx.Client) -> None:
    before = scrape(client)
    assert ask(client, [b"no image", artifacts.jpeg()]).status_code == 415
    assert client.post("/v2/models/small/versions/1.0/infer", content=b"{").status_code == 400
    assert ask(client, [artifacts.jpeg()], model="what-nobody-serves").status_code == 404
    after = scrape(client)
    for kind, labels in (("item-415", SMALL), ("bad-request", SMALL), ("unknown-model", {"model": "", "version": ""})):
        assert after.value("serve_refusals_total", kind=kind, **labels) == 1 + before.value(
            "serve_refusals_total", kind=kind, **labels
        )
    assert not [sample for sample in after.samples if "what-nobody-serves" in str(sample.labels)]


def test_what_really_runs_is_told(client: httpx.Client, own_server: Running) -> None:
    found = scrape(client)
    told = found.labels("serve_model_info", **SMALL)
    assert told["provider"] == own_server.predictor.engine.provider
    assert (told["device"], told["execution"], told["threads"]) == ("cpu", "onnxruntime[threads=1]", "1")
    assert told["content"] == own_server.predictor.card.content
    passed = found.labels("serve_passed_over", model="narrow")
    assert (passed["execution"], passed["reason"]) == (PASSED_OVER.execution, PASSED_OVER.reason)
    assert found.value("serve_ready") == 1
    assert found.value("serve_model_ready", **SMALL) == 1
    assert found.value("serve_queue_requests") == 0
    assert found.value("serve_queue_limit", **SMALL) == 64
    assert found.value("serve_requests_in_flight") == 1  # the scrape
    assert found.value("process_resident_memory_bytes") > 1e7


def test_grpc_is_observed_too(client: httpx.Client, own_server: Running) -> None:
    before = scrape(client).value("serve_requests_total", route="grpc/ServerLive", status="200")
    with triton.InferenceServerClient(own_server.grpc) as remote:
        assert remote.is_server_live()
    assert scrape(client).value("serve_requests_total", route="grpc/ServerLive", status="200") == before + 1


def test_openmetrics_are_given_to_who_asks_for_them(client: httpx.Client) -> None:
    answer = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert {"serve_requests", "serve_stage_seconds"} <= {family.name for family in parse_openmetrics(answer.text)}


def queries(document: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]


def selectors(query: str) -> list[Any]:
    """Every selector of a metric in a query, by Prometheus' own grammar."""
    found: list[Any] = []
    todo = [promql_parser.parse(query.replace("$__rate_interval", "1m"))]
    while todo:
        entry = todo.pop()
        if isinstance(entry, promql_parser.VectorSelector):
            found.append(entry)
        elif isinstance(entry, promql_parser.MatrixSelector):
            found.append(entry.vector_selector)
        else:
            for name in ("expr", "lhs", "rhs"):
                if (child := getattr(entry, name, None)) is not None:
                    todo.append(child)
            todo += list(getattr(entry, "args", None) or ())
    return found


def grouped_by(query: str) -> set[str]:
    return {label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", query) for label in labels.split(",")}


def test_a_version_that_is_no_number_is_answered_as_if_none_were_asked_for(client: httpx.Client) -> None:
    for kind in ("application/openmetrics-text", "text/plain"):
        answer = client.get("/metrics", headers={"accept": f"{kind}; version=latest"})
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")


def test_the_dashboard_is_the_one_that_is_written_by_its_maker() -> None:
    assert (ROOT / "docs" / "guides" / "grafana-dashboard.json").read_text() == grafana_dashboard.text()


def test_every_metric_and_label_of_the_dashboard_is_in_a_scrape(client: httpx.Client) -> None:
    assert ask(client, [b"no image"]).status_code == 415
    assert ask(client, [artifacts.jpeg()]).status_code == 200
    found = scrape(client)
    labels: dict[str, set[str]] = {}
    for sample in found.samples:
        labels.setdefault(sample.name, {"instance"}).update(sample.labels)  # Prometheus adds the instance
    document = json.loads((ROOT / "docs" / "guides" / "grafana-dashboard.json").read_text())
    asked = set()
    for query in queries(document):
        names = selectors(query)
        assert names, query
        for selector in names:
            assert selector.name in labels, f"{selector.name} of {query!r} is in no scrape"
            asked.add(selector.name)
            matched = {matcher.name for matcher in selector.matchers.matchers}
            assert matched | grouped_by(query) <= labels[selector.name], query
    assert {f"serve_stage_seconds_{part}" for part in ("sum", "count", "bucket")} <= asked
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
            assert label in labels[metric]
    ours = {family.name for family in found.families if family.name.startswith("serve_")}
    unseen = {name for name in ours if not any(entry.startswith(name) for entry in asked)}
    assert unseen <= {"serve_ready", "serve_model_weight", "serve_held_limit_bytes"}


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads((ROOT / "docs" / "guides" / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for one, other in itertools.combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    assert all(place["x"] + place["w"] <= 24 for place in places)


def table(part: str) -> dict[str, list[str]]:
    """The cells of a table of the documentation by its first column."""
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    section = text.partition(f"<!-- {part}: begin -->")[2].partition(f"<!-- {part}: end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.strip().splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_documentation_names_every_metric_with_its_type_and_labels(client: httpx.Client) -> None:
    assert ask(client, [b"no image"]).status_code == 415
    assert ask(client, [artifacts.jpeg()]).status_code == 200
    found = {}
    for family in scrape(client).families:
        if family.name.startswith("serve_"):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = (family.type, labels)
    told = {name: (cells[0], set(re.findall(r"`(\w+)`", cells[1]))) for name, cells in table("own server").items()}
    assert told == found


def test_the_documentation_names_every_metric_of_the_handler_with_its_type() -> None:
    configured = yaml.safe_load(metrics_yaml())["model_metrics"]
    ours = {
        entry["name"]: kind
        for kind, entries in configured.items()
        for entry in entries
        if "Execution" in entry["dimensions"]
    }
    assert {name: cells[0] for name, cells in table("torchserve").items()} == ours


def test_every_query_of_the_documentation_is_promql_over_metrics_that_there_are(client: httpx.Client) -> None:
    names = {sample.name for sample in scrape(client).samples}
    text = OBSERVABILITY.read_text().partition("## Queries")[2].partition("##")[0]
    found = [match[1] for match in re.finditer(r"\| `(.+)` \|$", text, re.MULTILINE)]
    assert len(found) == 7
    for query in found:
        assert {selector.name for selector in selectors(query)} <= names, query
