"""What all tests share: each run draws the same numbers and examples; Ctrl-C reaches programs that tests start.

A change is judged by what it changes, and not by what was drawn this time, nor by how busy the machine is; ``make
fuzz`` is what looks for examples that no run has seen yet. And how several processes share the machine: each computes
with one thread, and takes the longest files first, so that none is left with one at the end. Java is started as what
soon ends again is.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import Programs, begun

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

# Millions of objects are made while tests are collected, and stay; see `pytest_collection_finish`.
gc.disable()

_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _UNHURRIED, derandomize=True)
settings.register_profile("searching", _UNHURRIED, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell's `… &` has its jobs ignore Ctrl-C, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Inductor would start processes that compile for Triton, which nothing here does: each imports torch (torch 2.14).
os.environ.setdefault("TORCH_WARM_POOL", "0")
# ONNX Runtime would report what the tests run to its maker (1.31, from threads of its own).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Inductor would also compile a program for each instruction set of the processor, to see whether the compiler knows it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

#: Whether this is one of several processes that share the tests.
AMONG_SEVERAL = "PYTEST_XDIST_WORKER" in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test and its fixtures draw is the same in each run, whichever tests the process has run before it."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    """Where several processes share the cores, torch computes here with one thread: two fight, and take a third more.

    For each test anew: an execution that is opened in this process sets as many as it says. The programs that tests
    start have what they would have.
    """
    if AMONG_SEVERAL:
        import torch  # which the tests' own files have imported by now

        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def java_for_a_minute() -> Iterator[None]:
    """The servers that are started in this process live for a minute: Java compiles what they run once, and quickly.

    Its second compiler works for code that runs for hours, and takes half of the CPU time of TorchServe's start. What
    is computed and answered is the same; those that are started by a command have what a user's have.
    """
    from serve.torchserve.limits import Limits

    options = Limits.java_options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Limits, "java_options", lambda limits: [*options(limits), "-XX:TieredStopAtLevel=1"])
        yield


@pytest.fixture(scope="session", autouse=True)
def clients_have_patience() -> None:
    """A client that a test gives no time-out waits for as long as a busy machine takes, and not httpx's 5 s (0.28)."""
    from httpx import _config

    patient = _config.DEFAULT_TIMEOUT_CONFIG  # of which all functions and clients have this very object
    patient.connect = patient.read = patient.write = patient.pool = 60.0


@pytest.fixture(scope="session", autouse=True)
def clients_read_the_authorities_once() -> None:
    """Clients of httpx (0.28) share what they read of authorities: each took 10 ms to read 140 certificates."""
    from httpx import _config
    from httpx._transports import default

    read = _config.create_ssl_context
    shared = functools.cache(read)

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        return shared() if verify is True and cert is None else read(verify, cert, trust_env)

    vars(default)["create_ssl_context"] = create


#: What ``optimize run`` has imported when it ends, as far as it starts no thread (onnxruntime 1.31 does).
OF_A_RUN = (
    *("optimize.cli", "optimize.api", "optimize.run.pipeline", "optimize.report.plots", "sklearn.datasets"),
    *("torch._dynamo", "torch.export._trace", "torch.onnx._internal.exporter._core", "onnxscript", "onnx"),
)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Starts commands of this project that need not begin cold, each computing with one thread."""
    once = {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}  # which torch reads when it is imported
    with begun(*OF_A_RUN, environment={**os.environ, **once}) as programs:
        yield programs


#: Files that one process runs, because they share a server, which each process would start for itself.
TOGETHER = frozenset({"tests/serve/runtime/service/test_endpoint.py", "tests/serve/torchserve/test_server.py"})


def unit_of(nodeid: str) -> str:
    """What is run by one process: the file of a test, or several that share a server."""
    file = nodeid.split("::", 1)[0]
    return min(TOGETHER) if file in TOGETHER else file


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, those with the most slow tests come first."""
    if hasattr(config, "workerinput"):
        slow = Counter(unit_of(item.nodeid) for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (-slow[unit_of(item.nodeid)], unit_of(item.nodeid)))


def pytest_collection_finish() -> None:
    """What the libraries and the tests' files brought stays until the end: looking through it took 7 % of the time."""
    gc.collect()
    gc.freeze()
    # CPython 3.11 takes what is frozen for nothing when it asks whether all of a program has grown by a quarter, and
    # would look through the rest again and again: every 70,000 objects, of which each exported network has more.
    gc.set_threshold(2_000, 10, 50)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """As ``--dist loadfile``, with the units above in the order above."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Longest(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False  # it would order by the number of tests, however long they take
    return Longest(config, log)
