"""A real Prometheus reads our own server and evaluates the queries of the dashboard and of the documentation."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import yaml

from serve.runtime.service.stages import STAGES
from serve.tune.servers import free_ports
from tests.serve import artifacts
from tests.serve.asgi.process.test_metrics import OBSERVABILITY, ROOT, ask
from tests.serve.own_server import TOKEN, Running, bearer

BINARY = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
EVERY_S = 0.2
WINDOW = "10s"

pytestmark = pytest.mark.skipif(BINARY is None, reason="no `prometheus` on the path, nor named by PROMETHEUS")


@dataclass
class Asked:
    """A Prometheus that has read a server while it was asked, and what that told of its stages, in s."""

    url: str
    told: dict[str, list[float]] = field(default_factory=dict)

    def get(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, trust_env=False)
        body = answer.json()
        assert body["status"] == "success", (params, body)
        return body["data"]

    def vector(self, query: str) -> list[tuple[dict[str, str], float]]:
        """The samples that a query gives now."""
        data = self.get("query", query=query)
        assert data["resultType"] == "vector"
        return [(entry["metric"], float(entry["value"][1])) for entry in data["result"]]


@pytest.fixture(scope="module")
def asked(own_server: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "token").write_text(TOKEN)
    # As the documentation says it, but for names and times.
    (block,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", OBSERVABILITY.read_text(), re.DOTALL)
    config = yaml.safe_load(block)
    (job,) = config["scrape_configs"]
    job["static_configs"][0]["targets"] = [own_server.http]
    job["authorization"]["credentials_file"] = str(folder / "token")
    config["global"] = {"scrape_interval": f"{EVERY_S * 1000:.0f}ms", "scrape_timeout": f"{EVERY_S * 1000:.0f}ms"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(BINARY), *words, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        found = Asked(f"http://127.0.0.1:{port}")

        def eventually(query: str) -> None:
            until = time.monotonic() + 30
            while True:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until, f"{query}: nothing\n{(folder / 'log').read_text()}"
                try:
                    if found.vector(query):
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)

        eventually("serve_ready == 1")
        with httpx.Client(base_url=f"http://{own_server.http}", headers=bearer(), trust_env=False) as client:
            for number in range(12):
                answers = [ask(client, [image]) for image in (artifacts.jpeg(number), b"no image")]
                assert [answer.status_code for answer in answers] == [200, 415]
                for header in (answer.headers.get("server-timing", "") for answer in answers):
                    for stage, ms in re.findall(r"(\w+);dur=([0-9.]+)", header):
                        found.told.setdefault(stage, []).append(float(ms) / 1e3)
                time.sleep(EVERY_S / 2)
        eventually('rate(serve_refusals_total{kind="item-415"}[5s]) > 0')
        time.sleep(2 * EVERY_S)
        yield found
    finally:
        process.terminate()
        process.wait(30)


def filled(query: str, asked: Asked, document: dict[str, Any]) -> str:
    """A panel's query with its variables, as Grafana fills them in where all of each are chosen."""
    query = query.replace("$__rate_interval", WINDOW)
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
            values = asked.get(f"label/{label}/values", **{"match[]": metric})
            assert values
            query = query.replace(f"${variable['name']}", "|".join(values))
    assert "$" not in query
    return query


def test_every_panel_of_the_dashboard_has_values(asked: Asked) -> None:
    document = json.loads((ROOT / "docs" / "guides" / "grafana-dashboard.json").read_text())
    shown = {
        (panel["title"], target["expr"]): asked.vector(filled(target["expr"], asked, document))
        for panel in document["panels"]
        for target in panel.get("targets", [])
    }
    assert len({title for title, _ in shown}) >= 12
    for (title, query), samples in shown.items():
        assert samples, f"{title}: {query} gives nothing"
        if "histogram_quantile" not in query and "/" not in query:
            assert all(math.isfinite(value) for _, value in samples), (title, samples)
        assert any(math.isfinite(value) for _, value in samples), (title, samples)

    def of(title: str) -> list[tuple[dict[str, str], float]]:
        return [sample for (panel, _), samples in shown.items() if panel == title for sample in samples]

    by_status = {labels["status"]: value for labels, value in of("Requests") if labels["model"] == "small"}
    assert by_status["200"] > 0
    assert by_status["415"] > 0
    means = {labels["stage"]: value for labels, value in of("Mean time by stage")}
    for stage in STAGES:
        told = asked.told[stage]  # rounded
        assert min(told) - 1e-5 <= means[stage] <= max(told) + 1e-5, stage
    assert {labels["model"] for labels, _ in of("Ready")} == {"small", "narrow"}
    assert {value for _, value in of("Ready")} == {1.0}
    assert all(0 < value < 60 for _, value in of("Time of a request") if math.isfinite(value))


def test_the_documentations_queries_are_answered(asked: Asked) -> None:
    text = OBSERVABILITY.read_text().partition("## Queries")[2].partition("##")[0]
    queries = [match[1] for match in re.finditer(r"\| `(.+)` \|$", text, re.MULTILINE)]
    assert queries
    for query in queries:
        samples = asked.vector(query.replace('"m"', '"small"'))
        assert samples or "queue-full" in query, query  # no queue was full
    assert asked.vector("min(serve_ready)") == [({}, 1.0)]
