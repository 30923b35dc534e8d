"""Writes a run's folder: artifacts, their measurements, archives, a sample image."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from optimize.measure.figures import Measured
from optimize.measure.rows import Archive, Machine, Pair, Row
from optimize.store.artifact import Artifact
from optimize.store.atomic_files import TEMPORARY, write_atomically, write_json
from optimize.store.keys import ArchiveKey
from optimize.store.objects import Store
from optimize.store.sources import code_of
from optimize.tasks.base import Task
from serve.common import layout
from serve.common.options import ServingOptions
from serve.packing.pack import write_bill
from serve.runtime.card.card import CARD_FILE, Card, write_card
from serve.runtime.card.evidence import Evidence
from serve.runtime.card.execution import Execution
from serve.runtime.card.known_answer import KNOWN_FILE, KnownAnswer
from serve.runtime.card.serving import SERVING_FILE, Serving
from serve.runtime.engines.base import chain_for, execution_id
from serve.runtime.images.image_preprocessing import load_placed
from serve.runtime.images.placement import Placement
from serve.runtime.outputs import Outputs
from serve.runtime.tasks.base import open_task
from serve.torchserve import server
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.handler import ImageClassifierHandler

#: The measurements of a published artifact. They are not in its card, so that measuring again makes no new archive.
MEASUREMENTS_FILE = "measurements.json"


@dataclass(frozen=True)
class Published:
    """The published parts of a run.

    Attributes:
        rows: the run's rows, with the paths of the published files.
        keys: keys of the objects that the run now uses.
        digests: SHA-256 of those published files that were just hashed as files of an object.
    """

    rows: tuple[Row, ...]
    keys: frozenset[str]
    digests: Mapping[Path, str]


def publish(
    store: Store,
    folder: Path,
    artifacts: Mapping[str, Artifact],
    rows: Sequence[Row],
    *,
    recommended: str | None,
    options: ServingOptions,
    machine: Machine,
    sample: bytes,
    first: Mapping[str, Outputs],
    task: Task,
) -> Published:
    """Write ``artifacts/``, ``archives/`` and ``sample.<ext>`` of a run, and remove what an earlier run left there.

    Archives that a server of this store is serving stay, whether the run still has them or not. A replaced archive is a
    new file under the old name. TorchServe (0.12) unpacked the old one when it started, and restarts its workers from
    there. The caller holds the lock of the run's name.

    Args:
        store: keeps the archives as objects.
        folder: the run's folder.
        artifacts: the artifacts by name.
        rows: the report's rows, without the archives.
        recommended: id of the pair to serve first, even if another execution of its artifact is faster.
        options: settings of serving that differ from the defaults.
        machine: the machine of the measurements.
        sample: an encoded image to try the endpoint with: the first readable one of the validation split.
        first: outputs of measured pairs for the first image of the validation split, by id.
        task: what the network is for.
    """
    keys: set[str] = set()
    digests: dict[Path, str] = {}
    published = []
    (preprocessing,) = {artifact.card.preprocessing for artifact in artifacts.values()}  # one for the whole run
    placement = load_placed(sample, preprocessing).placement
    for row in rows:
        artifact = artifacts.get(row.name)
        if artifact is None or row.file is None:
            published.append(row)
            continue
        target = layout.artifact_folder(folder.parent, folder.name, artifact.name)
        # The certificate belongs to the run and not to the pass: it compares answers to the run's images.
        artifact = dataclasses.replace(artifact, card=dataclasses.replace(artifact.card, certificate=row.certificate))
        card = artifact.card
        executions = preferred_executions(row, card, recommended)
        serving = options.over(Serving(executions, evidence=evidence_of(row, task)), card)
        beside = {SERVING_FILE: serving.text}
        if (known := known_answer(row, card, recommended, first, sample, placement=placement)) is not None:
            beside[KNOWN_FILE] = known.text
        _publish_artifact(store, artifact, target, row.measurements() | {"machine": machine.to_json()}, beside)
        path = layout.archive_path(folder.parent, folder.name, artifact.name)
        key, digest = _publish_archive(store, target, card, beside, path)
        digests |= {
            target / name: file_digest
            for name, file_digest in card.files.items()
            if (target / name).samefile(artifact.folder / name)
        }
        if path.samefile(store.objects / key / path.name):
            digests[path] = digest
        file = row.file.model_copy(update={"path": str(target / card.file)})
        archived = Archive(path=str(path), bytes=path.stat().st_size, sha256=digest)
        published.append(row.model_copy(update={"file": file, "archive": archived}))
        keys |= {*artifact.objects, key}
    suffix = "jpg" if sample.startswith(b"\xff\xd8") else "png" if sample.startswith(b"\x89PNG") else "img"
    write_atomically(folder / f"sample.{suffix}", sample)
    served = server.running(store.root)
    _remove_stale(folder, artifacts, f"sample.{suffix}", served.archives if served else ())
    return Published(tuple(published), frozenset(keys), digests)


def preferred_executions(row: Row, card: Card, recommended: str | None = None) -> tuple[Execution, ...]:
    """Return the executions for an artifact, best first: by measured p50, then unmeasured ones by the engines' rank.

    The pair ``recommended`` comes first. The server chooses the GPU itself, so the measured one is not kept.
    """
    best = [
        dataclasses.replace(pair.execution, device=pair.execution.device_type)
        for pair, _ in measured_pairs(row, recommended)
    ]
    tried = {(execution.engine, execution.device) for execution in best}
    return (*best, *(entry for entry in chain_for(card) if (entry.engine, entry.device) not in tried))


def measured_pairs(row: Row, recommended: str | None = None) -> list[tuple[Pair, Measured]]:
    """Return the measured pairs of an artifact with their figures: ``recommended`` first, the others by p50."""
    measured = [(pair, pair.measured) for pair in row.pairs if pair.measured is not None]
    return sorted(measured, key=lambda entry: (entry[0].id != recommended, entry[1].latency_ms.p50))


def known_answer(
    row: Row, card: Card, recommended: str | None, first: Mapping[str, Outputs], sample: bytes, *, placement: Placement
) -> KnownAnswer | None:
    """Return the answer of an artifact's best pair to the run's sample image, from the accuracy measurement.

    Args:
        row: the artifact's row.
        card: its card.
        recommended: see `measured_pairs`.
        first: see `publish`.
        sample: see `publish`.
        placement: how the sample lies on the network's input.

    Returns:
        The answer. None if nothing was measured, or the first image cannot be read, because the sample is another image
            then.
    """
    for pair, _ in measured_pairs(row, recommended):
        if pair.id in first:
            task = open_task(card)
            facts = task.known(task.ending(first[pair.id]), placement)
            return KnownAnswer(sample, card.task, execution_id(pair.execution), facts)
    return None


def evidence_of(row: Row, task: Task) -> tuple[Evidence, ...]:
    """Return the measured accuracy of each execution of an artifact, with its interval."""
    found = []
    for pair in row.pairs:
        if pair.measured is not None:
            accuracy = pair.measured.accuracy
            execution = dataclasses.replace(pair.execution, device=pair.execution.device_type)
            found.append(Evidence(execution, task.metric.key, accuracy.score, *accuracy.interval, accuracy.images))
    return tuple(found)


def _publish_artifact(
    store: Store,
    artifact: Artifact,
    folder: Path,
    measurements: dict[str, Any],
    beside: Mapping[str, str],
) -> None:
    card = artifact.card
    folder.mkdir(parents=True, exist_ok=True)
    for name in card.files:
        store.link(artifact.folder / name, folder / name)
    files = (*card.files, CARD_FILE)
    if card.certificate is None:
        store.link(artifact.folder / CARD_FILE, folder / CARD_FILE)
    else:
        write_card(folder, card)
    write_json(measurements, folder / MEASUREMENTS_FILE)
    for name, text in beside.items():
        write_atomically(folder / name, text.encode())
    for stray in folder.iterdir():
        if stray.name not in (*files, MEASUREMENTS_FILE, *beside):
            _remove(stray)


def _publish_archive(
    store: Store, artifact: Path, card: Card, beside: Mapping[str, str], path: Path
) -> tuple[str, str]:
    """Pack a published artifact through the store, and link the archive to ``path``.

    Returns:
        The object's key, and the archive's SHA-256.
    """
    key = ArchiveKey(
        model_name=path.stem,
        card=dataclasses.asdict(card),
        serving=beside[SERVING_FILE],
        known=beside.get(KNOWN_FILE),
        libraries={name: metadata.version(name) for name in ("torch-model-archiver", "PyYAML")},
        code=code_of(build_archive, ImageClassifierHandler),
    ).digest

    def pack(target: Path) -> None:
        build_archive(artifact, target / path.name, model_name=path.stem)

    stored = store.obtain(key, pack, about=f"{card.model} on {card.data['name']}: archive")
    store.link(stored.folder / path.name, path)
    digest = stored.files[path.name]
    write_bill(path.parents[1], path, digest)  # it describes this environment, so it is not in the archive
    return key, digest


def _remove_stale(folder: Path, artifacts: Mapping[str, Artifact], sample: str, served: Collection[str]) -> None:
    """Remove files that an earlier or killed run of another recipe or data set left under this run's name."""
    archives = {layout.archive_path(folder.parent, folder.name, name) for name in artifacts}
    stale = [path for path in (folder / layout.ARTIFACTS).iterdir() if path.name not in artifacts]
    for path in (folder / layout.ARCHIVES).iterdir():
        archive = layout.archive_of(path)
        if archive not in archives and archive.name not in served:
            stale.append(path)
    stale += [path for path in folder.glob("sample.*") if path.name != sample]
    stale += [path for path in folder.glob(".*") if TEMPORARY.fullmatch(path.name)]
    for path in stale:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
