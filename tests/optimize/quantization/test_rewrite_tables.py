"""Each record of the tables of rewrites changes a graph, and their order is checked."""

from __future__ import annotations

from collections.abc import Callable
from json import loads
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.workarounds.networks import SHOWN, Shown
from benchmarks.workarounds.stages import TEXTS
from optimize.cli import app
from optimize.quantization.tables import TABLES, records
from optimize.tracing.rewrite_table import Rewrite, Table, left_out


@pytest.mark.parametrize(
    ("name", "make"),
    [pytest.param(record.name, make, id=record.name) for table, make in TEXTS for record in table.records],
)
def test_without_a_record_another_graph_comes_out(name: str, make: Callable[[Shown], str]) -> None:
    """Or none at all."""
    with_it = make(SHOWN[name])
    with left_out(name):
        try:
            without = make(SHOWN[name])
        except Exception as error:  # noqa: BLE001 - whatever a library raises that gets such a network
            without = repr(error)
    assert without != with_it


def test_a_graph_is_the_same_each_time() -> None:
    """Or what is compared above would differ by chance."""
    shown = SHOWN["copies-for-each-image"]
    for _, make in TEXTS:
        assert make(shown) == make(shown)


def test_every_table_is_shown_and_every_name_is_of_one_record() -> None:
    assert tuple(table for table, _ in TEXTS) == TABLES
    names = [record.name for _, record in records()]
    assert sorted(names) == sorted(SHOWN)  # none twice, each with a network, none of a record that is gone


def _step(name: str, *after: str) -> Rewrite[list[str], bool]:
    return Rewrite(name, "", lambda done, given: done.append(name), after, when=lambda given: given or name != "last")


def test_records_run_in_their_order_where_they_are_wanted() -> None:
    table = Table("words", (_step("first"), _step("second", "first"), _step("last", "second")))
    for given, expected in ((True, ["first", "second", "last"]), (False, ["first", "second"])):
        done = list[str]()
        table.run(done, given)
        assert done == expected
    with left_out("first"):
        done = []
        table.run(done, True)
    assert done == ["second", "last"]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((_step("second", "first"), _step("first")), "words: second must run after first, but comes before it"),
        ((_step("second", "frist"),), "words: second must run after frist, which is not a record"),
        ((_step("first"), _step("first")), "words: first occurs twice"),
        ((_step("first", "first"),), "words: first must run after first, but comes before it"),
    ],
)
def test_a_table_in_another_order_than_its_records_need_is_refused(steps: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        Table("words", steps)


def test_records_of_earlier_tables_may_be_what_must_have_run() -> None:
    first = Table("words", (_step("first"),))
    second = Table("more words", (_step("second", "first"),), behind=(first,))
    assert Table("last words", (_step("last", "first"),), behind=(second,)).records
    with pytest.raises(ValueError, match="first occurs twice"):
        Table("last words", (_step("first"),), behind=(second,))


def test_the_command_lists_every_record() -> None:
    found = CliRunner().invoke(app, ["workarounds"], env={"COLUMNS": "300"})
    assert found.exit_code == 0
    listed = loads(CliRunner().invoke(app, ["workarounds", "--json"]).stdout)
    assert [entry["name"] for entry in listed] == [record.name for _, record in records()]
    assert all(entry["name"] in found.stdout for entry in listed)
    (scalar,) = (entry for entry in listed if entry["name"] == "scalar-operands")
    assert scalar["faults"][0]["library"] == "torch.ao"
    assert scalar["faults"][0]["issue"] == "pytorch 61859"
