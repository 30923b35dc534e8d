"""The search for each layer's precision, on a network that int8 breaks in one layer, and what it must never return."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import optimize as opt
from optimize import api, cli
from optimize.listener import SILENT
from optimize.measure import bench as measuring
from optimize.measure.figures import Accuracy, Difference, Footprint, Measured
from optimize.measure.latency import Speed
from optimize.measure.processes import Worker
from optimize.measure.rows import Judgement, ModelFile, Pair, Row, Skip
from optimize.models.checkpoint import read_checkpoint
from optimize.models.model_names import resolve_model
from optimize.models.preprocessing_config import Wish
from optimize.passes.onnx import Onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.precision import search as searching
from optimize.precision.precision_records import Budget, Figure, Found, Trial
from optimize.precision.precision_table import print_search
from optimize.precision.quantizable_layers import layers_of, ranks
from optimize.precision.search import Search, choose, search
from optimize.precision.search_explanation import Choice, why
from optimize.precision.search_files import write_search
from optimize.precision.search_job import to_pack
from optimize.precision.sensitivity import sensitivity
from optimize.precision.trials import Bed, choose_execution, named
from optimize.run import pipeline
from optimize.run.image_halves import Halves, halves
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.run.recipe import load_recipe
from optimize.run.relative_speeds import turns
from optimize.run.session import Session, Step
from optimize.store.objects import Store
from optimize.tasks.classification import CLASSIFICATION
from optimize.variant import Variant
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import execution_id
from serve.runtime.errors import EngineError, PipelineError, UserError
from tests.optimize.runs_fixtures import Heard, write_recipe
from tests.optimize.workbench import TINY_NET, noting
from tests.programs import Programs

LAYERS = ("stem.0", "depthwise.0", "expand.0", "residual.0", "head")
BROKEN = "expand.0"
pytestmark = pytest.mark.usefixtures("uncompiled")

#: One engine, and as few calls as there can be: no test here reads a time.
QUICK = opt.Timing(rounds=1, batch_sizes=(1,), seconds=0.001, minimum=1, executions=("onnxruntime",))
#: Without the gate, so that a broken network is measured like another.
OPEN = opt.Ptq(images=64, observer="minmax", min_sqnr=-1e6, min_agreement=0.0)
BUDGET = 0.05


@pytest.fixture(scope="module")
def checkpoint(trained, tmp_path_factory) -> Path:
    """The tiny network with an outlier: one layer's weights for a channel that is always 0 are 300 times the others.

    In float it changes nothing. In int8 the scale of each of the layer's output channels is that of the outlier, and
    its other weights become 0.
    """
    state = {name: tensor.clone() for name, tensor in trained.module().state_dict().items()}
    state["depthwise.1.weight"][0] = 0.0
    state["depthwise.1.bias"][0] = -1.0  # behind its ReLU this is 0, in float and in int8
    weight = state["expand.0.weight"]
    weight[:, 0] = 300 * weight.abs().max()
    path = tmp_path_factory.mktemp("outlier") / "outlier.pt"
    torch.save(state, path)
    return path


RECIPE: dict[str, Any] = {
    "stages": [{"pass": "fuse"}, {"pass": "ptq", "config": OPEN.model_dump(mode="json", exclude_defaults=True)}],
    "preprocessing": {"resize": 16, "crop": 16, "mean": 0.5, "std": 0.25},
    "measure": QUICK.model_dump(mode="json"),
}

#: A recipe with every section.
SECTIONS: dict[str, Any] = {
    **RECIPE,
    "baseline": {"epochs": 2},
    "recommend": {"max_drop": 0.02},
    "serving": {"workers": 2, "buckets": [1, 4]},
}


@dataclass
class Bench:
    """A session on the broken network, and its baseline."""

    session: Session
    baseline: Step
    heard: Heard = field(default_factory=Heard)


def opened(store: Path, checkpoint: Path, context: Any, listener: Any = None) -> Bench:
    heard = Heard() if listener is None else listener
    session = Session(Store(store), resolve_model(f"{TINY_NET}:tiny"), dataclasses.replace(context, listener=heard))
    return Bench(session, session.baseline(checkpoint=read_checkpoint(checkpoint)), heard)


@pytest.fixture(scope="module")
def bench(checkpoint, digits_context, tmp_path_factory, uncompiled) -> Bench:
    return opened(tmp_path_factory.mktemp("search-store"), checkpoint, digits_context)


def searched(bench: Bench, **by: Any) -> tuple[Found, frozenset[str]]:
    wanted = Search(**{"max_drop": BUDGET, **by})
    return search(bench.session, bench.baseline, wanted, ptq=OPEN, timing=QUICK, devices=("cpu",))


def fused(bench: Bench):
    return bench.session.apply(bench.baseline.artifact, opt.Fuse()).artifact


def test_the_layers_are_those_that_ptq_quantizes(bench) -> None:
    weights = layers_of(fused(bench), OPEN, bench.session.context)
    assert weights == {"stem.0": 144, "depthwise.0": 144, "expand.0": 4608, "residual.0": 9216, "head": 1280}
    kept = layers_of(fused(bench), OPEN.model_copy(update={"keep_float": ("head",)}), bench.session.context)
    assert list(kept) == list(LAYERS[:-1])


def test_the_broken_layer_comes_first_in_the_order(bench) -> None:
    found, _ = ranks(bench.session, fused(bench), OPEN)
    assert list(found) == list(LAYERS)
    others = [ratio for name, ratio in found.items() if name != BROKEN]
    assert found[BROKEN] < 10 < min(others)


@pytest.mark.slow
def test_the_search_leaves_the_broken_layer_in_float_and_quantizes_the_others(bench) -> None:
    found, keys = searched(bench)
    assert [trial.bits for trial in found.trials] == [{}, {BROKEN: 32}]
    leaves_the_broken_layer_in_float(found)
    assert keys >= set(bench.baseline.artifact.objects)
    assert ranks(bench.session, fused(bench), OPEN)[1] in keys, "prune would take the order"


def leaves_the_broken_layer_in_float(found: Found) -> None:
    """What both methods come to on this network."""
    first = found.trials[0]
    assert first.bits == {}
    assert not first.holds
    assert first.delta is not None
    assert first.delta < -0.3, "with all layers in int8 it is broken"
    (held,) = [trial for trial in found.trials if trial.bits == {BROKEN: 32}]
    assert held.holds
    assert held.speedup is not None
    assert held.delta is not None
    assert held.delta >= -BUDGET
    assert all(BROKEN in trial.bits for trial in found.trials if trial.holds)
    returned(found)


def returned(found: Found) -> None:
    """What every search keeps: an int8 pair that is returned is not slower than the fastest float execution."""
    assert found.pair is not None
    text = " ".join(found.why)
    if set(found.bits.values()) == {32}:
        assert "INT8 loses here" in text or "No trial keeps" in text
    else:
        # Of those that hold, halving has more than one; which is the fastest is no property of the network.
        assert found.bits in [dict.fromkeys(LAYERS, 8) | trial.bits for trial in found.trials if trial.holds]
        assert found.p50 is not None
        assert found.p50 <= found.fastest_float_p50
    assert found.judged is not None
    assert found.judged.images + found.chose == 359


@pytest.mark.slow
def test_what_was_found_is_written_with_a_recipe_that_makes_it(bench, checkpoint, tmp_path: Path) -> None:
    found, keys = searched(bench)
    store = bench.session.store
    given = load_recipe(write_recipe(tmp_path, SECTIONS))
    folder = write_search(found, keys, store, "tiny", given)
    assert Found.from_json(json.loads((folder / "search.json").read_text())) == found
    assert set(json.loads((folder / "objects.json").read_text())) == keys
    recipe = load_recipe(folder / "recipe.yaml")
    for section in ("baseline", "preprocessing", "measure", "recommend", "serving"):
        own, wanted = getattr(recipe, section), getattr(given, section)
        assert own == wanted
        assert own.model_fields_set == wanted.model_fields_set, "what is not set is left to whoever serves"
    # What a run of it would make is what the search made.
    wish = Wish(recipe.preprocessing)
    job = Job(model=f"{TINY_NET}:tiny", checkpoint=checkpoint, store=store.root, device="cpu")
    again = open_job(job, SILENT, wish)
    with contextlib.closing(again.session):
        steps = {"baseline": again.session.baseline(recipe.baseline, again.checkpoint, again.origin)}
        for stage in recipe.stages:
            steps[stage.name] = again.session.apply(steps[stage.parent].artifact, stage.config, stage.name)
    assert found.pair is not None
    assert found.pair.partition("@")[0] in steps
    assert all(step.cached for step in steps.values())
    assert {key for step in steps.values() for key in step.artifact.objects} <= keys


def test_where_nothing_was_found_no_recipe_stays_behind(tmp_path: Path) -> None:
    store, given = Store(tmp_path / "store"), load_recipe(write_recipe(tmp_path, SECTIONS))
    stages = ({"pass": "fuse", "name": "fuse", "from": "baseline", "config": {}},)
    some = ended_with(chosen(Case("baseline", 10)), stages=stages, why=("It is\nso.",))
    folder = write_search(some, {"0" * 64}, store, "net", given)
    assert (folder / "recipe.yaml").read_text().startswith("# It is so.\nstages:\n")
    assert [stage.name for stage in load_recipe(folder / "recipe.yaml").stages] == ["fuse"]
    nothing = ended_with(chosen(Case("baseline", 10), max_latency_ms=1.0), stages=stages)
    assert nothing.pair is None
    assert write_search(nothing, {"0" * 64}, store, "net", given) == folder
    assert {path.name for path in folder.iterdir()} == {"files.json", "search.json", "objects.json"}


@pytest.mark.parametrize(
    "more",
    [
        {"checkpoint": Path("my weights.pt"), "weights_key": "ema", "trust_checkpoint": True, "image_size": 96},
        {"weights": "DEFAULT", "seed": 3, "run": "mine", "val_images": 7, "skip_unreadable": True},
        {"data": "imagefolder:/some where", "device": "cpu", "measure": "cpu", "store": Path("/a store")},
    ],
)
def test_the_command_that_packs_it_has_every_option_of_the_search(monkeypatch, more: dict[str, Any]) -> None:
    seen: list[Job] = []

    def stop(job: Job, _: object) -> NoReturn:
        seen.append(job)
        raise UserError("enough")

    monkeypatch.setattr(pipeline, "run", stop)
    job = Job(model="resnet18", **more)
    _, flag, program, *words = shlex.split(to_pack(job, Path("/a store/net.search")))
    assert (flag, program) == ("-m", "optimize")
    assert CliRunner().invoke(cli.app, words).exit_code == 2
    (packed,) = seen
    assert packed.recipe == Path("/a store/net.search/recipe.yaml")
    differing = {name for name in Job.model_fields if getattr(packed, name) != getattr(job, name)}
    assert differing <= {"recipe", "preprocessing"}


class Broken(Heard):
    """Whether the second trial is being made."""

    now = False

    def started(self, name: str) -> None:
        self.now = name == "trial 2"


@pytest.mark.slow
def test_a_trial_that_could_not_be_timed_holds_as_it_held_and_is_timed_the_next_time(
    bench, checkpoint, digits_context, monkeypatch
) -> None:
    store, listener, released = bench.session.store.root, Broken(), list[str]()
    once = opened(store, checkpoint, digits_context, listener)
    timing = QUICK.model_copy(update={"seconds": 0.002})  # of its own: none of its times is there
    turn = Worker.turn

    def breaking(worker: Worker, size: int, timing: opt.Timing) -> list[float]:
        if listener.now:
            raise PipelineError("its process was killed")
        return turn(worker, size, timing)

    monkeypatch.setattr(Worker, "turn", breaking)
    noted = noting(released, measuring.Bench.release, lambda self, candidate: candidate.id)
    monkeypatch.setattr(measuring.Bench, "release", noted)
    by = Search(max_drop=BUDGET)
    found, keys = search(once.session, once.baseline, by, ptq=OPEN, timing=timing, devices=("cpu",))
    assert [trial.bits for trial in found.trials] == [{}, {BROKEN: 32}], "what held did not steer the search wrong"
    untimed = found.trials[1]
    assert (untimed.holds, untimed.p50, untimed.speedup) == (True, None, None)
    assert untimed.delta is not None
    assert untimed.delta >= -BUDGET
    assert "could not be timed: its process was killed" in str(untimed.skip)
    assert any(name.startswith("onnx-int8-") for name in released), "its process had ended before the next trial"
    assert all(once.session.store.open(key) is not None for key in keys)
    monkeypatch.undo()
    again, _ = search(once.session, once.baseline, by, ptq=OPEN, timing=timing, devices=("cpu",))
    assert again.trials[1].p50 is not None
    assert again.trials[1].skip is None
    assert again.trials[1].delta == untimed.delta


@pytest.mark.slow
def test_sixteen_bits_are_tried_for_what_stays_in_float(bench) -> None:
    found, _ = searched(bench, bits=(8, 16, 32))
    assert [trial.bits for trial in found.trials] == [{}, {BROKEN: 32}, {BROKEN: 16}]
    # Its outliers are far below 65504, and 11 bits of mantissa are enough.
    assert found.trials[-1].holds
    assert found.why[-1].startswith("16 bits are FP16 weights, and arithmetic in executions that have it; ")
    assert "OpenVINO kept to FP32" in found.why[-1]


@pytest.mark.slow
def test_a_latency_that_nothing_has_is_said(bench) -> None:
    found, _ = searched(bench, max_latency_ms=1e-6)
    assert found.pair is None
    assert found.bits == {}
    assert any(sentence.startswith("Nothing keeps the budget of 5 points") for sentence in found.why)


@pytest.mark.slow
def test_trials_can_be_limited(bench) -> None:
    found, _ = searched(bench, method="halving", max_trials=1)
    assert len(found.trials) == 1
    assert "No more trials were allowed than 1." in found.why
    returned(found)


@pytest.mark.slow
def test_sensitivity_tells_the_broken_layer_from_another(bench, monkeypatch) -> None:
    looked_at = (BROKEN, "residual.0")
    others = tuple(name for name in LAYERS if name not in looked_at)
    config = OPEN.model_copy(update={"keep_float": others})
    found, keys = sensitivity(bench.session, fused(bench), config, timing=QUICK, devices=("cpu",))
    assert tuple(layer.name for layer in found.layers) == looked_at
    assert found.whole.difference.delta < -0.3
    for layer in found.layers:
        alone, all_but, broken = layer.alone, layer.all_but, layer.name == BROKEN
        assert isinstance(alone, Figure), alone
        assert isinstance(all_but, Figure), all_but
        assert (alone.difference.delta < -0.3) == broken
        assert (all_but.difference.delta < -0.3) == (not broken)
        assert alone.sqnr_db is not None
        assert (alone.sqnr_db < 10) == broken
        assert alone.difference.low <= alone.difference.delta <= alone.difference.high
    assert keys
    # A second time nothing is made or measured.
    made: list[str] = []
    obtain = Store.obtain

    def noted(store: Store, key: str, build: Any, *args: Any, **more: Any) -> Any:
        stored = obtain(store, key, build, *args, **more)
        if not stored.cached:
            made.append(key)
        return stored

    monkeypatch.setattr(Store, "obtain", noted)
    assert sensitivity(bench.session, fused(bench), config, timing=QUICK, devices=("cpu",)) == (found, keys)
    assert not made


#: The command line, without the reference that takes its time to compile.
UNCOMPILED = "from optimize.measure.references import REFERENCES as r; r.pop('torch.compile'); from optimize import cli"


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on_where_it_was(bench, checkpoint, tmp_path: Path, programs: Programs) -> None:
    recipe, store = tmp_path / "recipe.yaml", tmp_path / "store"
    recipe.write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    searched(bench)  # trial 1 and all float executions, which the store then has
    shutil.copytree(bench.session.store.root, store)
    words = [
        *("search", f"{TINY_NET}:tiny", "--checkpoint", str(checkpoint), "--recipe", str(recipe)),
        *("--store", str(store), "--name", "killed", "--max-drop", "5pp", "--method", "halving"),
        *("--device", "cpu", "--measure", "cpu", "--json"),
    ]
    # It need not wait for whoever measures on this machine, as these tests do not.
    unheld = f"from optimize.measure import process_pool; process_pool.LOCK_FILE = {str(tmp_path / 'measuring.lock')!r}"
    first = programs.start("-c", f"{UNCOMPILED}; {unheld}; cli.main()", *words)
    for line in first.stderr:
        if "+ trial 2" in line:
            first.send_signal(signal.SIGKILL)
            assert "from the cache" not in line
            break
        assert "trial" not in line or "from the cache" in line
    else:
        pytest.fail("the search ended before its second trial")
    assert first.end().returncode == -signal.SIGKILL
    folder = store / "killed.search"
    assert not folder.exists()
    second = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert second.exit_code == 0
    cached = ["from the cache" in line for line in second.stderr.splitlines() if "+ trial" in line]
    assert cached[:2] == [True, True]
    assert not all(cached)
    leaves_the_broken_layer_in_float(Found.from_json(json.loads(second.stdout)))
    assert {path.name for path in folder.iterdir()} == {"files.json", "search.json", "objects.json", "recipe.yaml"}
    never = CliRunner().invoke(cli.app, [*words, "--max-latency-ms", "0.000001"])
    assert never.exit_code == 1
    assert never.stderr.splitlines()[-1] == "error: no trial meets the budget"


@pytest.mark.slow
def test_the_api_gives_the_artifact_that_was_found(bench) -> None:
    base = Variant(bench.session, bench.baseline)
    result = opt.search(base, max_drop=BUDGET, ptq=OPEN, timing=QUICK, measure="cpu")
    assert isinstance(result, api.Searched)
    assert result.variant is not None
    assert result.found.pair is not None
    assert result.variant.name == result.found.pair.partition("@")[0]
    assert str(result) == "\n".join(result.found.why)


@pytest.mark.parametrize("bits", [(8,), (16, 32), (8, 4), ()])
def test_bits_are_8_and_at_least_one_more(bits: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="bits: must be 8 and at least one of 16 and 32"):
        Search(bits=bits)


def test_an_engine_that_there_is_not_is_refused_before_anything_is_made() -> None:
    with pytest.raises(UserError, match=r"openvinyl.*did you mean openvino"):
        Search(execution="openvinyl")
    assert Search(execution="onnxruntime[threads=1]").execution == "onnxruntime[threads=1]"


@pytest.mark.parametrize("name", ["torchscript", "onnxruntime[threads=1]"])
def test_an_execution_that_the_float_graph_has_not_is_refused_before_anything_is_measured(
    bench, monkeypatch, name: str
) -> None:
    def never(*_: object, **__: object) -> NoReturn:
        pytest.fail("something was measured, or an order found")

    monkeypatch.setattr(searching, "measure", never)
    monkeypatch.setattr(searching, "ranks", never)
    said = re.escape(f"no execution '{name}' of the float graph works here; use onnxruntime")
    with pytest.raises(UserError, match=said):
        searched(bench, execution=name)
    monkeypatch.setattr(Bed, "make", never)
    with pytest.raises(UserError, match=said):
        sensitivity(bench.session, fused(bench), OPEN, timing=QUICK, devices=("cpu",), execution=name)


def test_an_execution_is_named_by_its_engine_or_by_all_that_is_not_usual_of_it() -> None:
    usual, single, other = Execution("onnxruntime"), Execution("onnxruntime", threads=1), Execution("openvino")
    every = [usual, single, other]
    assert named(every, None, "it") == every
    assert named(every, "onnxruntime", "it") == [usual, single]
    assert named(every, "onnxruntime[threads=1]", "it") == [single]
    with pytest.raises(
        UserError, match=r"no execution 'openvino\[cuda\]' of it works here; use .*threads=1\], openvino$"
    ):
        named(every, "openvino[cuda]", "it")


def test_where_the_gate_lets_nothing_pass_trials_run_by_an_execution_that_works(bench, monkeypatch) -> None:
    session, parent = bench.session, fused(bench)
    graph = session.apply(parent, Onnx()).artifact
    refusing = OPEN.model_copy(update={"min_sqnr": 200.0})
    timing = QUICK.model_copy(update={"executions": ("onnxruntime", "openvino")})
    with measuring.Bench(session.store, session.context, timing) as own:
        first, second = (candidate.execution for candidate in own.candidates(graph))

        def probe(_: measuring.Bench, execution: Execution) -> str:
            if execution == first:
                raise EngineError("it is not installed")
            return "0" * 64

        monkeypatch.setattr(measuring.Bench, "probe", probe)
        bed = Bed(session, own, parent, refusing, OnnxInt8())
        assert choose_execution(bed, graph, None) == (second, ())
        assert choose_execution(bed, graph, execution_id(second)) == (second, ())
        with pytest.raises(
            UserError, match=f"no execution '{first.engine}' of the float graph works here; use {second.engine}"
        ):
            choose_execution(bed, graph, first.engine)

        def broken(_: measuring.Bench, execution: Execution) -> str:
            raise EngineError("it is not installed")

        monkeypatch.setattr(measuring.Bench, "probe", broken)
        reasons = f"no execution runs {graph.name} here: {first.engine}: it is not installed; {second.engine}: "
        with pytest.raises(EngineError, match=reasons):
            choose_execution(bed, graph, None)


def test_an_engine_that_cannot_be_timed_is_named_and_trials_run_by_another(bench, monkeypatch) -> None:
    engines, failing = ("onnxruntime", "openvino"), set[int]()
    timing = QUICK.model_copy(update={"executions": engines, "seconds": 0.003})  # of its own: no times are there
    turn = Worker.turn

    def breaking(worker: Worker, size: int, timing: opt.Timing) -> list[float]:
        failing.add(next(iter(failing), id(worker)))  # the first one
        if id(worker) in failing:
            raise PipelineError("its process was killed")
        return turn(worker, size, timing)

    monkeypatch.setattr(Worker, "turn", breaking)
    session, parent = bench.session, fused(bench)
    graph = session.apply(parent, Onnx()).artifact
    with measuring.Bench(session.store, session.context, timing) as own:
        bed = Bed(session, own, parent, OPEN, OnnxInt8())
        execution, (said,) = choose_execution(bed, graph, None)
        (other,) = [engine for engine in engines if engine != execution.engine]
        assert said == (
            f"onnx-int8@{other} could not be timed: its process was killed; "
            f"onnx-int8@{execution.engine} is the fastest of the others"
        )
        assert said in bench.heard.lines
        assert all(session.store.open(key) is not None for key in bed.keys), "times without one of them are not kept"

        def killed(*_: object) -> NoReturn:
            raise PipelineError("it was killed, too")

        monkeypatch.setattr(Worker, "turn", killed)
        with pytest.raises(EngineError, match=r"@\w+ could not be timed: it was killed, too; onnx-int8@"):
            choose_execution(bed, graph, None)


def test_what_is_no_float_module_cannot_be_searched(bench) -> None:
    base = Variant(bench.session, bench.baseline)
    quantized = opt.apply(base, OPEN)
    with pytest.raises(UserError, match="search needs a float module"):
        opt.search(quantized)
    with pytest.raises(UserError, match="search takes a variant"):
        opt.search("resnet18")  # type: ignore[arg-type]


# What is chosen of a last measurement, with numbers that no machine measured.

IMAGES = 100


@dataclass(frozen=True)
class Case:
    """A pair: its milliseconds, whether it is int8, how many images it loses, its size, milliseconds between rounds."""

    name: str
    ms: float
    int8: bool = False
    lost: int = 0
    bytes: int = 100
    between: float = 0.0

    def speed(self) -> Speed:
        return Speed({1: [[self.ms + self.between * (number - 3)] for number in range(7)]})

    @property
    def id(self) -> str:
        return f"{self.name}@e"


def chosen(*cases: Case, reference: float | None = None, **by: Any) -> Choice:
    """The choice among pairs, the first of which is the baseline; ``reference`` is an eager one's time."""
    speeds = {case.id: case.speed() for case in cases}
    if reference is not None:
        speeds["eager"] = Speed({1: [[reference]] * 7})
    floats = [case.id for case in cases if not case.int8] + (["eager"] if reference is not None else [])
    taken = turns(speeds, floats=floats, baseline=[cases[0].id])
    evidence = {case.id: {"first": torch.arange(IMAGES) >= case.lost} for case in cases}
    rows = [
        Row(
            name=case.name,
            operation="pass",
            config={},
            parent=None,
            file=ModelFile(
                path="m", bytes=case.bytes, key="0", format="onnx", precision="int8" if case.int8 else "float32"
            ),
            pairs=(
                Pair(
                    id=case.id,
                    execution=Execution("e"),
                    measured=Measured(
                        **dict(taken.timed(case.id)),
                        accuracy=Accuracy(
                            scores={"top1": 0.9, "top5": 1.0}, interval=(0.8, 1.0), images=IMAGES, answers="a"
                        ),
                        footprint=Footprint(load_ms=1.0, memory_bytes=1),
                    ),
                ),
            ),
        )
        for case in cases
    ]
    everything = Halves(np.arange(IMAGES), np.arange(IMAGES))
    return choose(rows, taken, evidence, everything, Search(**{"max_drop": 0.05, **by}), task=CLASSIFICATION)


