"""The parity certificates of a run's INT8 artifacts: what every execution answered, against what the integers mean.

Answers that were measured for accuracy are used as they are. Two more are taken, in processes of their own and once
for artifact, engines and processor: those of the reference program, and of ONNX Runtime with no node rewritten.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from optimize.certify.reference_program import ReferenceLayers
from optimize.measure.accuracy import Answers
from optimize.measure.answer_parity import certificate
from optimize.measure.bench import Bench, Candidate, Kept
from optimize.measure.machine import machine, versions
from optimize.measure.rows import Skip
from optimize.store.artifact import REFERENCE_FILE, Artifact
from optimize.store.atomic_files import write_json
from optimize.store.keys import CertificateKey, NamedKey
from optimize.store.sources import code_of
from serve.runtime.card.card import read_card, write_card
from serve.runtime.card.certificate import Certificate
from serve.runtime.card.execution import Execution
from serve.runtime.device.cpu_integers import TENSORRT
from serve.runtime.engines.base import engines, execution_id
from serve.runtime.errors import PipelineError, UserError, message_of
from serve.runtime.model_files.program_file import load_program

#: ONNX Runtime that runs every node as it is written.
UNOPTIMIZED = Execution("onnxruntime", options={"optimizations": False})

_FILE = "certificate.json"
_LONGEST = 1000  # characters of a reason


@dataclass(frozen=True)
class Certified:
    """Certificates by artifact's name, and what they took.

    Attributes:
        certificates: by name.
        keys: of the objects in the store that they come from.
        seconds: that the further answers took, now or at an earlier run.
        cached: whether all of them were taken from the store.
    """

    certificates: Mapping[str, Certificate]
    keys: frozenset[str]
    seconds: float
    cached: bool


#: Of artifacts that have no integers, or were not asked about.
UNCERTIFIED = Certified({}, frozenset(), 0.0, cached=True)


@dataclass(frozen=True)
class _Compared:
    """What there is to compare for one artifact: answers by execution, and why others have none."""

    answers: Mapping[str, Kept[Answers]]
    absent: Mapping[str, str]


def certify(
    artifacts: Sequence[Artifact],
    pairs: Mapping[str, Sequence[Candidate]],
    answers: Mapping[str, Kept[Answers]],
    skips: Mapping[str, Skip],
    bench: Bench,
) -> Certified:
    """Certify every artifact of integers that a CPU computes.

    One whose target is TensorRT has none: no engine here computes its integers. `certify --layers` compares its graph.
    One that cannot be certified, for whatever reason, is said, and has none.

    Args:
        artifacts: all that were measured.
        pairs: of each, by its name.
        answers: that were measured, by pair's id.
        skips: why others were not.
        bench: measures what is lacking; its processes are not touched.

    Raises:
        UserError: what the user must mend: images that cannot be read.
        OSError: what was measured cannot be kept.
    """
    found: dict[str, Certificate] = {}
    keys: set[str] = set()
    taken: dict[str, Kept[Answers]] = {}
    # Of its own, whose processes end with it: they would be in the way of the others' memory.
    with dataclasses.replace(bench, timing=bench.timing.model_copy(update={"batch_sizes": (1,)})) as own:
        for artifact in artifacts:
            origin = reference_origin(artifact)
            if origin is None:
                continue
            try:
                reference = _reference(origin, own)
                compared = _compared(_computing(origin, artifact), pairs, answers, skips, own)
                if not compared.answers:
                    continue
                meant = own.answers(Candidate(reference, Execution("exported")))
                found[artifact.name] = _certificate(reference, meant, compared, bench)
            except (UserError, OSError):
                raise
            except Exception as error:  # noqa: BLE001 - all was measured: no certificate is worth losing that
                said = message_of(error)
                bench.context.listener.said(f"{artifact.name}: no parity certificate: {_in_a_line(said)}")
                continue
            further = [kept for name, kept in compared.answers.items() if name == execution_id(UNOPTIMIZED)]
            # What was taken first stays: read again for another artifact, the same answers come from the store.
            taken = {kept.key: kept for kept in (meant, *further)} | taken
            keys |= {*reference.objects, *taken, found[artifact.name].key}
    seconds = sum(kept.seconds for kept in taken.values())
    return Certified(found, frozenset(keys), seconds, all(kept.cached for kept in taken.values()))


def reference_origin(artifact: Artifact) -> Artifact | None:
    """The artifact that holds the reference program of this one's integers; None if a CPU computes none of them."""
    origin: Artifact | None = artifact
    while origin is not None and origin.kind == "onnx-int8":  # one that was packed was made from one that was not
        origin = origin.parent
    if origin is None or REFERENCE_FILE not in origin.card.files or artifact.card.target in (None, TENSORRT):
        return None
    return origin if _computing(origin, artifact) else None


