"""All tables of rewrites, in the order in which a network goes through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from optimize.export.onnx_graph.exported_table import EXPORTED, EXPORTING, WRITTEN, WRITTEN_FOR_CPUS
from optimize.quantization.lowering.lowered_table import EXPLICIT, LOWERED, REQUANTIZED
from optimize.quantization.lowering.packed_table import PACKED
from optimize.quantization.prepared_table import OBSERVED, UNOBSERVED
from optimize.quantization.rewrites.traced_table import TRACED
from optimize.tracing.rewrite_table import Rewrite, Table

TABLES: Final[tuple[Table[Any, Any], ...]] = (
    *(TRACED, UNOBSERVED, OBSERVED, EXPLICIT, PACKED, REQUANTIZED, LOWERED),
    *(EXPORTING, EXPORTED, WRITTEN, WRITTEN_FOR_CPUS),
)


def records() -> Iterator[tuple[str, Rewrite[Any, Any]]]:
    """Yield each record in its order, with the name of its stage."""
    return ((table.stage, record) for table in TABLES for record in table.records)


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a line for each fault of each record: stage, name, library, versions, measured effect, issue.

    A stage and a name appear only in their first line. A record without faults also gets a line.
    """
    for table in TABLES:
        stage = table.stage
        for record in table.records:
            name = record.name
            for fault in record.faults:
                yield stage, name, fault.library, fault.seen, fault.damage, fault.issue
                stage = name = ""
            if not record.faults:
                yield stage, name, "none", "", "needed whatever libraries do", ""
            stage = ""


def to_json() -> list[dict[str, Any]]:
    """Return the records as JSON values."""
    return [
        {
            "stage": stage,
            "name": record.name,
            "does": record.does,
            "after": [*record.after],
            "faults": [
                {
                    "library": fault.library,
                    "seen": fault.seen,
                    "damage": fault.damage,
                    "issue": fault.issue,
                    "costs": fault.costs,
                }
                for fault in record.faults
            ],
        }
        for stage, record in records()
    ]
