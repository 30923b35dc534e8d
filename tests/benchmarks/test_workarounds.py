"""What is said of workarounds by the versions in which their faults were seen."""

from __future__ import annotations

import re

import pytest

from benchmarks.workarounds.__main__ import seen_last
from optimize.quantization.tables import records


@pytest.mark.parametrize(
    ("versions", "last"),
    [
        ("2.11 to 2.14", "2.14"),
        ("2.13 and 2.14", "2.14"),
        ("torch 2.14", "2.14"),
        ("2026.4.1", "2026.4.1"),
        ("10", "10"),
    ],
)
def test_the_last_version_is_found_in_the_ways_that_records_state_it(versions: str, last: str) -> None:
    assert seen_last(versions) == last


def test_every_fault_of_a_record_states_a_version() -> None:
    faults = [fault for _, record in records() for fault in record.faults]
    assert faults
    assert all(re.fullmatch(r"[\d.]+", seen_last(fault.seen)) for fault in faults)
