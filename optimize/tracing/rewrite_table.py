"""Graph rewrites as tables: what each rewrite does, which library fault it works around, and what must run before it.

Each stage of a network has one `Table`: the traced network, the network with observers, the exported program and so on.
The records of a table run in its order. The order is checked when the table is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

Graph = TypeVar("Graph")
Given = TypeVar("Given")

#: The library whose fault is worked around. `oneDNN` is part of torch and of OpenVINO.
Library = Literal["onednn", "onnxruntime", "openvino", "tensorrt", "torch", "torch.ao", "torch.onnx"]
#: What a fault costs: wrong or missing answers, time, or memory.
Cost = Literal["answers", "speed", "memory"]

NOT_MEASURED: Final = "not measured"

_left_out: ContextVar[frozenset[str]] = ContextVar("left_out", default=frozenset())


def _always(given: Any) -> bool:
    return True


def by_graph_alone(write: Callable[[Graph], Any]) -> Callable[[Graph, Any], Any]:
    """Turn a function of the graph into a record's ``apply``, which also gets the stage's data."""
    return lambda graph, _: write(graph)


@dataclass(frozen=True)
class Fault:
    """A fault or a missing feature of a library.

    Attributes:
        library: the library.
        seen: the version or versions in which the fault was seen.
        damage: the measured effect without the rewrite, or `NOT_MEASURED`.
        issue: the upstream issue or pull request, if one is known.
        costs: what the fault costs.
    """

    library: Library
    seen: str
    damage: str = NOT_MEASURED
    issue: str = ""
    costs: Cost = "answers"


@dataclass(frozen=True)
class Rewrite(Generic[Graph, Given]):
    """A step that changes a graph in place.

    Attributes:
        name: the name of the record, with hyphens.
        does: one sentence that says what the rewrite does.
        apply: the function that rewrites a graph with the data of the stage. It may return the number of changes.
        after: names of records that must run before this one.
        when: tells from the data of the stage whether the rewrite runs.
        faults: the faults that it works around. A rewrite without a fault is needed whatever libraries do.
    """

    name: str
    does: str
    apply: Callable[[Graph, Given], Any]
    after: tuple[str, ...] = ()
    when: Callable[[Given], bool] = _always
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Table(Generic[Graph, Given]):
    """The rewrites of a stage, in the order in which they run.

    Attributes:
        stage: the name of the stage, for people.
        records: the rewrites in their order.
        behind: tables that run before this one.

    Raises:
        ValueError: a name occurs twice, or a record comes before one that it must follow.
    """

    stage: str
    records: tuple[Rewrite[Graph, Given], ...]
    behind: tuple[Table[Any, Any], ...] = ()

    def __post_init__(self) -> None:
        known = self._before()
        own = {record.name for record in self.records}
        for record in self.records:
            if record.name in known:
                raise ValueError(f"{self.stage}: {record.name} occurs twice")
            for name in record.after:
                if name not in known | own:
                    raise ValueError(f"{self.stage}: {record.name} must run after {name}, which is not a record")
                if name not in known:
                    raise ValueError(f"{self.stage}: {record.name} must run after {name}, but comes before it")
            known.add(record.name)

    def _before(self) -> set[str]:
        return {name for table in self.behind for name in (*table._before(), *(each.name for each in table.records))}

    def running(self, given: Given) -> Iterator[Rewrite[Graph, Given]]:
        """Return the records that run with the given data of the stage."""
        left = _left_out.get()
        return (record for record in self.records if record.name not in left and record.when(given))

    def run(self, graph: Graph, given: Given) -> bool:
        """Run all rewrites on a graph, in place.

        Returns:
            Whether a record reported a change. Not all records report their changes.
        """
        said = [record.apply(graph, given) for record in self.running(given)]
        return any(said)

    @contextlib.contextmanager
    def around(self, graph: Graph, given: Given) -> Iterator[None]:
        """Enter the context managers of the records around the block."""
        with contextlib.ExitStack() as held:
            for record in self.running(given):
                held.enter_context(record.apply(graph, given))
            yield


@contextlib.contextmanager
def left_out(*names: str) -> Iterator[None]:
    """Leave the named records out of all tables within the block. Use it to measure what they are for."""
    token = _left_out.set(_left_out.get() | {*names})
    try:
        yield
    finally:
        _left_out.reset(token)