def test_the_fastest_that_keeps_the_budget_is_chosen() -> None:
    found = chosen(Case("baseline", 10), Case("a", 2, int8=True, lost=6), Case("b", 3, int8=True, lost=5))
    assert found.row is not None
    assert found.row.name == "b"
    assert found.refused == {"a@e": "loses 6.00 points"}
    assert (found.float_name, found.float_p50) == ("baseline@e", 10)


@pytest.mark.parametrize(("ms", "name"), [(7.9, "int8"), (8.1, "onnx")])
def test_int8_that_is_slower_than_the_fastest_float_pair_is_not(ms: float, name: str) -> None:
    found = chosen(Case("baseline", 10), Case("onnx", 8), Case("int8", ms, int8=True, bytes=10))
    assert found.row is not None
    assert found.row.name == name
    assert set(found.beaten) == (set() if name == "int8" else {"int8@e"})


def test_nor_is_int8_that_only_a_reference_beats() -> None:
    found = chosen(Case("baseline", 10), Case("int8", 5, int8=True), reference=4)
    assert found.row is not None
    assert found.row.name == "baseline"
    assert (found.float_name, found.float_is_pair) == ("eager", False)


def test_of_equally_fast_ones_the_smallest_is_chosen() -> None:
    found = chosen(
        Case("baseline", 10),
        Case("half", 2.02, int8=True, bytes=20, between=0.02),
        Case("single", 2, int8=True, bytes=30),
    )
    assert found.row is not None
    assert found.row.name == "half"


