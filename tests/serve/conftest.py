"""One real TorchServe for all tests of this folder, with an archive of every kind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from serve.common.layout import archive_path
from serve.common.options import ServingOptions
from serve.runs.stored_runs import model_name
from serve.runtime.card.budget import SERVING
from serve.runtime.card.execution import ENVIRONMENT
from serve.torchserve import server
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.client import Client
from serve.torchserve.configuration import HOST, Ports
from serve.torchserve.java import command_line
from serve.torchserve.state import RunningServer, state_folder
from serve.tune import servers
from tests.programs import Programs, begun
from tests.serve import artifacts
from tests.serve.own_server import Running, run_server

#: What a batch of the exported program may hold; the others have the default.
BATCH_PIXELS = 60_000_000

KINDS = ("script", "int8", "exported", "onnx")

# The worker's interpreter starts with this: the project is hidden from it, as if it were not installed,
# and a wrong package of the same name lies first on its path.
HIDE_PROJECT = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
sys.path[:] = [entry for entry in sys.path if "__editable__" not in entry and entry != {project!r}]
"""
DECOY = "raise ImportError('this is not the package that lies in the archive')\n"


@dataclass(frozen=True)
class Served:
    """The running server, a client of it, the artifact folders by kind, and how far its start told that it was."""

    store: Path
    running: RunningServer
    client: Client
    folders: dict[str, Path]
    told: list[tuple[float, str]]

    def url(self, kind: str = "script") -> str:
        return f"http://{HOST}:{self.running.ports.inference}/predictions/{name_of(kind)}"

    def headers(self) -> dict[str, str]:
        name, _, value = (state_folder(self.store) / "authorization").read_text().strip().partition(": ")
        return {name: value}


def name_of(kind: str) -> str:
    return model_name("small", kind)


def free_ports() -> Ports:
    return Ports(*servers.free_ports(5))


def hide_project(folder: Path) -> Path:
    """Interpreters whose ``PYTHONPATH`` is this folder find no project of ours but the one in an archive."""
    (folder / "sitecustomize.py").write_text(HIDE_PROJECT.format(project=str(Path(__file__).parents[2])))
    (folder / "serve").mkdir()
    (folder / "serve" / "__init__.py").write_text(DECOY)
    return folder


@contextmanager
def by(interpreter: Path) -> Iterator[None]:
    """A server that is started meanwhile starts its workers, then and later, by another interpreter than this one."""

    def with_it(java: Path, **told: Any) -> Sequence[str]:
        return [str(interpreter) if word == sys.executable else word for word in command_line(java, **told)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "command_line", with_it)
        yield


@pytest.fixture(scope="session")
def torch_begun() -> Iterator[Programs]:
    """Starts programs that have imported torch, and TorchServe's worker: neither of them anything of this project.

    Its executable is for servers whose workers come and go many times. That one begins cold as well is shown by the
    servers that are started without it: those of a command, with signed archives, with an engine from outside.
    """
    with begun("torch", "ts.model_service_worker", environment={**ENVIRONMENT, **os.environ}) as programs:
        yield programs


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An artifact folder of every kind, in a store as the pipeline leaves it."""
    root = tmp_path_factory.mktemp("store") / "small" / "artifacts"
    return {
        "script": artifacts.torchscript(root / "script"),
        "int8": artifacts.int8(root / "int8"),
        "exported": artifacts.exported(root / "exported"),
        "onnx": artifacts.onnx(root / "onnx"),
    }


@pytest.fixture(scope="session")
def served(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = folders["script"].parents[2]
    archives = {}
    for kind, folder in folders.items():
        options = ServingOptions(batch_size=8, k=3)
        if kind == "exported":
            # It waits long for others, so that a test can send one batch, and that may hold few pixels.
            budget = replace(SERVING, batch_pixels=BATCH_PIXELS)
            options = ServingOptions(batch_size=8, k=3, max_batch_delay_ms=300, budget=budget)
        archives[name_of(kind)] = build_archive(
            folder, archive_path(store, "small", kind), model_name=name_of(kind), options=options
        )
    # Its first engine does not open it.
    archives[name_of("fallback")] = build_archive(
        folders["onnx"],
        archive_path(store, "small", "fallback"),
        model_name=name_of("fallback"),
        options=ServingOptions(batch_size=2, options={"openvino": {"precision": "f33"}}),
    )
    hiding = hide_project(tmp_path_factory.mktemp("hiding"))
    told: list[tuple[float, str]] = []
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(hiding))
            for name in ENVIRONMENT:  # which importing optimize sets, in this process; workers get it from the starter
                patch.delenv(name, raising=False)
            programs = stack.enter_context(begun("ts.model_service_worker", environment={**ENVIRONMENT, **os.environ}))
            stack.callback(server.stop, store)
            with by(programs.executable):
                running = server.start(
                    store,
                    archives,
                    ports=free_ports(),
                    deadline_s=150,
                    progressed=lambda fraction, message: told.append((fraction, message)),
                )
        yield Served(store, running, stack.enter_context(running.client(store)), folders, told)


@pytest.fixture(scope="session")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Our own server, with every protocol, for all tests of this folder."""
    with run_server(tmp_path_factory.mktemp("own")) as running:
        yield running
