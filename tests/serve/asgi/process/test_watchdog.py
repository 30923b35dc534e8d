"""An engine that hangs in a server: it is found whatever else is asked, and SIGTERM does not wait for it."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.hostile.pictures import encoded
from serve.common.options import ServingOptions
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts
from tests.serve.own_process import IMAGE, Server, running

RESPONSE_S = 1
HANGS = encoded(Image.new("RGB", (60, 45), "white"), quality=95)


class HangsAtWhite(nn.Module):
    """A network that computes for ever where an image is white."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.jit.trace(artifacts.small_network(), torch.zeros(1, 3, 32, 32))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        while bool(images.amin((1, 2, 3)).amax() > 1.9):
            images = images.abs()
        logits: torch.Tensor = self.network(images)
        return logits


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hangs")
    artifact = folder / "artifact"
    artifact.mkdir()
    torch.jit.script(HangsAtWhite()).save(str(artifact / "model.pt"))
    artifacts.write_artifact(artifact, "hangs", "torchscript", "model.pt")
    options = ServingOptions(batch_size=4, response_timeout_s=RESPONSE_S)
    build_archive(artifact, folder / "m.mar", model_name="m", options=options)
    return folder / "m.mar"


def hang(server: Server) -> None:
    """Have its engine hang: what was asked before is answered, and who asks for that is given up."""
    with server.client() as client:
        assert client.post("/predictions/m", content=IMAGE).status_code == 200
        assert client.post("/predictions/m", content=HANGS).status_code == 504


@pytest.mark.parametrize(("contents", "told"), [([IMAGE] * 3, {503, 504}), ([b"no image"], {415})])
def test_it_is_found_though_other_requests_are_given_up_or_refused_meanwhile(
    contents: list[bytes], told: set[int], archive: Path
) -> None:
    with running(archive.parent, str(archive), "--no-token", "--drain-timeout", "1") as server:
        statuses: Counter[int] = Counter()

        def ask(content: bytes) -> None:
            with server.client() as client:
                while True:
                    try:
                        statuses[client.post("/predictions/m", content=content).status_code] += 1
                    except httpx.TransportError:  # it ended
                        return
                    time.sleep(0.05)

        hang(server)
        asking = [threading.Thread(target=ask, args=(content,)) for content in contents]
        for thread in asking:
            thread.start()
            time.sleep(RESPONSE_S / 3)  # so that one of them is given up now and then
        assert server.process.wait(30) == 1
        for thread in asking:
            thread.join()
    assert statuses
    assert set(statuses) <= told
    assert sum("while others wait: the server ends, to be restarted" in line for line in server.lines) == 1


def test_told_to_end_the_server_does_not_wait_for_it(archive: Path) -> None:
    with running(archive.parent, str(archive), "--no-token", "--drain-timeout", "2") as server:
        hang(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 1
    assert sum("not all accepted requests were answered in time" in line for line in server.lines) == 1
