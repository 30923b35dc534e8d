"""Making a row: the artifact of one way, and what it answers on the evaluation images in each of its engines."""

from __future__ import annotations

from benchmarks.quant.record import Answered, RowRecord
from benchmarks.quant.ways import Bed, Way
from optimize.measure.bench import Bench, Candidate
from serve.runtime.card.execution import Execution
from serve.runtime.errors import PipelineError, one_line


def make_row(bed: Bed, way: Way, bench: Bench) -> RowRecord:
    """What one way gives; what it cannot do is said in the record, and is no reason to end.

    Args:
        bed: what it starts from.
        way: how it is made.
        bench: what runs it; it has no process of its own any more when this returns.
    """
    known = RowRecord(name=way.name, ours=way.ours, inputs=bed.inputs(way))
    try:
        artifact = bed.made(way)[-1].artifact
    except PipelineError as error:
        return known.model_copy(update={"reason": one_line(error)})
    except Exception as error:  # noqa: BLE001 - a peer's fault is what the table is to say
        return known.model_copy(update={"reason": f"{type(error).__name__}: {one_line(error)}"})
    answered, absent = {}, {}
    for engine in way.engines:
        candidate = Candidate(artifact, Execution(engine))
        try:
            answered[engine] = Answered.of(bench.answers(candidate).value.evidence["first"].numpy())
        except PipelineError as error:
            absent[engine] = one_line(error)
        bench.release(candidate)
    reason = None if answered else f"nothing runs it: {'; '.join(absent.values())}"
    weights = artifact.path.with_name(f"{artifact.path.name}.bin")  # OpenVINO's lie beside its graph
    return known.model_copy(
        update={
            "reason": reason,
            "bytes": sum(path.stat().st_size for path in (artifact.path, weights) if path.exists()),
            "answered": answered,
            "absent": absent,
            "notes": artifact.card.notes,
        }
    )