def test_of_float_pairs_only_the_fastest_is_returned() -> None:
    found = chosen(Case("baseline", 2.02, bytes=20, between=0.02), Case("onnx", 2, bytes=30))
    assert found.row is not None
    assert found.row.name == "onnx"


def test_a_longest_latency_counts_for_float_and_int8() -> None:
    found = chosen(Case("baseline", 10), Case("int8", 5, int8=True), max_latency_ms=4.0)
    assert found.pair is None
    assert found.refused == {"baseline@e": "takes 10 ms", "int8@e": "takes 5 ms"}
    assert found.quickest == (5, "int8@e")


def test_the_two_parts_of_the_images_have_none_in_common() -> None:
    parts = halves(np.arange(101) % 3 == 0)
    assert not set(parts.choose) & set(parts.judge)
    assert len(parts.choose) + len(parts.judge) == 101


def ended_with(choice: Choice, **changes: Any) -> Found:
    """A search that ended with this choice."""
    difference = Difference(delta=-0.002, low=-0.004, high=0.001, gained=1, lost=2)
    return Found(
        title="net on images",
        task="classification",
        budget=Budget(max_drop=0.005, max_latency_ms=None, bits=(8, 32)),
        method="greedy",
        layers=3,
        chose=500,
        trials=(Trial(number=1, bits={}, delta=-0.001, holds=True),),
        pair=choice.pair.id if choice.pair else None,
        execution=choice.pair.execution if choice.pair else None,
        bits={"a": 8, "b": 8, "c": 32},
        p50=choice.p50,
        judged=Judgement(images=500, score=0.9, difference=difference),
        fastest_float=choice.float_name,
        fastest_float_p50=choice.float_p50,
        why=(),
        stages=(),
        timing=QUICK,
        cpu="Imaginary CPU",
    ).model_copy(update=changes)


