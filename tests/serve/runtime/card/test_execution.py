"""Executions as records, their names, and which engines run what on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution, unset
from serve.runtime.engines.base import (
    engines,
    execution_id,
    executions_for,
    open_engine,
    pair_id,
    preferred,
    unavailable,
)
from serve.runtime.errors import EngineError, UserError
from serve.runtime.model_files.onnx_file import TINY_GRAPH
from tests.programs import Programs
from tests.serve import artifacts


@given(
    threads=st.none() | st.integers(1, 64),
    buckets=st.lists(st.integers(1, 512), unique=True).map(sorted),
    options=st.dictionaries(st.text("abc_", min_size=1), st.booleans() | st.integers(0, 9) | st.text("xyz")),
)
def test_an_execution_survives_json(threads: int | None, buckets: list[int], options: dict[str, Any]) -> None:
    execution = Execution("openvino", "cpu", threads, tuple(buckets), options)
    assert Execution.from_json(json.loads(json.dumps(execution.to_json()))) == execution


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"engine": "OpenVINO"}, "engine must be a word"),
        ({"engine": "openvino", "device": "gpu"}, "device must be cpu, cuda or cuda:N, found 'gpu'"),
        ({"engine": "openvino", "threads": 0}, "threads must be a whole number from 1"),
        ({"engine": "openvino", "buckets": [8, 1]}, r"buckets must ascend, found \[8, 1\]"),
        ({"engine": "openvino", "options": {"x": [1]}}, "option x must be a number, a word, true or false"),
        ({"engine": "openvino", "thread": 1}, "unknown field 'thread' .did you mean threads"),
        ({"device": "cpu"}, "the engine is missing"),
        (["openvino"], "must be a mapping"),
    ],
)
def test_an_illegal_execution_is_refused_by_field_and_value(body: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Execution.from_json(body)


def test_the_name_of_an_execution_says_only_what_is_not_as_usual() -> None:
    assert execution_id(Execution("openvino")) == "openvino"
    assert execution_id(Execution("exported", "cuda")) == "exported[cuda]"
    assert execution_id(Execution("onnxruntime-cuda", "cuda")) == "onnxruntime-cuda"
    assert execution_id(Execution("onnxruntime", threads=1, buckets=(1, 8))) == "onnxruntime[threads=1,buckets=1+8]"
    assert pair_id("onnx-int8", Execution("openvino", options={"precision": "bf16"})) == (
        "onnx-int8@openvino[precision=bf16]"
    )


def test_an_environment_that_torchs_threads_were_not_measured_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    told = unset(Execution("torchscript", threads=2), computes_with_torch=True)
    assert (
        told
        == "speeds were measured with GOMP_SPINCOUNT=10000, which is not set here: set it before you start the server"
    )
    assert unset(Execution("openvino", threads=2), computes_with_torch=False) is None
    assert unset(Execution("torchscript", threads=1), computes_with_torch=True) is None  # nobody waits for another
    assert unset(Execution("torchscript", "cuda", threads=2), computes_with_torch=True) is None
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # the user's own wins
    assert unset(Execution("torchscript", threads=2), computes_with_torch=True) is None


_FAULTS = """
import resource, sys, threading
import torch
from serve.runtime.card.execution import Execution, settle
settle(Execution(sys.argv[1], threads=1), computes_with_torch=sys.argv[1] == "torchscript")
batch = torch.zeros(12, 1 << 20)
def compute():
    for _ in range(10):  # the heap has grown, here and there, to what they need
        batch.relu().neg()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(10):
        batch.relu().neg()
    print((resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before) // 10)
compute()
thread = threading.Thread(target=compute)
thread.start()
thread.join()
"""


def _faults(engine: str, **own: str) -> list[int]:
    """Pages that the kernel clears for a call with activations of 96 MB: of the first thread, and of another."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", _FAULTS, engine]
    done = subprocess.run(command, env=clean | own, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_torchs_activations_stay_in_the_process_and_the_kernel_clears_no_page_for_the_next_call() -> None:
    """Pages have 4 KiB or, where the kernel has them, 2 MiB: how many they are is only compared."""
    kept = _faults("torchscript")
    assert 10 * max(kept) < min(_faults("openvino"))
    assert 10 * max(kept) < min(_faults("torchscript", MALLOC_TRIM_THRESHOLD_="131072")), "the user's own wins"


@pytest.mark.parametrize("threads", [1, 2])
def test_an_engine_with_a_pool_of_its_own_has_as_many_threads_as_its_execution_says(
    threads: int, tmp_path: Path
) -> None:
    folder = artifacts.onnx(tmp_path / "artifact")
    card = load_card(folder)
    on_openvino: Any = open_engine(folder, card, Execution("openvino", threads=threads))
    assert on_openvino.request.get_compiled_model().get_property("INFERENCE_NUM_THREADS") == threads
    on_onnxruntime: Any = open_engine(folder, card, Execution("onnxruntime", threads=threads))
    assert on_onnxruntime._session.get_session_options().intra_op_num_threads == threads


def test_openvino_binds_no_thread_to_a_core_where_it_would_wait_for_who_decodes_there(tmp_path: Path) -> None:
    def bound() -> set[int]:
        """Threads that may not use every core that this process may."""
        threads = [int(thread.name) for thread in Path("/proc/self/task").iterdir()]
        return {thread for thread in threads if os.sched_getaffinity(thread) != os.sched_getaffinity(os.getpid())}

    before = bound()  # by other libraries
    folder = artifacts.onnx(tmp_path / "artifact")
    card = load_card(folder)
    open_engine(folder, card, Execution("openvino", threads=2)).run(torch.zeros(2, *card.preprocessing.shape))
    assert bound() <= before


def test_every_engine_of_the_cpu_works_here_by_its_own_probe() -> None:
    on_cpu = [name for name, entry in engines().items() if "cpu" in {*entry.devices} - {*entry.on_request}]
    assert {"torchscript", "exported", "onnxruntime", "openvino"} <= set(on_cpu)
    assert [unavailable(name, "cpu") for name in on_cpu] == [None] * len(on_cpu)


def test_the_graph_of_the_probes_is_a_negation() -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "tiny",
        [value("x", TensorProto.FLOAT, [1])],
        [value("y", TensorProto.FLOAT, [1])],
    )
    model = onnx.load_from_string(TINY_GRAPH)
    onnx.checker.check_model(model)
    assert model.graph == graph


