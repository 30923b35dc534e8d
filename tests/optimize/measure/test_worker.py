"""Processes of executions, as real ones: what is in them, what they answer, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.listener import Silent
from optimize.measure import process_pool, processes
from optimize.measure.key_inputs import timing_here
from optimize.measure.process_pool import Pool
from optimize.measure.processes import Worker, environment, template, worker
from optimize.measure.references import open_reference, pickled
from optimize.measure.timing import Timing
from serve.runtime.card.card import Preprocessing, load_card
from serve.runtime.card.execution import ENVIRONMENT, STARTED_WITH, Execution
from serve.runtime.engines.base import executions_for
from serve.runtime.errors import EngineError, PipelineError, UserError
from serve.runtime.service.predictor import Predictor
from tests.programs import Programs
from tests.serve import artifacts

QUICK = Timing(rounds=1, batch_sizes=(1, 4), seconds=0.001, minimum=2, warm_up=0)
GREY8 = Preprocessing(8, (8, 8), mean=(0.5,), std=(0.25,))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An artifact of every format."""
    root = tmp_path_factory.mktemp("artifacts")
    made = (artifacts.onnx, artifacts.torchscript, artifacts.exported, artifacts.int8)
    return {make.__name__: make(root / make.__name__) for make in made}


@pytest.fixture
def child() -> Iterator[Worker]:
    with worker() as started:
        yield started


def pictures(folder: Path, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = load_card(folder).preprocessing.shape
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)


def alive(pid: int) -> bool:
    """Whether a process runs: one that nobody has reaped yet has ended all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(*pids: int, within: float = 10.0) -> bool:
    end = time.monotonic() + within
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


# --- what an execution's process is


def test_the_environment_of_executions_is_set_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT")
    with worker() as child:
        for pid in (template().pid, child.pid):
            entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
            variables = dict(entry.split("=", 1) for entry in entries if entry)
            assert {name: variables[name] for name in ENVIRONMENT} == {"GOMP_SPINCOUNT": "10000"}


def began_with(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """As if this process had been started with these."""
    for name, value in variables.items():
        monkeypatch.setitem(STARTED_WITH, name, value)


def test_the_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    began_with(monkeypatch, GOMP_SPINCOUNT="123")
    assert environment()["GOMP_SPINCOUNT"] == "123"
    with worker() as started:
        assert "GOMP_SPINCOUNT=123" in Path(f"/proc/{started.pid}/environ").read_text().split("\0")


def test_what_this_process_writes_into_its_environment_changes_no_key_and_reaches_no_execution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, running = timing_here(Execution("onnxruntime")), template()
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR", "KMP_INIT_AT_FORK", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    assert timing_here(Execution("onnxruntime")) == before
    assert template() is running
    running.close()
    with worker() as started:
        entries = Path(f"/proc/{started.pid}/environ").read_text().split("\0")
    read = dict(
        entry.split("=", 1) for entry in entries if entry.startswith(("OMP_", "TORCHINDUCTOR_", "MKL_", "KMP_"))
    )
    assert read == {name: value for name, value in STARTED_WITH.items() if name in read}


def test_what_torchs_compiler_sets_is_no_input_of_a_key_though_a_process_began_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = timing_here(Execution("onnxruntime"))
    began_with(monkeypatch, TORCHINDUCTOR_CACHE_DIR="/tmp/a", KMP_INIT_AT_FORK="FALSE", KMP_DUPLICATE_LIB_OK="True")
    assert timing_here(Execution("onnxruntime")) == before
    began_with(monkeypatch, KMP_AFFINITY="compact")
    assert timing_here(Execution("onnxruntime")) != before


def test_training_writes_into_the_environment_and_keys_stay() -> None:
    """What `torch.optim` imports does it (torch 2.14), in a process that begins as `python -m optimize` does."""
    program = """
        import os
        import optimize
        from optimize.measure.key_inputs import timing_here
        from serve.runtime.card.execution import Execution
        before = timing_here(Execution("exported"))
        import torch
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        import torch._inductor.runtime.cache_dir_utils as places
        places.cache_dir()
        print("TORCHINDUCTOR_CACHE_DIR" in os.environ, timing_here(Execution("exported")) == before)
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["True", "True"]