def told(choice: Choice, **changes: Any) -> list[str]:
    return list(why(ended_with(choice, **changes), choice, []))


def test_it_says_what_the_lowest_latency_is_where_nothing_keeps_the_budget() -> None:
    budget = Budget(max_drop=0.05, max_latency_ms=3.0, bits=(8, 32))
    cases = (Case("baseline", 10), Case("broken", 2, int8=True, lost=6), Case("slow", 12, int8=True))
    said = told(chosen(*cases, max_latency_ms=3.0), budget=budget, judged=None)
    assert said[-1] == (
        "Nothing keeps the budget of 5 points and 3.00 ms: the lowest latency is that of broken@e, 2.00 ms, "
        "which loses 6.00 points."
    )


def test_it_says_so_where_int8_loses() -> None:
    said = " ".join(told(chosen(Case("baseline", 10), Case("int8", 12.5, int8=True))))
    assert "INT8 loses here: int8@e, the fastest that keeps the budget of accuracy, has 0.80 times the speed" in said
    assert "baseline@e is returned, the fastest float pair: 10.0 ms." in said


def test_it_says_which_layers_are_not_int8_and_what_the_other_images_say() -> None:
    said = told(chosen(Case("baseline", 10), Case("int8", 4, int8=True)))
    assert "int8@e is the fastest that keeps the budget: 4.00 ms, 2.50 times as fast as the fastest float" in said[1]
    assert said[2].startswith("2 of 3 layers are int8; not so c:")
    assert said[-1].endswith(
        "−0.20 points from the baseline's (−0.40 to +0.10): the interval excludes a loss beyond the budget."
    )


