"""Measurements and the store: what is taken from it, and what must not be."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

from optimize.context import Context
from optimize.data.records import ImageData, Split
from optimize.data.targets import Labels
from optimize.measure import process_pool, processes
from optimize.measure.accuracy import answer
from optimize.measure.bench import Bench, Candidate, Kept, SpeedTable
from optimize.measure.machine import measured_devices
from optimize.measure.references import references_on
from optimize.measure.timing import Timing
from optimize.measure.worker import Child
from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model
from optimize.passes.fuse import Fuse
from optimize.passes.onnx import Onnx
from optimize.run.float_references import graph_of
from optimize.run.report_rows import Measurements, measure
from optimize.run.session import Session, Step
from optimize.store.artifact import Artifact
from optimize.store.keys import Key
from optimize.store.objects import Store
from optimize.store.sources import closure
from optimize.tasks.classification import CLASSIFICATION
from serve import runtime
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.execution import STARTED_WITH, Execution
from serve.runtime.errors import EngineError, UserError
from serve.runtime.service.predictor import Predictor
from tests.narrow import encoded
from tests.optimize.conftest import SHORT
from tests.optimize.runs_fixtures import references
from tests.optimize.workbench import CPU, TINY_NET, OtherRun

QUICK = Timing(rounds=1, batch_sizes=(1, 2), seconds=0.001, minimum=1, warm_up=0)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """As the one of the folder, for the one test that asks."""
    with references():
        yield


@pytest.fixture
def weights(trained: Artifact) -> Checkpoint:
    return Checkpoint(trained.module().state_dict(), "c" * 64)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def users_model(folder: Path, mean: float, std: float) -> str:
    """The tiny network in a file of the user's own, with the preprocessing that the user declares."""
    path = folder / "net.py"
    declared = f'PREPROCESSING = {{"resize": 16, "crop": [16, 16], "mean": [{mean}], "std": [{std}]}}\n'
    path.write_text(TINY_NET.read_text() + declared)
    return f"{path}:tiny"


def true_top1(artifact: Artifact, data: ImageData, mean: float, std: float) -> float:
    """Top-1 of the eager module on images that numpy normalised."""
    pixels = np.stack(
        [np.asarray(Image.open(io.BytesIO(encoded(source))).resize((16, 16), 2)) for source in data.val.sources]
    )
    inputs = (pixels.astype(np.float32)[:, None] / 255 - np.float32(mean)) / np.float32(std)
    with torch.no_grad():
        predicted = artifact.module()(torch.from_numpy(inputs)).argmax(dim=1)
    return float((predicted == data.val.labels).float().mean())


def test_a_changed_preprocessing_of_the_same_weights_has_its_own_accuracy(
    tmp_path: Path, digits: ImageData, weights: Checkpoint, store: Store
) -> None:
    found = {}
    for mean, std in ((0.5, 0.25), (0.9, 2.0)):
        source = resolve_model(users_model(tmp_path, mean, std))
        assert source.preprocessing is not None
        context = Context(digits, source.preprocessing, CPU)
        artifact = Session(store, source, context).baseline(checkpoint=weights).artifact
        found[mean] = (
            top1_of(store, context, artifact),
            true_top1(artifact, digits, mean, std),
            artifact.card.content,
        )
    (good, truly_good, content), (bad, truly_bad, same_content) = found.values()
    assert content == same_content  # it is the preprocessing alone that tells the two apart
    assert truly_good > truly_bad + 0.1
    assert good == pytest.approx(truly_good, abs=0.01)
    assert bad == pytest.approx(truly_bad, abs=0.01)


def top1_of(store: Store, context: Context, artifact: Artifact) -> float:
    with Bench(store, context, QUICK) as bench:
        return CLASSIFICATION.score(bench.answers(*bench.candidates(artifact)).value.evidence)


def test_what_is_open_already_is_timed_by_one_run_at_a_time(
    tmp_path: Path, store: Store, trained: Artifact, digits_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "LOCK_FILE", tmp_path / "lock")
    other = OtherRun(tmp_path / "lock")
    with Bench(store, dataclasses.replace(digits_context, listener=other), QUICK) as bench:
        (candidate,) = bench.candidates(trained)
        bench.footprint(candidate)
        other.measure()
        speeds = bench.speed([candidate], beside_eager=False).value.speeds
    assert other.waited_for
    assert set(speeds) == {candidate.id}


