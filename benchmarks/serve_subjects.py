"""What `benchmarks.serve` measures: servers, echoes and the runtime in process, each asked for seconds at a time."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from benchmarks import stock_torchserve as stock
from serve.common.server_processes import end, process_tree, wait_until_ready
from serve.load.generator_process import measure
from serve.load.histogram import Histogram
from serve.load.plan import Plan, Target
from serve.load.workload import Item, Workload
from serve.runtime.card.execution import ENVIRONMENT
from serve.runtime.card.serving import Serving
from serve.runtime.errors import PipelineError
from serve.torchserve.configuration import HOST
from serve.tune.servers import Live, ServerKind, free_ports, pack, serving

_WARM_S = 0.4


@dataclass(frozen=True)
class Shot:
    """One measurement of a subject.

    Attributes:
        throughput: known answers a second.
        latency: ms.
        server_ms: CPU time of the subject's processes for each answer, in ms.
        load_ms: CPU time of the load generator for each, in ms.
        stages: mean ms, as the subject tells.
        bad: answers that were wrong, lost, or errors.
        faults: some of them in words.
    """

    throughput: float
    latency: Histogram
    server_ms: float
    load_ms: float
    stages: Mapping[str, float] = field(default_factory=dict)
    bad: int = 0
    faults: tuple[str, ...] = ()


#: Asks a subject: the workload's name, clients, seconds.
Ask = Callable[[str, int, float], Shot]


@dataclass(frozen=True)
class Subject:
    """Something that is measured: its key, title, what asks it, and with which workloads; or why it is left out."""

    key: str
    title: str
    ask: Ask | None = None
    left_out: str = ""
    sent: frozenset[str] = frozenset()


def over_http(live: Live, target: Target, workloads: Mapping[str, Path]) -> Ask:
    """What asks a server by the load generator."""

    def ask(workload: str, clients: int, seconds: float) -> Shot:
        before = live.cpu_s()
        found = measure(Plan(target, clients, seconds=seconds, warm_s=_WARM_S, timeout_s=60), workloads[workload])
        # The server's time counts from the first request that warms, the generator's from the first that counts.
        spent = (live.cpu_s() - before) / (1 + _WARM_S / seconds)
        answers = max(1, found.good)
        bad = found.bad + found.counts.get("rejected", 0)
        return Shot(
            found.throughput,
            found.latency,
            spent * 1e3 / answers,
            found.cpu_s * 1e3 / answers,
            found.stages,
            bad,
            found.faults,
        )

    return ask


@contextmanager
def in_process(way: str, archive: Path, scratch: Path, workloads: Mapping[str, Path]) -> Iterator[Ask]:
    """What asks the runtime in a process without a server."""
    scratch.mkdir()
    log = (scratch.parent / f"{way}.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serve_in_process", way, str(archive), str(scratch)],
        cwd=Path(__file__).parents[1],
        env={**ENVIRONMENT, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def read() -> str:
        line = stdout.readline()
        if not line:
            raise PipelineError(f"the process of {way} ended: {(scratch.parent / f'{way}.log').read_text()[-300:]}")
        return line

    def ask(workload: str, clients: int, seconds: float) -> Shot:
        job = {"workload": str(workloads[workload]), "clients": clients, "seconds": seconds, "warm_s": _WARM_S}
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        told = json.loads(read())
        latency = Histogram.from_json(told["latency"])
        spent = told["cpu_s"] * 1e3 / max(1, len(latency))
        return Shot(told["throughput"], latency, spent, 0.0, told["stages"], told["bad"], tuple(told["faults"]))

    try:
        read()
        yield ask
    finally:
        with contextlib.suppress(OSError):
            stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        stdout.close()
        log.close()


@contextmanager
def echo_uvicorn(scratch: Path) -> Iterator[Live]:
    """Uvicorn with an application that echoes.

    Raises:
        PipelineError: it does not come up.
    """
    (port,) = free_ports(1)
    words = ["benchmarks.echo_app:application", "--port", str(port), "--no-access-log", "--log-level", "warning"]
    log = scratch / "uvicorn.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "--host", HOST, *words],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://{HOST}:{port}/"
        wait_until_ready(process, lambda: httpx.post(url, content=b"x", trust_env=False).is_success, log, within_s=20)
        yield Live({"echo": Target(f"{HOST}:{port}", "/")}, process.pid, log)
    finally:
        end(process_tree(process.pid), patience_s=20)
        process.wait()


class Stage:
    """All subjects, started and kept until the end; each is idle while another is measured.

    Args:
        scratch: a folder for archives, logs and workloads.
        artifact: the artifact's folder.
        ways: how it is served, by the title's ending: ``""`` for the present way.
        workloads: what is sent, by name, with known answers of the artifact.
        others: what is sent instead to a way that answers otherwise, by its ending.
    """

    def __init__(
        self,
        scratch: Path,
        artifact: Path,
        ways: Mapping[str, Serving],
        workloads: dict[str, Workload],
        others: Mapping[str, dict[str, Workload]] | None = None,
    ) -> None:
        self.scratch, self.artifact, self.ways, self.workloads = scratch, artifact, ways, workloads
        self._others = others or {}
        self._stack = ExitStack()

    def __enter__(self) -> Stage:
        """Itself; everything is stopped at the end of the block."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop everything."""
        self._stack.close()

    def start(self, run: Path, classes: int, only: tuple[str, ...] = ()) -> list[Subject]:
        """Start all subjects, or those whose keys are named; what does not start is left out with its reason."""
        makers: dict[str, tuple[str, Callable[[], Ask]]] = {
            "echo-torchserve": ("TorchServe, echo", lambda: self._stock(run, classes, stock.ECHO)),
            "echo-uvicorn": ("uvicorn, echo", self._echo),
            "torchserve": ("our archive behind TorchServe", lambda: self._served("torchserve", "")),
            "own": ("our own server", lambda: self._served("own", "")),
            "stock": ("TorchServe's image_classifier, FP32", lambda: self._stock(run, classes, stock.STOCK)),
            "serial": ("in process, one after the other", lambda: self._process("serial")),
            "pipelined": ("in process, pipelined", lambda: self._process("pipelined")),
        }
        for ending in filter(None, self.ways):
            makers[f"own-{ending}"] = (f"our own server, {ending}", lambda e=ending: self._served("own", e))  # type: ignore[misc]
        subjects = []
        for key, (title, make) in makers.items():
            if only and key not in only:
                continue
            print(f"starting: {title} …", flush=True)
            try:
                sent = self._others.get(key.removeprefix("own-"), self.workloads)
                subjects.append(Subject(key, title, make(), sent=frozenset(sent)))
            except (PipelineError, ImportError, OSError) as error:
                print(f"left out: {title}: {error}", flush=True)
                subjects.append(Subject(key, title, left_out=str(error)))
        return subjects

    def _folders(self, name: str, workloads: Mapping[str, Workload]) -> dict[str, Path]:
        return {
            workload: content.save(self.scratch / "workloads" / name / workload)
            for workload, content in workloads.items()
        }

    def _echoes(self) -> dict[str, Path]:
        return self._folders(
            "echo",
            {
                name: replace(
                    one, items=tuple(Item(item.name, item.body, item.content_type, exact=b"[]") for item in one.items)
                )
                for name, one in self.workloads.items()
            },
        )

    def _served(self, kind: ServerKind, ending: str) -> Ask:
        scratch = self.scratch / f"{kind}{ending.replace(' ', '-')}"
        scratch.mkdir(mode=0o700)
        archive = pack(self.artifact, self.ways[ending], scratch, "measured")
        live = self._stack.enter_context(serving(kind, {"measured": archive}, scratch))
        folders = self._folders(f"ours{ending.replace(' ', '-')}", self._others.get(ending, self.workloads))
        return over_http(live, live.target, folders)

    def _process(self, way: str) -> Ask:
        archive = pack(self.artifact, self.ways[""], self.scratch, way)
        folders = self._folders("ours", self.workloads)
        return self._stack.enter_context(in_process(way, archive, self.scratch / way, folders))

    def _echo(self) -> Ask:
        live = self._stack.enter_context(echo_uvicorn(self.scratch))
        return over_http(live, live.target, self._echoes())

    def _stock(self, run: Path, classes: int, model: str) -> Ask:
        archives = self.scratch / f"{model}-archives"
        if model == stock.ECHO:
            stock.echo_archive(archives / "echo.mar")
            folders = self._echoes()
        else:
            try:
                import captum  # noqa: F401 - which TorchServe's VisionHandler imports and does not declare
            except ImportError:
                raise PipelineError(
                    "its handler imports captum, which is not installed: it comes with the extra peers"
                ) from None
            network = stock.stock_archive(run, classes, archives / "stock.mar")
            folders = self._folders(
                "stock",
                {
                    name: replace(
                        one,
                        items=stock.stock_items(network, [(item.name, item.body) for item in one.items]),
                        tolerance=0.02,
                    )
                    for name, one in self.workloads.items()
                },
            )
        live = self._stack.enter_context(stock.stock_torchserve([model], archives, self.scratch / f"{model}-server"))
        return over_http(live, live.target, folders)