@pytest.mark.parametrize(
    ("delta", "low", "verdict"),
    [(-0.004, -0.01, "within the budget, which the interval does not prove"), (-0.01, -0.02, "MORE than the budget")],
)
def test_it_says_where_the_other_images_do_not_bear_the_choice_out(delta: float, low: float, verdict: str) -> None:
    difference = Difference(delta=delta, low=low, high=0.0, gained=0, lost=5)
    judged = Judgement(images=500, score=0.9, difference=difference)
    assert verdict in told(chosen(Case("baseline", 10), Case("int8", 4, int8=True)), judged=judged)[-1]


def test_a_loss_of_exactly_the_budget_is_within_it_on_the_other_images_too() -> None:
    allowed = 0.7 / 100  # as --max-drop 0.7 is read: less than 7 / 1000, in binary
    judged = Judgement(
        images=1000, score=0.9, difference=Difference(delta=-7 / 1000, low=-0.02, high=0.0, gained=0, lost=7)
    )
    budget = Budget(max_drop=allowed, max_latency_ms=None, bits=(8, 32))
    said = told(chosen(Case("baseline", 10), Case("int8", 4, int8=True)), judged=judged, budget=budget)
    assert said[-1].endswith("within the budget, which the interval does not prove.")


def test_a_reference_that_is_faster_than_every_pair_is_named() -> None:
    said = " ".join(told(chosen(Case("baseline", 10), Case("int8", 5, int8=True), reference=4)))
    assert "eager is faster and a reference only: it cannot be packed or served." in said


def test_trials_are_printed_a_line_each(capsys) -> None:
    choice = chosen(Case("baseline", 10), Case("int8", 4, int8=True))
    trials = (
        Trial(number=1, bits={}, delta=-0.25, holds=False),
        Trial(number=2, bits={"c": 16, "b": 32}, delta=-0.001, holds=True, p50=4.0),
        Trial(number=3, bits={"b": 32}, delta=0.0, holds=True, skip=Skip(kind="failed", reason="no time")),
    )
    print_search(ended_with(choice, trials=trials))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert lines[1].split() == ["1", "–", "−25.00", "–", "–", "loses", "too", "much"]
    assert lines[2].split() == ["2", "c:16,", "b", "−0.10", "4.00", "–", "holds"]
    assert lines[3].split() == ["3", "b", "0.00", "–", "–", "holds;", "failed:", "no", "time"]