def test_one_graph_gives_the_same_logits_in_every_engine_that_opens_it(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "artifact")
    card = load_card(folder)
    executions = executions_for(card)
    assert [execution.engine for execution in executions] == ["openvino", "onnxruntime"]
    batch = torch.rand(3, *card.preprocessing.shape)
    answers: Any = ReferenceEvaluator(str(folder / card.file)).run(None, {"input": batch.numpy()})
    for execution in executions:
        with torch.inference_mode():
            (found,) = open_engine(folder, card, execution).run(batch)
        np.testing.assert_allclose(found.numpy(), answers[0], rtol=1e-4, atol=1e-5, err_msg=execution.engine)


def test_an_option_that_an_engine_does_not_have_is_refused_with_the_nearest(tmp_path: Path) -> None:
    folder = artifacts.onnx(tmp_path / "artifact")
    card = load_card(folder)
    with pytest.raises(UserError, match=r"openvino has no option 'precison' .did you mean precision"):
        open_engine(folder, card, Execution("openvino", options={"precison": "f32"}))
    with pytest.raises(UserError, match="option precision must be of type str, found 32"):
        open_engine(folder, card, Execution("openvino", options={"precision": 32}))
    with pytest.raises(UserError, match=r"unknown engine 'openvin' .did you mean openvino"):
        open_engine(folder, card, Execution("openvin"))


def test_an_engine_that_cannot_open_an_artifact_says_so(tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "artifact")
    with pytest.raises(EngineError, match="openvino opens onnx and openvino files, not torchscript"):
        open_engine(folder, load_card(folder), Execution("openvino"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_where_nothing_works_every_engine_is_named_with_its_reason(tmp_path: Path) -> None:
    card = load_card(artifacts.onnx(tmp_path / "artifact"))
    with pytest.raises(EngineError, match="this machine has no usable CUDA device"):
        preferred(card, "cuda")


@pytest.mark.parametrize("make", [artifacts.torchscript, artifacts.exported, artifacts.onnx])
def test_buckets_are_the_only_batch_sizes_that_an_engine_is_given(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "artifact")
    card = load_card(folder)
    batch = torch.rand(7, *card.preprocessing.shape)
    for execution in executions_for(card):
        whole = open_engine(folder, card, execution)
        seen: list[int] = []
        own = type(whole).run

        def run(engine: Any, given: torch.Tensor, own: Any = own, seen: list[int] = seen) -> Any:
            seen.append(len(given))
            return own(engine, given)

        with torch.inference_mode():
            (wanted,) = whole.run(batch)
            monkeypatch.setattr(type(whole), "run", run)
            bucketed = open_engine(folder, card, dataclasses.replace(execution, buckets=(2, 4)))
            (found,) = bucketed.run(batch)
        assert seen == [4, 4], "4 and 3 of the 7, these padded"
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-5, err_msg=execution.engine)
        assert bucketed.provider == whole.provider


def test_an_engine_may_go_in_any_thread_and_signals_are_handled_after_it(torch_begun: Programs, tmp_path: Path) -> None:
    """A server loads in one thread, drops in another, and is told to end by a signal that Python handles."""
    folder = artifacts.onnx(tmp_path / "artifact", device="cpu")
    program = """
        import gc, signal, sys, threading
        from pathlib import Path
        from serve.runtime.card.execution import Execution
        from serve.runtime.service.predictor import Predictor

        held = [Predictor(Path(sys.argv[1]), Execution("openvino"))]

        def drop():
            held.clear()
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        signal.signal(signal.SIGTERM, lambda number, frame: print("handled"))
        signal.raise_signal(signal.SIGTERM)
    """
    ended = torch_begun.run("-c", textwrap.dedent(program), folder)
    assert (ended.returncode, ended.stdout) == (0, "handled\n"), ended.stderr