def test_what_executions_are_forked_from_has_started_no_thread() -> None:
    assert len(list(Path(f"/proc/{template().pid}/task").iterdir())) == 1


def test_opening_imports_no_library(folders: dict[str, Path]) -> None:
    """Neither of the template's modules nor of the engine's, which its probe imports, is paid for by an artifact."""
    program = """
        import sys
        from pathlib import Path
        from optimize.measure.worker import prepare
        prepare()
        from serve.runtime.card.card import load_card
        from serve.runtime.engines.base import executions_for, unavailable
        from serve.runtime.service.predictor import Predictor
        for folder in map(Path, sys.argv[1:]):
            for execution in executions_for(load_card(folder)):
                unavailable(execution.engine, "cpu")
                before = set(sys.modules)
                Predictor(folder, execution).warm_up([1])
                print(execution.engine, *sorted(set(sys.modules) - before))
    """
    words = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *map(str, folders.values())]
    out = subprocess.run(words, capture_output=True, text=True, timeout=200, check=True).stdout
    lines = [line.split() for line in out.splitlines()]
    assert {engine for engine, *_ in lines} == {"openvino", "onnxruntime", "torchscript", "exported"}
    assert {engine: modules for engine, *modules in lines if modules} == {}


@pytest.mark.parametrize(("kind", "engine", "threads"), [("onnx", "openvino", 1), ("torchscript", "torchscript", 2)])
def test_torch_has_one_thread_beside_an_engine_with_its_own(
    folders: dict[str, Path], child: Worker, kind: str, engine: str, threads: int
) -> None:
    child.open(folders[kind], Execution(engine, threads=2), 8)
    assert child.torch_threads() == threads


def test_a_process_answers_as_the_runtime_does_here(folders: dict[str, Path]) -> None:
    for kind, folder in folders.items():
        images = pictures(folder)
        for execution in executions_for(load_card(folder)):
            with worker() as started:
                provider, load_ms = started.open(folder, execution, 8)
                found = started.outputs(images)
            own = Predictor(folder, execution)
            assert provider == own.engine.provider
            assert load_ms > 0
            torch.testing.assert_close(found, own.outputs(images), msg=f"{kind} by {execution.engine}")


def test_memory_is_what_opening_and_running_took(folders: dict[str, Path], child: Worker) -> None:
    child.open(folders["exported"], Execution("exported"), 64)
    child.warm([1])
    before = child.memory()
    child.warm([512])
    grown = child.memory() - before
    assert 0 < before < 500e6
    # The images alone, as floats on their way into the network.
    assert grown > 512 * 4 * pictures(folders["exported"], 1).numel()


def test_a_turn_is_as_many_calls_as_it_must_be(folders: dict[str, Path], child: Worker) -> None:
    child.open(folders["onnx"], Execution("onnxruntime"), 8)
    for size in QUICK.batch_sizes:
        child.keep(pictures(folders["onnx"], size))
    assert len(child.turn(1, QUICK)) >= 10
    longer = QUICK.model_copy(update={"seconds": 0.2})
    times = child.turn(4, longer)
    assert len(times) >= 2
    assert sum(times) > 100  # milliseconds
    assert len(times) == 2 or sum(times[:-1]) < 200  # the last call may take any time


def test_what_fails_is_an_error_of_the_same_kind_and_the_process_goes_on(
    folders: dict[str, Path], child: Worker
) -> None:
    with pytest.raises(EngineError, match=r"openvino opens .* files, not torchscript"):
        child.open(folders["torchscript"], Execution("openvino"), 8)
    with pytest.raises(UserError, match="no option 'precison'"):
        child.open(folders["onnx"], Execution("openvino", options={"precison": "f32"}), 8)
    with pytest.raises(PipelineError, match=r"card\.json"):
        child.open(folders["onnx"].parent, Execution("openvino"), 8)
    child.open(folders["onnx"], Execution("openvino"), 8)


# --- references


