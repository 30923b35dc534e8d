"""The parity certificates of a run's INT8 artifacts: every execution's answers compared with the reference's.

Answers that were measured for accuracy are reused. Two more are measured once for each artifact, engines and processor,
in their own processes: those of the reference program, and of ONNX Runtime without rewriting any node.
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
_LONGEST = 1000  # the most characters of a reason


@dataclass(frozen=True)
class Certified:
    """Certificates by artifact's name, and their cost.

    Attributes:
        certificates: certificates by name.
        keys: keys of the stored objects that they come from.
        seconds: the time of the additional answers, now or in an earlier run.
        cached: whether all of them came from the store.
    """

    certificates: Mapping[str, Certificate]
    keys: frozenset[str]
    seconds: float
    cached: bool


#: The result for artifacts without integers, or without a request for certificates.
UNCERTIFIED = Certified({}, frozenset(), 0.0, cached=True)


@dataclass(frozen=True)
class _Compared:
    """The answers to compare for one artifact, by execution, and why other executions have none."""

    answers: Mapping[str, Kept[Answers]]
    absent: Mapping[str, str]


def certify(
    artifacts: Sequence[Artifact],
    pairs: Mapping[str, Sequence[Candidate]],
    answers: Mapping[str, Kept[Answers]],
    skips: Mapping[str, Skip],
    bench: Bench,
) -> Certified:
    """Certify every artifact whose integers a CPU computes.

    An artifact for TensorRT gets no certificate, because no engine here computes its integers. `certify --layers`
    compares its graph. If an artifact cannot be certified for any reason, the listener gets a message.

    Args:
        artifacts: all that were measured.
        pairs: the pairs of each, by its name.
        answers: the measured answers, by pair's id.
        skips: why other pairs have no answers.
        bench: measures missing answers. Its running processes are not used.

    Raises:
        UserError: a problem that the user must solve: images that cannot be read.
        OSError: a measurement cannot be stored.
    """
    found: dict[str, Certificate] = {}
    keys: set[str] = set()
    taken: dict[str, Kept[Answers]] = {}
    # A bench of its own, whose processes end with it. They would take memory from the others.
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
            except Exception as error:  # noqa: BLE001 - no certificate is worth losing the measurements
                said = message_of(error)
                bench.context.listener.said(f"{artifact.name}: no parity certificate: {_in_a_line(said)}")
                continue
            further = [kept for name, kept in compared.answers.items() if name == execution_id(UNOPTIMIZED)]
            # Keep the first entry: when another artifact reads the same answers again, they come from the store.
            taken = {kept.key: kept for kept in (meant, *further)} | taken
            keys |= {*reference.objects, *taken, found[artifact.name].key}
    seconds = sum(kept.seconds for kept in taken.values())
    return Certified(found, frozenset(keys), seconds, all(kept.cached for kept in taken.values()))


def reference_origin(artifact: Artifact) -> Artifact | None:
    """Return the artifact with the reference program of this one's integers. None if no CPU computes them."""
    origin: Artifact | None = artifact
    while origin is not None and origin.kind == "onnx-int8":  # a packed graph was made from an unpacked one
        origin = origin.parent
    if origin is None or REFERENCE_FILE not in origin.card.files or artifact.card.target in (None, TENSORRT):
        return None
    return origin if _computing(origin, artifact) else None


def _computing(origin: Artifact, artifact: Artifact) -> list[Artifact]:
    """Return those of the two artifacts that compute integers. The reference program itself does not."""
    parties = [artifact] if origin is artifact else [origin, artifact]
    return [party for party in parties if party.card.file != REFERENCE_FILE]


def _reference(origin: Artifact, bench: Bench) -> Artifact:
    """Return the reference program as a separate artifact, which any engine for such programs can run."""
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
    """Return the answers of every CPU execution of the integers: torch's for the parent, then the graph's."""
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
    """Turn a library's message into one line of printable text for a card."""
    shown = "".join(character if character.isprintable() else " " for character in said)
    return " ".join(shown.split())[:_LONGEST]


def _certificate(reference: Artifact, meant: Kept[Answers], compared: _Compared, bench: Bench) -> Certificate:
    """Return the certificate from the store, or make it from the answers."""
    digest = reference.card.files[REFERENCE_FILE]
    key = CertificateKey(
        reference=meant.key,
        answers={name: kept.key for name, kept in compared.answers.items()},
        absent=compared.absent,
        file=digest,
        code=code_of(certificate, type(bench.context.task), ReferenceLayers, Certificate, certify),
    ).digest

    def build(folder: Path) -> None:
        libraries = {"torch", *(name for engine in engines().values() for name in engine.libraries)}
        made = certificate(
            meant.value,
            {name: kept.value for name, kept in compared.answers.items()},
            task=bench.context.task,
            steps=dict(zip(reference.card.outputs, ReferenceLayers(load_program(reference.path)).steps, strict=True)),
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
