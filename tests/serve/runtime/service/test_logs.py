"""The log of requests: how much of a flood is told, and that the rest is counted."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from serve.runtime.service.logs import RequestLog
from serve.runtime.service.observation import Observation

FAILED = Observation("one", "/predictions/{name}", "m", "1.0", 503, 0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=7.0)
    monkeypatch.setattr("serve.runtime.service.logs.time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records]


def test_of_a_flood_twenty_lines_are_told_in_a_second_and_the_next_says_how_many_were_not(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serve.requests")
    log = RequestLog(0.5)
    for number in range(100):
        clock.now = 7 + number / 101
        log(FAILED)
    assert len(caplog.records) == 20
    assert not any("left_out" in line for line in fields(caplog))
    clock.now = 8.5
    for _ in range(2):
        log(FAILED)
    assert [line.get("left_out") for line in fields(caplog)[20:]] == [80, None]


def test_a_log_of_every_request_leaves_none_out(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve.requests")
    log = RequestLog(0.5, every=True)
    for _ in range(100):
        log(dataclasses.replace(FAILED, status=200))
    assert len(caplog.records) == 100
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.parametrize("status", [200, 503])
def test_probes_of_health_have_no_lines(status: int, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve.requests")
    RequestLog(0.5, every=True)(Observation("one", "/health/ready", status=status, seconds=1.0, probe=True))
    assert not caplog.records