def _computing(origin: Artifact, artifact: Artifact) -> list[Artifact]:
    """Of an artifact and what holds its reference, those that compute the integers: the reference itself does not."""
    parties = [artifact] if origin is artifact else [origin, artifact]
    return [party for party in parties if party.card.file != REFERENCE_FILE]


def _reference(origin: Artifact, bench: Bench) -> Artifact:
    """The reference program as an artifact of its own, which any engine for such programs runs."""
    card = dataclasses.replace(
        origin.card,
        name="reference",
        format="exported_program",
        file=REFERENCE_FILE,
        precision="int8 in float arithmetic",
        files={REFERENCE_FILE: origin.card.files[REFERENCE_FILE]},
        notes=(),
        certificate=None,
    )

    def build(folder: Path) -> None:
        bench.store.link(origin.folder / REFERENCE_FILE, folder / REFERENCE_FILE)
        write_card(folder, card)

    key = NamedKey(made=origin.key, card=dataclasses.asdict(card)).digest
    found = bench.store.obtain(key, build, about=f"{card.model} on {bench.context.data.name}: reference")
    return Artifact("reference", "quantized", origin.key, found.folder, read_card(found.folder), objects=(key,))


def _compared(
    artifacts: Sequence[Artifact],
    pairs: Mapping[str, Sequence[Candidate]],
    answers: Mapping[str, Kept[Answers]],
    skips: Mapping[str, Skip],
    bench: Bench,
) -> _Compared:
    """The answers of every execution on the CPU that computes the integers: torch's of the parent, then the graph's."""
    found: dict[str, Kept[Answers]] = {}
    absent: dict[str, str] = {}
    for pair in (pair for artifact in artifacts for pair in pairs.get(artifact.name, ())):
        name = execution_id(pair.execution)
        if pair.execution.device_type != "cpu":
            continue
        if pair.id not in answers:
            absent[name] = _in_a_line(str(skips[pair.id])) if pair.id in skips else "it was not measured"
            continue
        if pair.execution == Execution("onnxruntime"):
            try:
                found[execution_id(UNOPTIMIZED)] = bench.answers(Candidate(pair.artifact, UNOPTIMIZED))
            except PipelineError as error:
                absent[execution_id(UNOPTIMIZED)] = _in_a_line(str(error))
        found[name] = answers[pair.id]
    return _Compared(dict(sorted(found.items())), absent)


def _in_a_line(said: str) -> str:
    """What a library said, as a card takes it: a line of text, however many it wrote, in whatever colours."""
    shown = "".join(character if character.isprintable() else " " for character in said)
    return " ".join(shown.split())[:_LONGEST]


def _certificate(reference: Artifact, meant: Kept[Answers], compared: _Compared, bench: Bench) -> Certificate:
    """The certificate, from the store or made of the answers."""
    digest = reference.card.files[REFERENCE_FILE]
    key = CertificateKey(
        reference=meant.key,
        answers={name: kept.key for name, kept in compared.answers.items()},
        absent=compared.absent,
        file=digest,
        code=code_of(certificate, ReferenceLayers, Certificate, certify),
    ).digest

    def build(folder: Path) -> None:
        libraries = {"torch", *(name for engine in engines().values() for name in engine.libraries)}
        made = certificate(
            meant.value,
            {name: kept.value for name, kept in compared.answers.items()},
            step=ReferenceLayers(load_program(reference.path)).step,
            file=digest,
            data=bench.context.data.val.fingerprint,
            absent=compared.absent,
            cpu=str(machine(bench.context.device)["cpu"]),
            versions={name: version for name, version in versions().items() if name in libraries},
        )
        write_json(made.to_json(), folder / _FILE)

    about = f"{reference.card.model} on {bench.context.data.name}: parity certificate"
    stored = bench.store.obtain(key, build, about=about)
    made = Certificate.from_json(json.loads((stored.folder / _FILE).read_text(encoding="utf-8")))
    return dataclasses.replace(made, key=key)