class Net(nn.Module):
    """Of a test's own file, which no other process can import by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return helped(self.layers(batch))


def helped(batch: torch.Tensor) -> torch.Tensor:
    return batch * 2


def test_an_eager_module_of_the_users_own_code_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_net.py").write_text(
        "import torch\nfrom users_helper import DOUBLE\n\n"
        "class Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        return DOUBLE * super().forward(x.flatten(1))\n"
    )
    (tmp_path / "users_helper.py").write_text("DOUBLE = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    import users_net  # type: ignore[import-not-found]

    module = users_net.Net(64, 3).eval()
    body = pickled(lambda: module, GREY8, "classification")
    monkeypatch.undo()
    images = torch.arange(128, dtype=torch.uint8).view(2, 1, 8, 8)
    with torch.no_grad():
        wanted = module(((images / 255) - 0.5) / 0.25)
    with worker() as started:
        assert started.reference("eager channels-last", "cpu", body) == "eager/cpu"
        torch.testing.assert_close(started.ended(images), (wanted,))


@pytest.mark.slow
def test_a_compiled_reference_answers_as_the_eager_one(child: Worker) -> None:
    module = Net().eval()
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    assert child.reference("torch.compile", "cpu", pickled(lambda: module, GREY8, "classification")) == "inductor/cpu"
    with torch.no_grad():
        wanted = module(((images / 255) - 0.5) / 0.25)
    torch.testing.assert_close(child.ended(images), (wanted,), rtol=1e-4, atol=1e-4)


class Doubled(nn.Module):
    """Where the weight is a constant, so is its double; and a library's kernel is left, nothing for a C++ compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(batch.flatten(1), self.weight * 2)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opening the compiled reference sets for its process is set back in this one."""
    from torch._inductor import config

    monkeypatch.setattr(config, "freezing", config.freezing)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("compiling")
def test_the_compiled_reference_has_code_for_each_batch_size_with_the_weights_in_it() -> None:
    module = Doubled()
    call, _ = open_reference("torch.compile", module, GREY8, "classification", "cpu")
    compiled = torch._dynamo.utils.counters["stats"]
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    before = compiled["unique_graphs"]
    logits = [call(images.repeat(size, 1, 1, 1)) for size in (2, 3, 4)]
    assert compiled["unique_graphs"] - before == 3  # with a dynamic size the third would run the second's
    with torch.no_grad():
        module.weight.zero_()  # of which the code has none any more
    for size, (before_it,) in zip((2, 3, 4), logits, strict=True):
        assert before_it.abs().max() > 0.1
        torch.testing.assert_close(call(images.repeat(size, 1, 1, 1)), (before_it,))