def with_preprocessing(context: Context, artifact: Artifact) -> tuple[Context, Artifact]:
    other = dataclasses.replace(context.preprocessing, mean=(0.4,))
    return (
        dataclasses.replace(context, preprocessing=other),
        dataclasses.replace(artifact, card=dataclasses.replace(artifact.card, preprocessing=other)),
    )


def with_input_size(context: Context, artifact: Artifact) -> tuple[Context, Artifact]:
    other = Preprocessing(20, (20, 20), context.preprocessing.mean, context.preprocessing.std)
    return (
        dataclasses.replace(context, preprocessing=other),
        dataclasses.replace(artifact, card=dataclasses.replace(artifact.card, preprocessing=other)),
    )


def with_card(**changes: object) -> Callable[[Context, Artifact], tuple[Context, Artifact]]:
    return lambda context, artifact: (
        context,
        dataclasses.replace(artifact, card=dataclasses.replace(artifact.card, **changes)),  # type: ignore[arg-type]
    )


MATTERS = {
    "preprocessing": with_preprocessing,
    "input size": with_input_size,
    "classes": with_card(classes=tuple("abcdefghij")),
    "precision (it selects the kernels)": with_card(precision="int8"),
}


def keys(
    store: Store,
    context: Context,
    artifact: Artifact,
    execution: Execution | None = None,
    timing: Timing | None = None,
) -> dict[str, str]:
    """The key that each kind of measurement is kept by; nothing is measured."""
    asked: list[str] = []

    class AskedError(Exception):
        pass

    class Asking(Bench):
        def _obtain(self, key: Key, build: object, read: object, artifact: Artifact) -> NoReturn:
            asked.append(key.digest)
            raise AskedError

    bench = Asking(store, context, timing or QUICK)
    (candidate,) = [Candidate(artifact, execution)] if execution else bench.candidates(artifact)
    for ask in (
        lambda: bench.answers(candidate),
        lambda: bench.footprint(candidate),
        lambda: bench.speed([candidate]),
    ):
        with pytest.raises(AskedError):
            ask()
    return dict(zip(("answers", "footprint", "speed"), asked, strict=True))


@pytest.mark.parametrize("change", MATTERS)
def test_what_a_measurement_depends_on_is_in_its_key(
    change: str, store: Store, trained: Artifact, digits_context: Context
) -> None:
    before = keys(store, digits_context, trained)
    after = keys(store, *MATTERS[change](digits_context, trained))
    assert before.keys() == after.keys() == {"answers", "footprint", "speed"}
    assert not set(before.values()) & set(after.values())


