"""A real TorchServe whose model's device is lost: the worker ends and another one answers, instead of 507 for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.hostile.pictures import encoded
from serve.archive.verification import Policy
from serve.common.layout import archive_path
from serve.torchserve import server
from serve.torchserve.client import ServerError
from serve.torchserve.state import state_folder
from tests.serve import artifacts
from tests.serve.artifacts import jpeg
from tests.serve.conftest import free_ports, name_of
from tests.test_extension import install

# It fails as CUDA does: a white image breaks it, and from then on every call fails.
FRAGILE = """
from serve.runtime.engines.base import EngineType, register
from serve.runtime.engines.torchscript import TORCHSCRIPT


class Fragile:
    def __init__(self, engine):
        self.engine, self.device, self.provider = engine, engine.device, engine.provider
        self.broken = False

    def run(self, batch):
        self.broken |= bool((batch.flatten(1).min(dim=1).values > 1.9).any())
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.engine.run(batch)


def _open(folder, card, execution):
    return Fragile(TORCHSCRIPT.open(folder, card, execution))


register(EngineType("fragile", formats=("torchscript",), open=_open, probe=lambda device: None, rank=1))
"""

PACK = """
import sys
from pathlib import Path
from serve.common.options import ServingOptions
from serve.torchserve.archive_builder import build_archive

build_archive(Path(sys.argv[1]), Path(sys.argv[2]), model_name=sys.argv[3],
              options=ServingOptions(engines=["fragile"], strict=True))
"""


@pytest.mark.slow
def test_a_worker_that_lost_its_device_is_replaced_by_one_that_answers(tmp_path: Path) -> None:
    store, name = tmp_path / "store", name_of("fragile")
    artifact = artifacts.torchscript(store / "small" / "artifacts" / "fragile", name="fragile", device="cpu")
    archive = archive_path(store, "small", "fragile")
    # In a process of its own, so that no other test meets the engine.
    there = install(tmp_path, "fragile_engine", "serve.engines", FRAGILE)
    subprocess.run([sys.executable, "-c", PACK, artifact, archive, name], env=there, check=True, timeout=120)
    policy = Policy(foreign_code=True)
    running = server.start(store, {name: archive}, ports=free_ports(), policy=policy, deadline_s=150)
    try:
        with running.client(store) as client:
            expected = client.predict(name, jpeg(1))
            (before,) = client.workers(name)
            with pytest.raises(ServerError):
                client.predict(name, encoded(Image.new("RGB", (40, 40), "white"), "PNG"))
            answer, deadline = None, time.monotonic() + 90
            while answer is None and time.monotonic() < deadline:
                try:
                    answer = client.predict(name, jpeg(1))
                except ServerError:
                    time.sleep(0.3)  # until the next worker is ready
            assert answer == expected
            (after,) = client.workers(name)
            assert after["pid"] != before["pid"]
            logs = "".join(path.read_text() for path in (state_folder(store) / "logs").glob("*.log"))
            assert "can no longer be used by this process: RuntimeError: CUDA error: an illegal memory access" in logs
    finally:
        server.stop(store)
