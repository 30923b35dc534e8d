"""Rewrites of graphs as tables: what each does, which library's fault it works around, and what must run before it.

A stage (a traced network, one with observers, an exported program …) is a `Table`, whose records run in its order. The
order is checked when the table is built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

Graph = TypeVar("Graph")
Given = TypeVar("Given")

#: Whose faults are worked around. `oneDNN` is in torch and in OpenVINO.
Library = Literal["onednn", "onnxruntime", "openvino", "tensorrt", "torch", "torch.ao", "torch.onnx"]
#: What a fault costs: wrong answers or none at all; time; memory.
Cost = Literal["answers", "speed", "memory"]

NOT_MEASURED: Final = "not measured"

_left_out: ContextVar[frozenset[str]] = ContextVar("left_out", default=frozenset())


def _always(given: Any) -> bool:
    return True


def by_graph_alone(write: Callable[[Graph], Any]) -> Callable[[Graph, Any], Any]:
    """A record's ``apply`` that needs nothing but the graph."""
    return lambda graph, _: write(graph)


@dataclass(frozen=True)
class Fault:
    """What a library gets wrong, or has no way for.

    Attributes:
        library: which one.
        seen: the version, or versions, that it was seen in.
        damage: what was measured without the rewrite, or `NOT_MEASURED`.
        issue: the upstream issue or pull request, where one is known.
        costs: what suffers.
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
        name: of the record, in words with hyphens.
        does: what it does, as a sentence.
        apply: does it, to a graph, by what the stage is given; it may return in how many places.
        after: names of records that must have run before it.
        when: whether it runs at all, by what the stage is given.
        faults: what it works around; none: it is needed whatever libraries do.
    """

    name: str
    does: str
    apply: Callable[[Graph, Given], Any]
    after: tuple[str, ...] = ()
    when: Callable[[Given], bool] = _always
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Table(Generic[Graph, Given]):
    """The records of a stage in the order in which they run.

    Attributes:
        stage: what is rewritten, for people.
        records: in their order.
        behind: tables that ran before this one.

    Raises:
        ValueError: a name occurs twice, or a record does not stand behind those that must run before it.
    """

    stage: str
    records: tuple[Rewrite[Graph, Given], ...]
    behind: tuple[Table[Any, Any], ...] = ()

    def __post_init__(self) -> None:
        known = self._before()
        own = {record.name for record in self.records}
        for record in self.records:
            if record.name in known:
                raise ValueError(f"{self.stage}: {record.name} stands twice")
            for name in record.after:
                if name not in known | own:
                    raise ValueError(f"{self.stage}: {record.name} must run after {name}, which is no record")
                if name not in known:
                    raise ValueError(f"{self.stage}: {record.name} must run after {name}, and stands before it")
            known.add(record.name)

    def _before(self) -> set[str]:
        return {name for table in self.behind for name in (*table._before(), *(each.name for each in table.records))}

    def running(self, given: Given) -> Iterator[Rewrite[Graph, Given]]:
        """The records that run, by what the stage is given."""
        left = _left_out.get()
        return (record for record in self.records if record.name not in left and record.when(given))

    def run(self, graph: Graph, given: Given) -> bool:
        """Rewrite a graph, in place, by what the stage is given.

        Returns:
            Whether a record said that it changed anything; not all of them say it.
        """
        said = [record.apply(graph, given) for record in self.running(given)]
        return any(said)

    @contextlib.contextmanager
    def around(self, graph: Graph, given: Given) -> Iterator[None]:
        """Hold what the records give, which are context managers, around the block."""
        with contextlib.ExitStack() as held:
            for record in self.running(given):
                held.enter_context(record.apply(graph, given))
            yield


@contextlib.contextmanager
def left_out(*names: str) -> Iterator[None]:
    """Leave the records of these names out of all tables, within the block: to see what they are for."""
    token = _left_out.set(_left_out.get() | {*names})
    try:
        yield
    finally:
        _left_out.reset(token)