def test_how_it_is_run_is_in_the_key_of_every_measurement(
    store: Store, trained: Artifact, digits_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = keys(store, digits_context, trained)
    assert plain == keys(store, digits_context, trained, Execution("exported"))
    threads = keys(store, digits_context, trained, Execution("exported", threads=1))
    monkeypatch.setitem(STARTED_WITH, "GOMP_SPINCOUNT", "77")
    spinning = keys(store, digits_context, trained)
    monkeypatch.setitem(STARTED_WITH, "NOBODY_READS_THIS", "1")
    assert spinning == keys(store, digits_context, trained)
    for name in plain:
        assert len({plain[name], threads[name], spinning[name]}) == 3


def test_which_executions_take_turns_is_no_input_of_a_turn(
    store: Store, trained: Artifact, digits_context: Context
) -> None:
    named = QUICK.model_copy(update={"executions": ("exported",)})
    assert keys(store, digits_context, trained, timing=named) == keys(store, digits_context, trained)


@pytest.mark.usefixtures("uncompiled")
def test_a_measurement_is_taken_from_the_store_where_nothing_changed(
    store: Store, trained: Artifact, session: Session, digits_context: Context
) -> None:
    assert keys(store, digits_context, trained) == keys(store, digits_context, trained)
    fused = session.apply(trained, Fuse()).artifact
    assert keys(store, digits_context, trained)["answers"] != keys(store, digits_context, fused)["answers"]
    first, second = (speed(store, digits_context, trained) for _ in range(2))
    assert (first.cached, second.cached) == (False, True)
    assert first.value.speeds == second.value.speeds
    assert (first.key, first.seconds, first.created) == (second.key, second.seconds, second.created)


def test_an_accuracy_is_of_the_validation_images_and_of_no_others(
    store: Store, trained: Artifact, digits_context: Context
) -> None:
    data = digits_context.data
    fewer = Split(data.train.sources[:64], Labels(data.train.labels[:64]))
    train = dataclasses.replace(digits_context, data=dataclasses.replace(data, train=fewer))
    val = dataclasses.replace(digits_context, data=dataclasses.replace(data, val=fewer))
    before = keys(store, digits_context, trained)
    assert keys(store, train, trained) == before
    after = keys(store, val, trained)
    assert {name for name in before if after[name] != before[name]} == {"answers", "speed"}


def speed(store: Store, context: Context, *artifacts: Artifact) -> Kept[SpeedTable]:
    """Timed in turns, each by its preferred execution."""
    with Bench(store, context, QUICK) as bench:
        return bench.speed([bench.candidates(artifact)[0] for artifact in artifacts])


@pytest.mark.usefixtures("uncompiled")
def test_names_and_order_of_a_set_are_not_in_its_key(
    store: Store, trained: Artifact, session: Session, digits_context: Context
) -> None:
    """A recipe and the API, which call things by other names, share what was measured."""
    one, two = session.apply(trained, Fuse()), session.apply(trained, Fuse(), "folded")
    first = speed(store, digits_context, trained, one.artifact)
    again = speed(store, digits_context, trained, two.artifact)
    assert (first.cached, again.cached) == (False, True)
    assert again.created == first.created
    assert again.value.speeds["folded@exported"] == first.value.speeds["fuse@exported"]
    assert again.value.references == first.value.references == ("eager", "eager channels-last")
    assert again.value.speeds.keys() == {"baseline@exported", "folded@exported", *again.value.references}
    both = [asked["answers"] for asked in (keys(store, digits_context, step.artifact) for step in (one, two))]
    assert both[0] == both[1]
    # The first is the one whose eager module is timed beside the others.
    other = dataclasses.replace(one.artifact, card=trained.card), dataclasses.replace(trained, card=one.artifact.card)
    assert not speed(store, digits_context, *other).cached


@pytest.mark.usefixtures("uncompiled")
def test_equal_artifacts_of_a_set_are_measured_once(
    store: Store, trained: Artifact, session: Session, digits_context: Context
) -> None:
    twins = [session.apply(trained, Fuse(), name).artifact for name in ("one", "two")]
    speeds = speed(store, digits_context, trained, *twins).value.speeds
    assert speeds["one@exported"] == speeds["two@exported"] != speeds["baseline@exported"]


def test_every_file_of_the_runtime_that_measures_is_in_the_keys() -> None:
    """What is opened by an engine's name alone is found too, wherever its file lies."""
    root = Path(runtime.__file__).parent
    files = {
        ".".join(("serve", "runtime", *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")
    }
    names = {name.removesuffix(".__init__") for name in files}
    found = closure(answer.__module__, Child.__module__, Predictor.__module__)
    # `protocol` reads requests, `service` and its files batch them, `serving` and `execution_chain` say what an archive
    # opens, `evidence` and `known_answer` what was measured of it, `self_check` asks for that; `garbage_collection`,
    # `logs` and `observation` are of a process that serves: nothing that is measured here is one.
    records = ("card.serving", "card.evidence", "card.known_answer")
    asked = ("protocol", "self_check", "execution_chain", "garbage_collection", "logs", "observation")
    batching = ("service", "pending_request", "queues", "decoding", "engine_thread", "stages")
    unread = {"serve.runtime.registry", *(f"serve.runtime.{name}" for name in records)}
    unread |= {f"serve.runtime.service.{name}" for name in (*asked, *batching)}
    assert {name for name in names if name not in found} <= unread


# --- pairs


def rows_of(store: Store, context: Context, *steps: Step, timing: Timing = QUICK) -> Measurements:
    return measure(list(steps), Bench(store, context, timing))


@pytest.mark.usefixtures("uncompiled")
def test_every_engine_that_runs_an_artifact_measures_it(
    store: Store, session: Session, digits_context: Context
) -> None:
    baseline = session.baseline(SHORT)
    graph = session.apply(baseline.artifact, Onnx())
    found = rows_of(store, digits_context, baseline, graph)
    pairs = {pair.id: pair for row in found.rows for pair in row.pairs}
    assert list(pairs) == ["baseline@exported", "onnx@openvino", "onnx@onnxruntime"]
    for pair in pairs.values():
        assert pair.measured is not None
        assert pair.measured.footprint.load_ms > 0
        assert pair.measured.latency_ms.p50 > 0
    providers = {name: pair.provider for name, pair in pairs.items()}
    assert providers == {
        "baseline@exported": "aten/cpu",
        "onnx@openvino": "openvino/CPU",
        "onnx@onnxruntime": "onnxruntime/CPUExecutionProvider",
    }
    # The float graph's pairs are what its absence would have to excuse.
    assert [line.name for line in found.references] == ["eager", "eager channels-last"]
    without = rows_of(store, digits_context, baseline)
    absent = {line.name: line.skip for line in without.references if line.skip is not None}
    assert absent.keys() == {"onnxruntime FP32", "openvino FP32"}
    assert {skip.kind for skip in absent.values()} == {"not_applicable"}


@pytest.mark.usefixtures("uncompiled")
def test_float_engines_are_timed_in_the_same_turns_though_no_artifact_is_a_float_graph(
    store: Store, session: Session, digits_context: Context
) -> None:
    steps = [session.baseline(SHORT)]
    steps.append(session.apply(steps[0].artifact, Fuse()))
    bench = Bench(store, digits_context, QUICK)
    found = measure(steps, bench, functools.partial(graph_of, session))
    timed = {line.name for line in found.references if line.measured is not None}
    assert {"onnxruntime FP32", "openvino FP32"} <= timed
    assert [row.name for row in found.rows] == ["baseline", "fuse"]
    medians = {name: statistics.median(speed.medians()) for name, speed in found.turns.speeds.items()}
    assert medians.keys() == timed | {"baseline@exported", "fuse@exported"}
    assert found.turns.yardstick == min(medians, key=medians.__getitem__)
    graph = graph_of(session, steps[0].artifact)
    assert graph.cached
    kept = {key for artifact in graph.artifact.line() for key in artifact.objects}
    assert len(kept) >= 4
    assert kept <= found.keys  # pruning keeps what the run stands on, or the next one makes it again

    def none(eager: Artifact) -> Step:
        raise RuntimeError("no exporter")

    without = {
        line.name: str(line.skip) for line in measure(steps[:1], Bench(store, digits_context, QUICK), none).references
    }
    assert "no exporter" in without["openvino FP32"]


@pytest.mark.usefixtures("uncompiled")
def test_executions_that_are_named_are_measured_and_no_others(
    store: Store, session: Session, digits_context: Context
) -> None:
    baseline = session.baseline(SHORT)
    graph = session.apply(baseline.artifact, Onnx())
    fused = session.apply(baseline.artifact, Fuse())
    one = Execution("openvino", threads=1)
    timing = QUICK.model_copy(update={"executions": (one, "onnxruntime", "openvino", "onnxruntime")})
    found = rows_of(store, digits_context, baseline, graph, fused, timing=timing)
    ids = {row.name: [pair.id for pair in row.pairs] for row in found.rows}
    assert ids == {
        "baseline": ["baseline@exported"],  # the measure of all others, whatever is named
        "onnx": ["onnx@openvino[threads=1]", "onnx@onnxruntime", "onnx@openvino"],
        "fuse": [],
    }
    skip = found.rows[2].skip
    assert skip is not None
    assert skip.reason.startswith("none of the chosen executions can run it: openvino[threads=1], ")


@pytest.mark.usefixtures("uncompiled")
def test_the_death_of_one_process_is_one_skip(
    store: Store, session: Session, digits_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = session.baseline(SHORT)
    graph = session.apply(baseline.artifact, Onnx())
    real = Bench.speed

    def killed_before(self: Bench, candidates: Sequence[Candidate]) -> Kept[SpeedTable]:
        victim = next(candidate for candidate in candidates if candidate.id == "onnx@openvino")
        os.kill(self._load(victim).worker.pid, signal.SIGKILL)
        return real(self, candidates)

    monkeypatch.setattr(Bench, "speed", killed_before)
    found = rows_of(store, digits_context, baseline, graph)
    dead, living = found.rows[1].pairs
    assert dead.skip is not None
    assert dead.skip.kind == "failed"
    assert dead.skip.reason.startswith("measuring its speed failed: its process was ended by SIGKILL")
    assert living.measured is not None
    assert found.rows[1].best == living
    assert found.rows[0].measured is not None
    # A failure of the moment is not kept.
    monkeypatch.setattr(Bench, "speed", real)
    again = rows_of(store, digits_context, baseline, graph)
    assert [pair.skip for pair in again.rows[1].pairs] == [None, None]
    assert not again.measurement.cached
    assert rows_of(store, digits_context, baseline, graph).measurement.cached


@pytest.mark.parametrize("readable", range(5))
def test_speed_is_of_images_that_can_be_read(readable: int, store: Store, digits_context: Context) -> None:
    sources = [encoded(digits_context.data.val.sources[row]) if row == readable else b"no image" for row in range(5)]
    val = Split(sources, Labels(digits_context.data.val.labels[:5]))
    context = dataclasses.replace(digits_context, data=dataclasses.replace(digits_context.data, val=val))
    with Bench(store, context, QUICK) as bench:
        one, three = bench._batch(1), bench._batch(3)
    assert one.shape[0] == 1
    assert all(torch.equal(image, one[0]) for image in three)


def test_nothing_is_started_where_everything_is_stored(
    store: Store, session: Session, digits_context: Context, monkeypatch: pytest.MonkeyPatch, uncompiled: None
) -> None:
    baseline = session.baseline(SHORT)
    first = rows_of(store, digits_context, baseline)

    def started() -> NoReturn:
        raise AssertionError("a process was started")

    monkeypatch.setattr(processes, "worker", started)
    again = rows_of(store, digits_context, baseline)
    assert again.rows == first.rows
    assert again.measurement.cached
    assert again.keys == first.keys


def test_an_artifact_for_another_device_says_where_it_runs(
    store: Store, trained: Artifact, digits_context: Context
) -> None:
    on_gpu = dataclasses.replace(trained, card=dataclasses.replace(trained.card, device="cuda"))
    with pytest.raises(EngineError, match="runs on CUDA only, and "):
        Bench(store, digits_context).candidates(on_gpu)
    on_cpu = dataclasses.replace(trained, card=dataclasses.replace(trained.card, device="cpu"))
    with pytest.raises(EngineError, match=r"runs on the CPU only, and this is measured on cuda; .* MEASURE=cpu"):
        Bench(store, digits_context, devices=("cuda",)).candidates(on_cpu)


def test_an_artifact_has_pairs_on_every_device_that_is_measured(
    store: Store, trained: Artifact, digits_context: Context
) -> None:
    bench = Bench(store, digits_context, devices=("cpu", "cuda"))
    devices = {candidate.execution.device for candidate in bench.candidates(trained)}
    assert devices == {"cpu", "cuda"}
    assert {"eager", "eager[cpu]", "torch.compile[cpu]"} <= references_on(bench.devices).keys()
    assert references_on(bench.devices)["eager"] == ("eager", "cuda")


def test_where_to_measure_is_every_device_or_a_list() -> None:
    gpu = torch.cuda.is_available()
    assert measured_devices("auto", CPU) == (("cpu", "cuda") if gpu else ("cpu",))
    assert measured_devices("cpu", CPU) == ("cpu",)
    for words in ("cpu,cpu", "", "auto,cpu", "cpu,", "gpu"):
        with pytest.raises(UserError):
            measured_devices(words, CPU)
    if not gpu:
        with pytest.raises(UserError, match="0 CUDA devices"):
            measured_devices("cpu, cuda", CPU)