@pytest.mark.parametrize("switch", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_compiler_that_is_switched_off_gives_no_time_of_a_compiled_module(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = environment()
    monkeypatch.setenv(switch, "1")
    began_with(monkeypatch, **{switch: "1"})
    assert environment() == before | {switch: "1"}  # and so in the keys of what is measured
    with pytest.raises(EngineError, match=f"torch.compile is switched off by {switch}=1"):
        open_reference("torch.compile", Net(), GREY8, "classification", "cpu")
    open_reference("eager", Net(), GREY8, "classification", "cpu")


# --- ends


def test_a_death_is_one_processes_own_and_says_why(folders: dict[str, Path]) -> None:
    with worker() as one, worker() as other:
        for started in (one, other):
            started.open(folders["onnx"], Execution("onnxruntime"), 8)
        os.kill(one.pid, signal.SIGSEGV)
        with pytest.raises(PipelineError, match="its process was ended by SIGSEGV"):
            one.outputs(pictures(folders["onnx"]))
        with pytest.raises(PipelineError, match="its process has ended"):
            one.memory()
        assert other.outputs(pictures(folders["onnx"]))[0].shape[0] == 4


def test_one_that_hangs_is_ended(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_TIMEOUT_S", 0.3)
    with worker() as started:
        os.kill(started.pid, signal.SIGSTOP)
        with pytest.raises(PipelineError, match="no answer to 'memory' within"):
            started.memory()
        assert gone(started.pid)


def test_closing_leaves_no_process(folders: dict[str, Path]) -> None:
    with Pool((1, 4), 8) as opened:
        card = load_card(folders["onnx"])
        pids = [opened.load(e.engine, folders["onnx"], e).worker.pid for e in executions_for(card)]
        pids.append(opened.another().pid)
        assert len(set(pids)) == 3
        assert all(map(alive, pids))
    assert gone(*pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(how: signal.Signals, programs: Programs) -> None:
    """However it ends: killed while it waits, or interrupted in a terminal."""
    program = """
        import sys, time
        from optimize.measure.processes import template, worker
        started = worker()
        print("started", template().pid, started.pid, file=sys.stderr, flush=True)
        time.sleep(100)
    """
    parent = programs.start("-c", textwrap.dedent(program))
    line = next(line for line in parent.stderr if line.startswith("started"))
    pids = [int(word) for word in line.split()[1:]]
    assert all(map(alive, pids))
    parent.send_signal(how)
    parent.end()
    assert gone(*pids)


# --- together


def test_two_runs_do_not_time_at_once_and_the_second_says_that_it_waits(tmp_path: Path) -> None:
    said: list[str] = []
    order: list[str] = []

    class Heard(Silent):
        def said(self, message: str) -> None:
            said.append(message)

    lock = tmp_path / "lock"
    first, second = Pool((1,), 8, lock=lock), Pool((1,), 8, Heard(), lock=lock)

    def wait() -> None:
        with second.alone():
            order.append("second")

    with first.alone(), first.alone():
        waiting = threading.Thread(target=wait)
        waiting.start()
        while not said:
            time.sleep(0.01)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]
    assert said == ["another run is measuring on this machine; waiting for it to end"]


def test_the_lock_is_one_for_all_whatever_their_folder_for_temporary_files_is(tmp_path: Path) -> None:
    program = "from optimize.measure.process_pool import LOCK_FILE; print(LOCK_FILE)"
    asked = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True
        )
        for folder in (tmp_path, "/tmp")
    ]
    (mine, *others) = [Path(process.communicate(timeout=120)[0].strip()) for process in asked]
    assert others == [mine]
    assert mine.is_absolute()
    assert mine.parent.stat().st_mode & 0o1777 == 0o1777, "every user can make it there, and nobody remove another's"


def test_what_the_first_user_made_every_other_can_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    before = os.umask(0o077)
    try:
        with Pool((1,), 8, lock=lock) as opened, opened.alone():
            assert lock.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", ["a folder", "a link"])
def test_what_cannot_be_locked_is_said_and_nothing_is_timed(kind: str, tmp_path: Path) -> None:
    lock, elsewhere = tmp_path / "lock", tmp_path / "elsewhere"
    elsewhere.write_text("somebody's")
    if kind == "a folder":
        lock.mkdir()
    else:
        lock.symlink_to(elsewhere)
    with (
        pytest.raises(UserError, match=r"lock cannot be locked \(.+\).*set mode 666"),
        Pool((1,), 8, lock=lock) as it,
        it.alone(),
    ):
        pytest.fail("nobody may time anything")
    assert elsewhere.read_text() == "somebody's"


def test_opening_is_timed_and_so_waits_for_the_lock(folders: dict[str, Path], tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    opened: list[str] = []
    with Pool((1,), 8, lock=lock) as holder, Pool((1,), 8, lock=lock) as other:

        def load() -> None:
            opened.append(other.load("a", folders["onnx"], Execution("onnxruntime")).provider)

        with holder.alone():
            loading = threading.Thread(target=load)
            loading.start()
            loading.join(1.0)
            assert opened == []
        loading.join(60)
    assert opened == ["onnxruntime/CPUExecutionProvider"]


def test_a_process_too_many_is_refused_with_the_figures(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "_MOST_MEMORY", 1e-9)
    with Pool((1,), 8) as opened:
        opened.load("first", folders["onnx"], Execution("onnxruntime"))  # one there must be
        with pytest.raises(EngineError, match=r"takes 0\.\d GB and the 1 others 0\.\d, more than"):
            opened.load("second", folders["onnx"], Execution("openvino"))
